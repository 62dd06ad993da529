"""A plan for TPUs without a TPU: does it fit, what does a round cost, which K pays.

The deployed programs are compiled for a described slice from configs alone. Memory is
the compiler's own account; traffic is counted over the compiled loop (see `traffic`);
times are the larger of what the chip's memory, arithmetic and links would need. They
are predictions of a model, to choose by, and no measurement.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specdec_jax import theory
from specdec_jax.checkpoints.load import model_from_config
from specdec_jax.plan.chips import Chip, find_chip

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""What the compiler reads instead of asking a machine that it is not on."""


def plan(
    target_config: str | Path,
    draft_config: str | Path | None = None,
    *,
    topology: str,
    mesh: str,
    batch_size: int = 8,
    context_length: int = 4096,
    num_draft_tokens: int = 4,
    dtype: str = "bfloat16",
    draft_sharding: str = "target",
    alpha: float = 0.7,
) -> dict[str, Any]:
    """Compiles a target and its draft for a TPU slice, and says what that comes to.

    Args:
      target_config: Hugging Face's config.json of the target.
      draft_config: The same of the draft; None drafts by n-grams.
      topology: The slice, as "v5e:2x4".
      mesh: How it is used, as "data=1,model=8".
      batch_size: Rows in all.
      context_length: The longest text, prompt and new tokens.
      num_draft_tokens: K.
      dtype: Of weights, caches and arithmetic.
      draft_sharding: See `sharding.Placement`.
      alpha: Acceptance rate to assume; `specdec calibrate` measures it.

    Returns:
      Plain values: fits, hbm_bytes, largest, round, predicted; all of one chip.

    Raises:
      FileNotFoundError: There is no such config file.
      ValueError: libtpu is not installed; a config, topology or mesh is none; or a
        size is out of range.
    """
    _check(batch_size, context_length, num_draft_tokens, alpha)
    chip = find_chip(topology)
    configs = {"target_config": target_config, "draft_config": draft_config}
    for path in configs.values():
        if path is not None:
            model_from_config(path, dtype)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "a TPU plan needs the compiler of libtpu, which is not installed; run "
            "pip install 'specdec-jax[tpu-plan]'"
        )
    request = {name: path and str(path) for name, path in configs.items()} | {
        "topology": topology,
        "mesh": mesh,
        "batch_size": batch_size,
        "context_length": context_length,
        "num_draft_tokens": num_draft_tokens,
        "dtype": dtype,
        "draft_sharding": draft_sharding,
    }
    found = _ask(request)
    return _summary(found, request, chip, alpha)


def _check(batch_size: int, context_length: int, depth: int, alpha: float) -> None:
    sizes = {"batch_size": batch_size, "context_length": context_length}
    for name, size in (sizes | {"num_draft_tokens": depth}).items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; an acceptance rate is from 0 to 1")


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "specdec_jax.plan.programs"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    if done.returncode:
        raise ValueError(
            f"compiling for {request['topology']} failed (exit {done.returncode}): "
            f"{done.stderr.strip()[-2000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    if "error" in found:
        raise ValueError(found["error"])
    return found["answer"]


def _summary(
    found: Mapping[str, Any], request: Mapping[str, Any], chip: Chip, alpha: float
) -> dict[str, Any]:
    depth = request["num_draft_tokens"]
    memory = _memory(found, request, chip)
    passes = found["round"]
    whole, ideal = passes["round"], _ideal(found, request)
    flops = _flops(request, found)
    seconds = {
        "plain": _seconds(passes["pass_1"], flops["token"], chip),
        "verify": _seconds(
            passes[f"pass_{depth + 1}"], flops["token"] * (depth + 1), chip
        ),
        "draft": _seconds(passes["drafting"], flops["drafting"], chip) / depth,
    }
    return {
        **memory,
        "round": {
            "bytes_accessed": whole["bytes_accessed"],
            "ideal_bytes": ideal,
            "bytes_ratio": whole["bytes_accessed"] / ideal,
            "flops": flops["token"] * (depth + 1) + flops["drafting"],
            "collective_bytes": sum(whole["collectives"].values()),
            "collectives": whole["collectives"],
            "moved": whole["moved"],
        },
        "predicted": _predicted(seconds, depth, alpha),
        "undivided": found["undivided"],
        "config": {**request, "alpha": alpha},
    }


def _memory(
    found: Mapping[str, Any], request: Mapping[str, Any], chip: Chip
) -> dict[str, Any]:
    """Returns what lies on a chip while the hungrier of the two programs runs."""
    weights = found["weights"] + found["draft_weights"]
    caches = found["cache"] + found["draft_cache"]
    totals = {
        name: one["arguments"] + one["outputs"] + one["temporaries"] + one["code"]
        for name, one in found["programs"].items()
    }
    program = max(totals, key=totals.__getitem__)
    total = totals[program]
    rows = request["batch_size"]
    each = (total - weights) / rows
    fitting = int((chip.hbm_bytes - weights) // each) if each > 0 else 0
    context = request["context_length"] * fitting // rows
    return {
        "fits": total <= chip.hbm_bytes,
        "hbm_bytes": {
            "weights": weights,
            "cache": caches,
            "temporaries": found["programs"][program]["temporaries"],
            "total": total,
            "limit": chip.hbm_bytes,
            "left": chip.hbm_bytes - total,
            "hungriest_program": program,
        },
        "largest": {
            "batch_size": max(fitting, 0),
            "context_length": max(context, 0),
        },
        "programs": found["programs"],
    }


def _ideal(found: Mapping[str, Any], request: Mapping[str, Any]) -> float:
    """Weights once a forward, live cache once a forward that reads it, the logits."""
    depth, drafts = request["num_draft_tokens"], 0
    if found["draft_weights"]:
        each = found["draft_weights"] + found["draft_cache"] + found["logits"]
        drafts = depth * each
    verify = found["weights"] + found["cache"] + (depth + 1) * found["logits"]
    return float(verify + drafts)


def _flops(request: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Returns operations of one chip: two a weight and token, and of attention."""
    rows = request["batch_size"]
    itemsize = jnp.dtype(request["dtype"]).itemsize

    def token(weights: float | int, cache: float | int) -> float:
        # Each cached number is multiplied and added once for every query that reads it.
        return 2 * weights / itemsize * rows + 2 * cache / itemsize

    depth = request["num_draft_tokens"]
    draft = token(found["draft_weights"], found["draft_cache"])
    return {
        "token": token(found["weights"], found["cache"]),
        "drafting": depth * draft if found["draft_weights"] else 0.0,
    }


def _seconds(one: Mapping[str, Any], flops: float, chip: Chip) -> float:
    """Returns the roofline time of a pass: memory or arithmetic, and the links."""
    links = sum(one["collectives"].values()) / chip.link_bandwidth
    return max(one["bytes_accessed"] / chip.hbm_bandwidth, flops / chip.flops) + links


def _predicted(
    seconds: Mapping[str, float], depth: int, alpha: float
) -> dict[str, Any]:
    """Returns c, v(K) and what they are worth; v is taken as linear up to K."""
    cost_ratio = seconds["plain"] / max(seconds["draft"], 1e-12)
    factor = seconds["verify"] / seconds["plain"]
    slope = max(factor - 1, 0.0) / depth
    curve = theory.speedup(
        theory.constant_survival(alpha, theory.MAX_NUM_DRAFT_TOKENS),
        cost_ratio,
        theory.linear_verify_factor(slope, theory.MAX_NUM_DRAFT_TOKENS),
    )
    return {
        "seconds": dict(seconds),
        "cost_ratio": cost_ratio,
        "verify_factor": factor,
        "alpha": alpha,
        "speedup": float(curve[depth]),
        "best_num_draft_tokens": int(theory.best_num_draft_tokens(curve)),
    }

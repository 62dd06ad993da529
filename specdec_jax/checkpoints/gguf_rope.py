"""Rotary scaling of a GGUF file, as Hugging Face's `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.checkpoints.gguf_file import GGUFFile

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies, [head_dim / 2]."""


def rope_parameters(
    file: GGUFFile, keys: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Returns `rope_parameters`; refuses scaling that it cannot express.

    Args:
      file: The open file; its tensor of divisors is read if it has one.
      keys: Metadata keys of the architecture, without its prefix.
      head_dim: Size of a head, all of it rotated.

    Raises:
      ValueError: The scaling is none of: none, linear, plain yarn, Llama 3's.
    """
    theta = keys.get("rope.freq_base", 10_000.0)
    scaling = {
        key.removeprefix("rope.scaling."): value
        for key, value in keys.items()
        if key.startswith("rope.scal")
    }
    kind = scaling.pop("type", "linear")
    # Files of 2023 say it by the second key; a factor of 0 means 1.
    factor = scaling.pop("factor", scaling.pop("rope.scale_linear", 1.0)) or 1.0
    original = scaling.pop("original_context_length", None)
    scaling.pop("finetuned", None)
    found = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor}
        if original is not None:
            found["original_max_position_embeddings"] = original
        found |= _yarn_options(scaling)
    elif kind not in ("none", "linear"):
        scaling["type"] = kind
    if scaling:
        raise ValueError(
            f"{file.path}: rotary scaling {scaling} is not supported in GGUF files; "
            "supported: none, linear, plain yarn and Llama 3's; use the original "
            "checkpoint"
        )
    if FACTORS not in file.tensors:
        return found
    return _llama3(file, theta, head_dim, found)


def _yarn_options(scaling: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `scaling` what YaRN reads, and returns it in HF's names.

    llama.cpp multiplies 0.1 ln(factor) + 1, on cosine and sine, by its attention
    factor; Hugging Face replaces it. They agree where the file's factor is 1, so any
    other value stays in `scaling`.
    """
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if scaling.get(key) == 1.0:
            del scaling[key]
    return {
        key: scaling.pop(f"yarn_{key}")
        for key in ("beta_fast", "beta_slow")
        if f"yarn_{key}" in scaling
    }


def _llama3(
    file: GGUFFile, theta: float, head_dim: int, found: dict[str, Any]
) -> dict[str, Any]:
    """Returns the scaling that the divisors of the frequencies came from.

    The file keeps the divisors and not the four numbers behind them. All of Llama 3.1
    to 3.3 have low 1, high 4 and length 8192; the factor is the largest divisor. The
    guess stands only where it gives the file's divisors again.
    """
    factors = file.read(FACTORS)
    if np.all(factors == 1.0):
        return found
    low, high, length, factor = 1.0, 4.0, 8192, float(np.max(factors))
    turns = length / (2 * math.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    plain = found["rope_type"] == "default" and factors.shape == expected.shape
    if not plain or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: {FACTORS} is not Llama 3's rotary scaling, the only one "
            "supported; use the original checkpoint"
        )
    return found | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }

"""A large pair with random weights on one accelerator: what do its passes cost?

Weights do not change what a pass costs, so an 8B target and its 1B draft are made up
where they run, in bfloat16. Acceptance is forced by a table (a rule that looks at coins
alone, lossy on purpose), so that the speedup is that of a pair which agrees so often.

    python experiments/large_pair.py                 needs an accelerator with 24 GB
    python experiments/large_pair.py --tiny          the same on tiny shapes, anywhere

It prints the share of the memory's bandwidth that plain decoding reaches, v(K), c and
the speedup of each K, at batch 1 and 8, and writes results/large_pair.json.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import Sampling, SpeculativeDecoder
from specdec_jax.base import Params, Verdict
from specdec_jax.calibrate import calibrate
from specdec_jax.cli.environment import environment
from specdec_jax.drafters import ModelDrafter
from specdec_jax.networks import Decoder, DecoderConfig, Rotary
from specdec_jax.rng import draw

SHARED = dict(vocab_size=128_256, num_kv_heads=8, max_positions=8192, num_heads=32)
TARGET = dict(width=4096, num_layers=32, head_dim=128, mlp_width=14_336)
DRAFT = dict(width=2048, num_layers=16, head_dim=64, mlp_width=8192, tied=True)
TINY = dict(vocab_size=256, num_layers=2, width=64, num_heads=4, num_kv_heads=2)
TINY |= dict(head_dim=16, mlp_width=128, max_positions=1024)
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100": 3.35e12, "NVIDIA A100": 2.0e12}
"""Bytes a second, from the makers' data sheets."""


@dataclass(frozen=True)
class Forced:
    """Accepts every draft with the same chance, whatever the models say. Lossy."""

    rate: float
    lossless: ClassVar[bool] = False
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = ("none",)
    noise: ClassVar[str] = "round"

    def law(self, draft, target_log_probs):
        """Nobody is to mistake this for a law."""
        raise NotImplementedError("acceptance is forced, there is no law to speak of")

    def __call__(self, noise, draft, target_log_probs):
        """Draws the verdict from coins alone."""
        slots = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
        heads = jax.vmap(noise.uniform)(slots) < self.rate
        kept = jnp.cumprod((heads & (slots < draft.num_valid)).astype(jnp.int32))
        count = kept.sum(dtype=jnp.int32)
        return Verdict(count, draw(target_log_probs[count], noise, count), slots)


def make(seed, dtype, **shape):
    """Returns a decoder and its random variables, made on the device."""
    half = shape["head_dim"] // 2
    turns = tuple(5e5 ** (-i / half) for i in range(half))
    model = Decoder(DecoderConfig(rotary=Rotary(turns), **shape), jnp.dtype(dtype))
    tokens = jnp.zeros((1, 1), jnp.int32)
    init = jax.jit(lambda key: model.init(key, tokens, model.init_cache(1, 1)))
    return model, init(jax.random.key(seed))


def measure(tiny, rate, lengths, new_tokens):
    """Returns a calibration at batch 1 and 8."""
    shapes = [TINY, TINY | {"num_layers": 1}]
    if not tiny:
        shapes = [SHARED | TARGET, SHARED | DRAFT]
    dtype = "float32" if tiny else "bfloat16"
    (target, params), (draft, small) = (
        make(seed, dtype, **shape) for seed, shape in enumerate(shapes)
    )
    decoder = SpeculativeDecoder(
        target,
        Params(params, small),
        drafter=ModelDrafter(draft, max(lengths)),
        rule=Forced(rate),
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    prompts = np.random.default_rng(0).integers(0, 256, (8, 64)).tolist()
    found = {}
    for batch_size in (1, 8):
        one = calibrate(
            decoder,
            prompts[:batch_size],
            lengths=lengths,
            max_new_tokens=new_tokens,
            sampling=Sampling(temperature=1.0),
            batch_size=batch_size,
        ).summary()
        kind = jax.devices()[0].device_kind
        peak = next((b for name, b in BANDWIDTH.items() if name in kind), None)
        reached = weights / one["step_seconds"]
        one["bytes_per_second"] = reached
        one["bandwidth_share"] = reached / peak if peak else None
        found[str(batch_size)] = one
        print(f"batch {batch_size}: plain {1e3 * one['step_seconds']:.2f} ms a step")
        print(f"  {reached / 1e9:.0f} GB/s of weights, share {one['bandwidth_share']}")
        for key in ("cost_ratio", "verify_factor", "measured_speedup"):
            print(f"  {key}: {one[key]}")
    return found


def main(argv=None):
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, not stored")
    parser.add_argument("--rate", type=float, default=0.8, help="forced acceptance")
    parser.add_argument("--lengths", type=int, nargs="+", default=range(9))
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and not options.tiny:
        parser.error("an 8B model needs an accelerator; try --tiny")
    lengths = sorted({0, *options.lengths})
    found = measure(options.tiny, options.rate, lengths, options.new_tokens)
    if not options.tiny:
        path = Path(__file__).parent / "results" / "large_pair.json"
        record = {"rate": options.rate, "batches": found, "environment": environment()}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()

"""Exact speculative decoding in JAX and Flax.

>>> import specdec_jax
>>> specdec_jax.Sampling(temperature=0.8, top_p=0.9).top_p
0.9
"""

from typing import Any

from specdec_jax import decode
from specdec_jax.acceptance import RULES, Coupled, Rejection
from specdec_jax.base import Params
from specdec_jax.compilation import enable_compilation_cache
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specdec_jax.sampling import Sampling
from specdec_jax.text import (
    NonFiniteLogitsError,
    Piece,
    Result,
    SpeculativeDecoder,
)

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Coupled",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "NonFiniteLogitsError",
    "Params",
    "Piece",
    "Rejection",
    "Result",
    "Sampling",
    "SpeculativeDecoder",
    "decode",
    "enable_compilation_cache",
    "load",
]


def __getattr__(name: str) -> Any:
    """Finds `load` when it is first used: it brings transformers in."""
    if name == "load":
        from specdec_jax.checkpoints import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

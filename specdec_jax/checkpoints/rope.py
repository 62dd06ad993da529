"""Rotary frequencies of Hugging Face configs, old keys and new.

Scaled variants change the frequencies once, at load: none depends on the length of a
call, or a token's logits would depend on its block-mates. `dynamic` does depend on it
and is refused. `longrope` has one set of factors up to the original length and another
beyond; transformers switches in mid-text, we decide at load, by `context_length`.

References: positional interpolation (Chen et al. 2023), YaRN (Peng et al. 2023),
LongRoPE (Ding et al. 2024), Llama 3.1.
"""

import math
from typing import Any

import numpy as np

from specdec_jax.checkpoints.settings import Settings
from specdec_jax.networks import Rotary

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


def rotary(
    settings: Settings,
    head_dim: int,
    max_positions: int,
    context_length: int | None = None,
    theta: float = 10_000.0,
) -> tuple[Rotary, int]:
    """Returns the rotary embedding, and how many positions it is good for.

    Args:
      settings: The config; `rope_parameters`, or `rope_theta` with `rope_scaling`.
      head_dim: Size of a head, all of it rotated.
      max_positions: `max_position_embeddings`.
      context_length: The longest text wanted. For `longrope` it decides: None or up to
        the original length gives the short factors and that length as limit, more
        gives the long factors, for short texts too.
      theta: Base of the frequencies where the config gives none.

    Raises:
      ValueError: A kind that is not supported, or a parameter that is not understood.
    """
    given = dict(settings.take("rope_parameters") or settings.take("rope_scaling", {}))
    settings.take("rope_scaling")
    given.setdefault("rope_theta", settings.take("rope_theta", theta))
    legacy = given.pop("type", "default")
    kind = given.pop("rope_type", legacy)
    if kind not in SUPPORTED:
        raise ValueError(
            f"{settings.name}: rotary scaling {kind!r} is not supported; supported: "
            f"{', '.join(SUPPORTED)}"
        )
    # transformers lets the outer key win.
    original = settings.take("original_max_position_embeddings")
    original = original or given.pop("original_max_position_embeddings", max_positions)
    given.pop("original_max_position_embeddings", None)
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    base = float(given.pop("rope_theta"))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(np.float32(base), exponents)
    scale, limit = 1.0, max_positions
    try:
        if kind == "default":
            frequencies = 1 / periods
        elif kind == "linear":
            frequencies = 1 / periods / np.float32(given.pop("factor"))
        elif kind == "llama3":
            frequencies = _llama3(given, 1 / periods, original)
        elif kind == "yarn":
            frequencies, scale = _yarn(given, periods, base, original, max_positions)
        else:
            use_long = (context_length or 0) > original
            limit = max_positions if use_long else min(original, max_positions)
            frequencies, scale = _longrope(
                given, periods, use_long, original, max_positions
            )
    except KeyError as error:
        raise ValueError(
            f"{settings.name}: rotary scaling {kind!r} lacks {error}"
        ) from None
    rest = {key: value for key, value in given.items() if value is not None}
    if rest:
        raise ValueError(
            f"{settings.name}: rotary scaling {kind!r} has parameters that are not "
            f"supported: {rest}"
        )
    return Rotary(tuple(map(float, frequencies)), float(scale)), limit


def _llama3(given: dict[str, Any], frequencies: np.ndarray, original: int):
    """Divides the slow frequencies, keeps the fast, blends between (Llama 3.1)."""
    factor, low = given.pop("factor"), given.pop("low_freq_factor")
    high = given.pop("high_freq_factor")
    turns = original * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(
    given: dict[str, Any],
    periods: np.ndarray,
    base: float,
    original: int,
    max_positions: int,
) -> tuple[np.ndarray, float]:
    """Blends by dimension between divided and plain frequencies (YaRN, eq. 23)."""
    factor = float(given.pop("factor") or max_positions / original)
    scale = _yarn_scale(given, factor)
    fast = float(given.pop("beta_fast", None) or 32)
    slow = float(given.pop("beta_slow", None) or 1)
    dims = 2 * len(periods)

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the original length."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(fast), pair_of(slow)
    if given.pop("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high += 0.001 if low == high else 0.0
    blend = np.clip(
        (np.arange(len(periods), dtype=np.float32) - low) / (high - low), 0, 1
    )
    return (blend / factor + (1 - blend)) / periods, scale


def _yarn_scale(given: dict[str, Any], factor: float) -> float:
    """The factor on cosine and sine; a value in the config wins (YaRN, eq. 22)."""

    def by(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    stated = given.pop("attention_factor", None)
    top, bottom = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if stated is not None:
        return float(stated)
    return by(float(top)) / by(float(bottom)) if top and bottom else by(1.0)


def _longrope(
    given: dict[str, Any],
    periods: np.ndarray,
    use_long: bool,
    original: int,
    max_positions: int,
) -> tuple[np.ndarray, float]:
    """Divides each frequency by a factor of its own (LongRoPE)."""
    long, short = given.pop("long_factor"), given.pop("short_factor")
    factor = given.pop("factor", None) or max_positions / original
    scale = given.pop("attention_factor", None)
    if scale is None:
        stretch = math.log(max(factor, 1.0)) / math.log(original)
        scale = math.sqrt(1 + stretch)
    factors = np.asarray(long if use_long else short, np.float32)
    return 1 / (factors * periods), float(scale)

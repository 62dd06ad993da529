"""A table language model that can be worked out exactly, and sees every slot.

Its logits are `table[last token, code]`, where the code mixes *all* visible slots with
their positions. A stale slot, a hole in the cache, a wrong position or a wrong mask
changes the code and so the law; nothing is rounded, so equal means bitwise equal.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from specdec_jax.base import ModelOutput, Variables

CODES = 13


class TableCache(NamedTuple):
    """The tokens read and the positions they were read at."""

    length: Int[Array, " B"]
    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    def rewind(self, length: Int[Array, " B"]) -> "TableCache":
        """See `base.Cache`."""
        return self._replace(length=length)

    def commit(self, start: Int[Array, " B"], path: Int[Array, "B P"]) -> "TableCache":
        """See `base.Cache`."""
        rows = jnp.arange(len(start), dtype=jnp.int32)[:, None]
        source = start[:, None] + path
        slots = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        return self._replace(
            tokens=self.tokens.at[rows, slots].set(self.tokens[rows, source]),
            positions=self.positions.at[rows, slots].set(self.positions[rows, source]),
        )


@dataclass(frozen=True)
class TableModel:
    """A `base.LanguageModel`; its variables come from `table`."""

    vocab_size: int

    def init_cache(self, batch_size: int, capacity: int) -> TableCache:
        """Returns a cache full of garbage: reading an unwritten slot is noticed."""
        junk = jnp.full((batch_size, capacity), 5, jnp.int32)
        return TableCache(jnp.zeros((batch_size,), jnp.int32), junk, jnp.copy(junk))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        table = variables["params"]["table"]
        batch, size = tokens.shape
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        steps = jnp.arange(size, dtype=jnp.int32)[None]
        depth = jnp.broadcast_to(steps, (batch, size)) if block is None else block.depth
        # Slots of the same tree that earlier calls have read.
        before = depth.shape[1] - size
        start = cache.length - before
        slots = cache.length[:, None] + steps
        position = start[:, None] + depth[:, before:]
        cache = TableCache(
            cache.length + size,
            cache.tokens.at[rows, slots].set(tokens, mode="promise_in_bounds"),
            cache.positions.at[rows, slots].set(position, mode="promise_in_bounds"),
        )
        visible = _visible(slots, start, cache.tokens.shape[1], block)
        marks = (cache.tokens + 1) * (3 * cache.positions + 2) + cache.tokens**2
        code = jnp.where(visible, marks[:, None, :], 0).sum(-1) % CODES
        hidden = code[..., None].astype(jnp.float32)
        output = ModelOutput(table[tokens, code], tuple(hidden for _ in hidden_layers))
        return output, cache


def _visible(slots, start, capacity, block):
    """Returns which cache slots each block token sees, [B, S, T]."""
    every = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    if block is None:
        return every <= slots[..., None]
    start, size = start[:, None, None], block.depth.shape[1]
    inside = jnp.take_along_axis(
        block.ancestors[:, size - slots.shape[1] :],
        jnp.clip(every - start, 0, size - 1) + jnp.zeros_like(slots)[..., None],
        axis=2,
    )
    inside &= (every >= start) & (every < start + size)
    return (every < start) | inside


def table(
    key: Key[Array, ""], vocab_size: int, scale: float = 1.0, dtype: Any = jnp.float32
) -> Variables:
    """Returns random variables; a larger scale makes peakier laws."""
    shape = (vocab_size, CODES, vocab_size)
    logits = scale * jax.random.normal(key, shape, jnp.float32)
    return {"params": {"table": logits.astype(dtype)}}


def mix(one: Variables, other: Variables, weight: float) -> Variables:
    """Returns variables between two; weight 1 is `one`. Drafts of any quality."""
    return jax.tree.map(lambda a, b: weight * a + (1 - weight) * b, one, other)

"""A table language model that can be worked out exactly, and sees every slot.

Its logits are `table[last token, code]`, where the code mixes *all* visible slots with
their positions. A stale slot, a hole in the cache, a wrong position or a wrong mask
changes the code and so the law; nothing is rounded, so equal means bitwise equal.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import ModelOutput

CODES = 13


class ToyCache(NamedTuple):
    length: jax.Array
    tokens: jax.Array
    positions: jax.Array

    def rewind(self, length):
        return self._replace(length=length)

    def commit(self, start, path):
        rows = jnp.arange(len(start))[:, None]
        source = start[:, None] + path
        slots = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        return self._replace(
            tokens=self.tokens.at[rows, slots].set(self.tokens[rows, source]),
            positions=self.positions.at[rows, slots].set(self.positions[rows, source]),
        )


@dataclass(frozen=True)
class TableModel:
    """A `base.LanguageModel`; `variables` come from `table(...)`."""

    vocab_size: int

    def init_cache(self, batch_size, capacity):
        # Garbage everywhere: reading an unwritten slot changes the code.
        junk = jnp.full((batch_size, capacity), 5, jnp.int32)
        return ToyCache(jnp.zeros((batch_size,), jnp.int32), junk, jnp.copy(junk))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        table = variables["params"]["table"]
        batch, size = tokens.shape
        rows = jnp.arange(batch)[:, None]
        steps = jnp.arange(size, dtype=jnp.int32)[None]
        depth = jnp.broadcast_to(steps, (batch, size)) if block is None else block.depth
        slots = cache.length[:, None] + steps
        position = cache.length[:, None] + depth
        cache = ToyCache(
            cache.length + size,
            cache.tokens.at[rows, slots].set(tokens, mode="promise_in_bounds"),
            cache.positions.at[rows, slots].set(position, mode="promise_in_bounds"),
        )
        capacity = cache.tokens.shape[1]
        every = jnp.arange(capacity)[None, None]
        start = slots[:, :1, None]
        if block is None:
            visible = every <= slots[..., None]
        else:
            inside = jnp.take_along_axis(
                block.ancestors,
                jnp.clip(every - start, 0, size - 1) + jnp.zeros_like(slots)[..., None],
                axis=2,
            )
            inside &= (every >= start) & (every < start + size)
            visible = (every < start) | inside
        marks = (cache.tokens + 1) * (3 * cache.positions + 2) + cache.tokens**2
        code = jnp.where(visible, marks[:, None, :], 0).sum(-1) % CODES
        logits = table[tokens, code]
        hidden = code[..., None].astype(jnp.float32)
        return ModelOutput(logits, tuple(hidden for _ in hidden_layers)), cache


def table(key, vocab_size, scale=1.0, dtype=jnp.float32):
    """Returns random variables; a larger scale makes peakier laws."""
    shape = (vocab_size, CODES, vocab_size)
    logits = scale * jax.random.normal(key, shape, jnp.float32)
    return {"params": {"table": logits.astype(dtype)}}


def mix(one, other, weight):
    """Returns variables between two; weight 1 is `one`. Drafts of any quality."""
    return jax.tree.map(lambda a, b: weight * a + (1 - weight) * b, one, other)


def next_logits(model, variables, contexts):
    """Returns float64 logits [C, V] after each context, worked out in numpy."""
    logits = np.asarray(variables["params"]["table"], np.float64)
    rows = []
    for context in contexts:
        tokens, positions = np.array(context), np.arange(len(context))
        marks = (tokens + 1) * (3 * positions + 2) + tokens**2
        rows.append(logits[tokens[-1], marks.sum() % CODES])
    return np.stack(rows)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def joint_law(model, variables, prompt, length, temperature=1.0):
    """Returns P(the next `length` tokens), an array of V^length, by enumeration."""
    vocab = range(model.vocab_size)
    law = np.ones(())
    for size in range(length):
        contexts = [(*prompt, *tail) for tail in itertools.product(vocab, repeat=size)]
        probs = softmax(next_logits(model, variables, contexts) / temperature)
        law = law[..., None] * probs.reshape(law.shape + (model.vocab_size,))
    return law

"""Bigram and unigram tables counted on a corpus: the papers' baseline drafts.

Leviathan et al. (arXiv:2211.17192, 4.1) report that a bigram table, whose cost is next
to nothing, still has alpha near .2. A table of V x V laws does not fit (V = 49,152:
9.7 GB), so each token keeps its `top` likeliest followers and the rest is the unigram
law, scaled to what is left:

    q(v | t) = kept[t, v]                            v among the followers kept of t
             = left[t] * unigram(v)                  otherwise

which takes (2 top + 2) V numbers: 13 MB for V = 49,152 and top = 32. Before it is cut,
kept[t, v] is (count(t, v) + s u(v)) / (count(t) + s), the unigram u as a prior worth s
observations (`smoothing`).

A table is a `base.LanguageModel` whose variables come from `fit_bigram` or
`fit_unigram`: `ModelDrafter(LookupTable(V), K)` drafts with it, and composed drafters
take it as any other model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specdec_jax.base import ModelOutput, Variables


class LengthCache(NamedTuple):
    """The cache of a model that looks at one token only; satisfies `base.Cache`."""

    length: Int[Array, " B"]

    def rewind(self, length: Int[Array, " B"]) -> "LengthCache":
        """See `base.Cache`."""
        return LengthCache(length)

    def commit(self, start: Int[Array, " B"], path: Int[Array, "B P"]) -> "LengthCache":
        """See `base.Cache`."""
        return self


@dataclass(frozen=True)
class LookupTable:
    """Scores the next token by the last one alone.

    Args:
      vocab_size: V, that of the variables.
    """

    vocab_size: int

    def init_cache(self, batch_size: int, capacity: int) -> LengthCache:
        """Returns an empty cache; it holds no token."""
        return LengthCache(jnp.zeros((batch_size,), jnp.int32))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`; chains and trees are the same to it.

        Raises:
          ValueError: For a hidden layer.
        """
        if hidden_layers:
            raise ValueError("a table of laws has no hidden layers")
        params = variables["params"]
        rows = params["left"][tokens][..., None] + params["unigram"][None, None]
        batch, size = tokens.shape
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        step = jnp.arange(size, dtype=jnp.int32)[None, :, None]
        # Tokens with fewer followers are padded with ids past the vocabulary.
        logits = rows.at[row, step, params["followers"][tokens]].set(
            params["kept"][tokens], mode="drop"
        )
        return ModelOutput(logits), LengthCache(cache.length + size)


def fit_unigram(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> Variables:
    """Returns the variables of a `LookupTable` that gives one law after every token.

    Args:
      token_ids: The corpus.
      vocab_size: V; each token is counted once more than it occurs.

    Raises:
      ValueError: The corpus is empty, or has ids outside the vocabulary.
    """
    return fit_bigram(token_ids, vocab_size, top=0)


def fit_bigram(
    token_ids: Sequence[int] | np.ndarray,
    vocab_size: int,
    *,
    smoothing: float = 1.0,
    top: int = 32,
) -> Variables:
    """Returns the variables of a `LookupTable`, counted on a corpus.

    Args:
      token_ids: The corpus, in the target's ids.
      vocab_size: V.
      smoothing: Observations that the unigram law is worth after each token.
      top: Followers kept a token.

    Raises:
      ValueError: The corpus is empty or has ids outside the vocabulary, or a number is
        out of range.

    Example:
      After 1 the corpus has 2 twice and 0 once:

      >>> variables = fit_bigram([1, 2, 1, 2, 1, 0], 3, smoothing=1e-6)
      >>> output, _ = LookupTable(3).apply(
      ...     variables, jnp.array([[1]]), LookupTable(3).init_cache(1, 8))
      >>> [round(q, 2) for q in jnp.exp(output.logits)[0, 0].tolist()]
      [0.33, 0.0, 0.67]
    """
    ids = np.asarray(token_ids, np.int64)
    if ids.ndim != 1 or not len(ids):
        raise ValueError("the corpus of a table is empty; give some text")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"the corpus has ids {ids.min()} to {ids.max()} and the vocabulary is "
            f"{vocab_size}; tokenise it with the target's tokenizer"
        )
    if not smoothing > 0 or top < 0:
        raise ValueError(
            f"smoothing must be above 0 and top at least 0, got {smoothing} and {top}"
        )
    unigram = (np.bincount(ids, minlength=vocab_size) + 1.0) / (len(ids) + vocab_size)
    followers, kept = _followers(ids, unigram, smoothing, top)
    known = np.append(unigram, 0.0)[followers].sum(axis=1)
    left = (1 - np.exp(kept).sum(axis=1)) / np.maximum(1 - known, 1e-12)
    log_left = np.log(np.maximum(left, 1e-12))
    return {
        "params": {
            "unigram": jnp.asarray(np.log(unigram), jnp.float32),
            "left": jnp.asarray(log_left, jnp.float32),
            "followers": jnp.asarray(followers, jnp.int32),
            "kept": jnp.asarray(kept, jnp.float32),
        }
    }


def _followers(
    ids: np.ndarray, unigram: np.ndarray, smoothing: float, top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest followers of each token and their log-probabilities."""
    vocab_size = len(unigram)
    followers = np.full((vocab_size, top), vocab_size)
    kept = np.full((vocab_size, top), -np.inf)
    pairs, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
    first, second = pairs // vocab_size, pairs % vocab_size
    totals = np.bincount(ids[:-1], minlength=vocab_size)
    probs = (counts + smoothing * unigram[second]) / (totals[first] + smoothing)
    order = np.lexsort((second, -probs, first))  # by token, the likeliest first
    first, second, probs = first[order], second[order], probs[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    best = rank < top
    followers[first[best], rank[best]] = second[best]
    kept[first[best], rank[best]] = np.log(probs[best])
    return followers, kept


def frequent_ids(
    token_ids: Sequence[int] | np.ndarray,
    vocab_size: int,
    num_ids: int,
    among: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """Returns the ids that a corpus has most often, in ascending order.

    Ties go to the lower id: byte-pair vocabularies number their tokens in the order of
    merging, the most frequent first. So an empty corpus is an answer too.

    Args:
      token_ids: The corpus.
      vocab_size: V.
      num_ids: How many are wanted.
      among: The ids to choose from; None for all.

    Example:
      >>> frequent_ids([5, 5, 2, 7], 9, 3).tolist()
      [2, 5, 7]
      >>> frequent_ids([], 9, 3).tolist()
      [0, 1, 2]
    """
    counts = np.bincount(np.asarray(token_ids, np.int64), minlength=vocab_size)
    ids = np.arange(vocab_size) if among is None else np.unique(among)
    return np.sort(ids[np.argsort(-counts[ids], kind="stable")[:num_ids]])

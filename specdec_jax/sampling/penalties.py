"""Changes to logits that depend on what a row has already said.

A verified block has S rows, and row s follows tokens that are not committed yet: the
drafts on the path to it. Each function here sees both parts, so that row s gets what
plain decoding would give it had the drafts been committed. A mask made once for a
whole block would let a draft repeat what the row before it has just said.

    tokens  a b c d . . . .      length 4        tail  x y z    tail_length 2
            `-----'                                    `-'
            committed, then ---------------------------> row s follows a b c d x y
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class History(NamedTuple):
    """What came before each of the S rows of a block."""

    tokens: Int[Array, "B T"]
    """Committed tokens, `[:length]` of each row; the rest is garbage."""
    length: Int[Array, " B"]
    tail: Int[Array, "B S P"]
    """Drafted tokens on the path to row s, in order; P may be 0."""
    tail_length: Int[Array, "B S"]
    """How many of them precede row s; the rest is garbage."""

    @classmethod
    def plain(cls, tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> "History":
        """Returns the history of one row that follows the committed tokens.

        Example:
          >>> History.plain(jnp.array([[5, 6, 0]]), jnp.array([2])).tail.shape
          (1, 1, 0)
        """
        batch = tokens.shape[0]
        tail = jnp.zeros((batch, 1, 0), tokens.dtype)
        return cls(tokens, length, tail, jnp.zeros((batch, 1), jnp.int32))

    @classmethod
    def chain(
        cls,
        tokens: Int[Array, "B T"],
        length: Int[Array, " B"],
        drafts: Int[Array, "B K"],
    ) -> "History":
        """Returns the history of the K + 1 rows that verify a chain of K drafts.

        Example:
          >>> history = History.chain(
          ...     jnp.array([[5, 6, 0]]), jnp.array([2]), jnp.array([[7, 8]])
          ... )
          >>> history.tail_length.tolist()
          [[0, 1, 2]]
        """
        batch, depth = drafts.shape
        shape = (batch, depth + 1, depth)
        tail = jnp.broadcast_to(drafts[:, None, :], shape)
        rows = jnp.arange(depth + 1, dtype=jnp.int32)
        return cls(
            tokens, length, tail, jnp.broadcast_to(rows[None], (batch, depth + 1))
        )


def token_counts(
    history: History, start: Int[Array, " B"], vocab_size: int
) -> Int[Array, "B S V"]:
    """Returns how often each token occurs from slot `start` on, drafts included.

    Ids outside the vocabulary count nowhere (a draft may know fewer tokens than its
    target).

    Example:
      >>> history = History.chain(
      ...     jnp.array([[1, 1, 2, 9]]), jnp.array([3]), jnp.array([[0]])
      ... )
      >>> token_counts(history, jnp.array([1]), 3).tolist()
      [[[0, 1, 1], [1, 1, 1]]]
    """
    tokens, length, tail, tail_length = history
    batch, slots = tokens.shape
    rows, path = tail.shape[1:]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    wanted = (slot >= start[:, None]) & (slot < length[:, None])
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    committed = jnp.zeros((batch, vocab_size), jnp.int32)
    committed = committed.at[row, _or_nowhere(tokens, wanted, vocab_size)].add(
        1, mode="drop"
    )
    counts = jnp.broadcast_to(committed[:, None], (batch, rows, vocab_size))
    if path == 0:
        return counts
    wanted = jnp.arange(path, dtype=jnp.int32)[None, None] < tail_length[..., None]
    index = row[..., None], jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    return counts.at[(*index, _or_nowhere(tail, wanted, vocab_size))].add(
        1, mode="drop"
    )


def repeat(
    logits: Float[Array, "B S V"],
    counts: Int[Array, "B S V"],
    penalty: Float[Array, " B"],
) -> Float[Array, "B S V"]:
    """Divides positive and multiplies negative logits of the tokens that occurred.

    The rule of CTRL (Keskar et al. 2019, section 4.1) with the correction for negative
    logits that Hugging Face uses. A penalty of 1 changes nothing.

    Example:
      >>> logits = jnp.array([[[2.0, -2.0, 1.0]]])
      >>> counts = jnp.array([[[1, 3, 0]]])
      >>> repeat(logits, counts, jnp.array([2.0])).tolist()
      [[[1.0, -4.0, 1.0]]]
    """
    factor = penalty.astype(logits.dtype)[:, None, None]
    penalised = jnp.where(logits < 0, logits * factor, logits / factor)
    return jnp.where(counts > 0, penalised, logits)


def occur(
    logits: Float[Array, "B S V"],
    counts: Int[Array, "B S V"],
    presence: Float[Array, " B"] | None,
    frequency: Float[Array, " B"] | None,
) -> Float[Array, "B S V"]:
    """Subtracts a penalty once, or once for every occurrence.

    Args:
      logits: In nats.
      counts: Occurrences among the generated tokens.
      presence: Subtracted from each token that occurred; None is 0.
      frequency: Subtracted for each occurrence; None is 0.

    Returns:
      The penalised logits.

    Example:
      >>> logits, counts = jnp.zeros((1, 1, 3)), jnp.array([[[0, 1, 3]]])
      >>> (-occur(logits, counts, jnp.array([0.5]), jnp.array([0.25]))).tolist()
      [[[-0.0, 0.75, 1.25]]]
    """
    if frequency is not None:
        weight = frequency.astype(logits.dtype)[:, None, None]
        logits = logits - weight * counts.astype(logits.dtype)
    if presence is not None:
        weight = presence.astype(logits.dtype)[:, None, None]
        logits = logits - weight * (counts > 0).astype(logits.dtype)
    return logits


def completes_ngram(
    history: History, size: Int[Array, " B"], vocab_size: int
) -> Bool[Array, "B S V"]:
    """Marks tokens that would complete an n-gram which the row already contains.

    Args:
      history: Tokens before each row; n-grams may cross from tokens into the tail.
      size: The n of each row; 0 marks nothing, 1 marks every token that occurred.
      vocab_size: V.

    Returns:
      True where a token is to be forbidden.

    Example:
      After 1 2 3 1, the token 2 would repeat the pair (1, 2):

      >>> history = History.plain(jnp.array([[1, 2, 3, 1]]), jnp.array([4]))
      >>> completes_ngram(history, jnp.array([2]), 4).tolist()
      [[[False, False, True, False]]]
    """
    text, length = _joined(history)
    batch, rows, slots = text.shape
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    size = size[:, None, None]

    def compare(back: Array, matches: Array) -> Array:
        """Keeps slot e if text[e - back] is the token `back` before the end."""
        end = jnp.take_along_axis(text, jnp.maximum(length - back, 0)[..., None], -1)
        return matches & ((back >= size) | (jnp.roll(text, back, axis=-1) == end))

    # Slot e ends an n-gram; it has n - 1 slots before it and lies inside the text.
    ends = (slot >= size - 1) & (slot < length[..., None]) & (size > 0)
    most = jnp.minimum(jnp.max(size), slots)
    ends = lax.fori_loop(jnp.int32(1), most, compare, ends)
    index = (
        jnp.arange(batch, dtype=jnp.int32)[:, None, None],
        jnp.arange(rows, dtype=jnp.int32)[None, :, None],
    )
    marks = jnp.zeros((batch, rows, vocab_size), bool)
    return marks.at[(*index, _or_nowhere(text, ends, vocab_size))].set(
        True, mode="drop"
    )


def too_early(
    history: History,
    min_length: Int[Array, " B"],
    eos_token_ids: Int[Array, "B E"],
    vocab_size: int,
) -> Bool[Array, "B S V"]:
    """Marks the EOS ids at rows whose text is shorter than `min_length` tokens.

    Example:
      >>> history = History.chain(
      ...     jnp.array([[1, 2]]), jnp.array([2]), jnp.array([[3]])
      ... )
      >>> too_early(history, jnp.array([3]), jnp.array([[0, -1]]), 2).tolist()
      [[[True, False], [False, False]]]
    """
    token = jnp.arange(vocab_size, dtype=jnp.int32)[None, None]
    is_eos = jnp.any(eos_token_ids[..., None] == token, axis=1)
    short = history.length[:, None] + history.tail_length < min_length[:, None]
    return short[..., None] & is_eos[:, None]


def _or_nowhere(tokens: Array, wanted: Array, vocab_size: int) -> Array:
    """Sends unwanted and impossible ids to V, which a dropping scatter ignores.

    A negative index would wrap around to the end of the vocabulary.
    """
    return jnp.where(wanted & (tokens >= 0), tokens, vocab_size)


def _joined(history: History) -> tuple[Int[Array, "B S L"], Int[Array, "B S"]]:
    """Returns each row's whole text, tail behind the committed tokens, and lengths."""
    tokens, length, tail, tail_length = history
    batch, slots = tokens.shape
    rows, path = tail.shape[1:]
    text = jnp.pad(tokens, ((0, 0), (0, path)))
    text = jnp.broadcast_to(text[:, None], (batch, rows, slots + path))
    if path:
        index = (
            jnp.arange(batch, dtype=jnp.int32)[:, None, None],
            jnp.arange(rows, dtype=jnp.int32)[None, :, None],
        )
        slot = length[:, None, None] + jnp.arange(path, dtype=jnp.int32)[None, None]
        text = text.at[(*index, slot)].set(tail.astype(text.dtype), mode="drop")
    return text, length[:, None] + tail_length

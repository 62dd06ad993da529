"""The state of a batch of requests, and how it is made, cut and joined.

Rows are axis 0 of every leaf: settings, keys and limits included. So taking, inserting
and freezing rows are tree maps that serve every model and every drafter.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from specdec_jax import rng
from specdec_jax.base import Cache, Drafter, Inputs, LanguageModel, Params, PyTree
from specdec_jax.sampling import Sampling, SamplingRows

PREFILL_CHUNK = 128
"""Tokens of the prompt read by one forward pass; prompt length enters no shape."""

RUNNING, EOS, LENGTH, ERROR, STOP = range(5)
"""Values of `DecodeState.finish`. STOP is set from outside, through `freeze`."""

PROMPT, ACCEPTED, CORRECTED, BONUS = range(4)
"""Values of `DecodeState.origin`: where each token came from."""


class Counts(NamedTuple):
    """Sums over the rounds of each row, of emitted tokens only."""

    rounds: Int[Array, " B"]
    num_drafted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    """Emitted tokens that were drafted."""
    histogram: Int[Array, "B D"]
    """`[b, n]` rounds that emitted n drafted tokens, n = 0 .. depth."""


class DecodeState(NamedTuple):
    """All that the next round needs. Rows are axis 0 of every leaf."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    """Committed tokens, prompt included."""
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    """Length at which a row is full: prompt + max_new_tokens."""
    eos_token_ids: Int[Array, "B E"]
    """Ids that end a row; -1 is padding and matches nothing."""
    finish: Int[Array, " B"]
    """RUNNING, EOS, LENGTH, ERROR (non-finite logits at `length`) or STOP."""
    key: Key[Array, " B"]
    """The request's key; never consumed, every number is folded from it."""
    sampling: SamplingRows
    draft_sampling: SamplingRows | None
    """The draft's own policy settings; None: the target's."""
    cache: Cache
    drafter_state: PyTree
    log_probs: Float[Array, "B T"]
    """Log-probability of each emitted token under the raw model, in nats."""
    policy_log_probs: Float[Array, "B T"]
    """The same under the policy (temperature, filters and penalties applied)."""
    origin: Int[Array, "B T"]
    """PROMPT, ACCEPTED, CORRECTED or BONUS."""
    counts: Counts

    @property
    def done(self) -> Bool[Array, " B"]:
        """Rows that emit nothing any more."""
        return self.finish != RUNNING


def bucket(num_tokens: int, chunk: int = PREFILL_CHUNK) -> int:
    """Returns `chunk` times the least power of two that holds `num_tokens`.

    Example:
      >>> bucket(1), bucket(128), bucket(129), bucket(700)
      (128, 128, 256, 1024)
    """
    size = chunk
    while size < num_tokens:
        size *= 2
    return size


def buffer_capacity(
    num_tokens: int, drafter: Drafter, chunk: int = PREFILL_CHUNK
) -> int:
    """Returns T for prompt + max_new_tokens = `num_tokens`: no index is out of range.

    The last round may write `num_nodes + 1` slots from the last committed token on.
    Out-of-range updates are silent in JAX, so every buffer comes from this formula.
    """
    return bucket(num_tokens, chunk) + drafter.num_nodes + 1


def init(
    params: Params,
    key: Key[Array, "..."],
    prompts: Int[Array, "B S"],
    prompt_length: Int[Array, "..."],
    *,
    target: LanguageModel,
    drafter: Drafter,
    max_new_tokens: int | Int[Array, " B"],
    capacity: int | None = None,
    sampling: Sampling | SamplingRows | None = None,
    draft_sampling: Sampling | SamplingRows | None = None,
    eos_token_ids: Any = (),
    min_new_tokens: int = 0,
    inputs: Inputs | None = None,
) -> DecodeState:
    """Returns the state of requests of which nothing was read yet.

    Args:
      params: Variables of target and drafter.
      key: One typed key (request i uses `fold_in(key, i)`) or one a row. Not consumed.
      prompts: Right-padded token ids.
      prompt_length: [B], tokens of each prompt, at least 1.
      target: The model whose law the output has.
      drafter: Where proposals come from.
      max_new_tokens: Budget, at least 1; one for all or one a row.
      capacity: Slots T; by default `buffer_capacity(S + max_new_tokens, drafter)`, for
        which max_new_tokens must be an int. A given value must leave room likewise.
      sampling: The target's settings, as the user writes them or as rows already made;
        None is greedy.
      draft_sampling: The draft's; None uses the target's.
      eos_token_ids: Ids that end a row: a list for all, or [B, E] with -1 as padding.
      min_new_tokens: EOS ids are masked before that many new tokens.
      inputs: What the encoder reads, for encoder-decoder targets.

    Raises:
      ValueError: For shapes that do not fit together.
    """
    batch_size, width = prompts.shape
    if prompt_length.shape != (batch_size,):
        raise ValueError(
            f"{batch_size} prompts came with lengths of shape {prompt_length.shape}; "
            "give one length a row."
        )
    if capacity is None:
        if not isinstance(max_new_tokens, int):
            raise ValueError("with max_new_tokens a row, give the capacity as well.")
        capacity = buffer_capacity(width + max_new_tokens, drafter)
    if capacity < width:
        raise ValueError(f"capacity {capacity} is below the prompts' width {width}.")
    if capacity < width + drafter.num_nodes + 1:
        raise ValueError(
            f"capacity {capacity} leaves no room behind prompts of width {width} for a "
            f"draft of {drafter.num_nodes} nodes and the token after it; see "
            "`buffer_capacity`."
        )

    eos = jnp.asarray(eos_token_ids, jnp.int32)
    eos = jnp.broadcast_to(
        eos.reshape((1, -1)) if eos.ndim < 2 else eos, (batch_size, eos.shape[-1])
    )
    prompt_length = jnp.array(prompt_length, jnp.int32)

    def rows(settings):
        if isinstance(settings, SamplingRows):
            return jax.tree.map(jnp.copy, settings)
        return settings.rows(
            batch_size,
            target.vocab_size,
            prompt_length=prompt_length,
            eos_token_ids=eos,
            min_length=prompt_length + min_new_tokens if min_new_tokens else None,
        )

    cache = target.init_cache(batch_size, capacity)
    if inputs is not None:
        encoder: Any = target
        cache = encoder.apply(params.target, inputs, cache, method="encode")

    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros((batch_size, *shape), dtype)

    # No two leaves share a buffer, with each other or with the caller: states are
    # donated.
    return DecodeState(
        tokens=zeros(capacity).at[:, :width].set(prompts.astype(jnp.int32)),
        length=prompt_length,
        prompt_length=jnp.copy(prompt_length),
        limit=prompt_length + jnp.asarray(max_new_tokens, jnp.int32),
        eos_token_ids=eos,
        finish=zeros(),
        key=jnp.copy(rng.request_keys(key, batch_size)),
        sampling=rows(sampling or Sampling()),
        draft_sampling=None if draft_sampling is None else rows(draft_sampling),
        cache=cache,
        drafter_state=drafter.init(params, batch_size, capacity, inputs),
        log_probs=zeros(capacity, dtype=jnp.float32),
        policy_log_probs=zeros(capacity, dtype=jnp.float32),
        origin=zeros(capacity, dtype=jnp.int8),
        counts=Counts(zeros(), zeros(), zeros(), zeros(drafter.depth + 1)),
    )


def append(
    buffer: Shaped[Array, "B T ..."],
    length: Int[Array, " B"],
    new: Shaped[Array, "B M ..."],
    count: Int[Array, " B"],
) -> Shaped[Array, "B T ..."]:
    """Writes the first `count` of each row's new entries behind its length.

    Example:
      >>> tokens, new = jnp.array([[7, 0, 0], [7, 8, 0]]), jnp.array([[1, 2], [3, 4]])
      >>> append(tokens, jnp.array([1, 2]), new, jnp.array([2, 0])).tolist()
      [[7, 1, 2], [7, 8, 0]]
    """
    places = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    rows = jnp.arange(len(buffer), dtype=jnp.int32)[:, None]
    # What is not to be written goes out of range, where it is dropped.
    kept = places < count[:, None]
    slots = jnp.where(kept, length[:, None] + places, buffer.shape[1])
    return buffer.at[rows, slots].set(new.astype(buffer.dtype), mode="drop")


def take(state: PyTree, rows: Int[Array, " R"]) -> PyTree:
    """Returns the given rows of a state."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def insert(state: PyTree, rows: Int[Array, " R"], other: PyTree) -> PyTree:
    """Returns the state with `other`'s rows put in the given places, whole."""
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), state, other)


def freeze(
    state: DecodeState, rows: Bool[Array, " B"], finish: int = STOP
) -> DecodeState:
    """Finishes the marked rows that still run; they emit nothing any more."""
    marked = rows & ~state.done
    return state._replace(finish=jnp.where(marked, finish, state.finish))

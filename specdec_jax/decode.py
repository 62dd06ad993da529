"""The loop: draft, verify, accept, commit, on a batch of rows that advance unequally.

One row's buffer of T slots between two rounds (`length` 7, prompt of 4):

    slot          0 1 2 3 4 5 6 7 8 9 ...
    tokens        p p p p t t t . . .      committed below length, garbage above
    target cache  x x x x x x . . . .      all committed tokens but the last

A round reads the block `[last committed token, d1 .. dK]` on top of the cache, so row i
of the logits judges draft i + 1 and row K gives the bonus token. Rolling back is setting
a length; nothing moves, except the accepted path of a tree.

The functions are pure and not jitted; wrap them in `jax.jit` with `target`, `drafter`
and `rule` closed over or static (they hash by value), or use `SpeculativeDecoder`.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax import rng
from specdec_jax.base import (
    AcceptanceRule,
    Block,
    Cache,
    Draft,
    Drafter,
    Inputs,
    LanguageModel,
    Noise,
    Params,
    PyTree,
    RoundContext,
    Verdict,
)
from specdec_jax.sampling import (
    History,
    Sampling,
    SamplingRows,
    is_greedy,
    policy,
)

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


class Round(NamedTuple):
    """What `verify_round` found, before budgets and EOS are looked at."""

    tokens: Int[Array, "B E"]
    """Accepted tokens, then the next token; E = depth + 1, the rest is garbage."""
    log_probs: Float[Array, "B E V"]
    """The policy row that each of these tokens was judged by."""
    model_log_probs: Float[Array, "B E"]
    """Log-probability of each of these tokens under the raw model, in nats."""
    policy_log_probs: Float[Array, "B E"]
    """The same under the policy."""
    finite: Bool[Array, "B E"]
    """Whether the logits behind each of these tokens were usable."""
    draft: Draft
    verdict: Verdict
    drafter_state: PyTree
    cache: Cache
    """Holds every token but the next one."""


class StepInfo(NamedTuple):
    """Everything else about a round."""

    draft: Draft
    verdict: Verdict
    tokens: Int[Array, "B E"]
    """`[:num_emitted]` of each row was emitted."""
    num_emitted: Int[Array, " B"]


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
    prompt_length: Int[Array, " B"],
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
      prompt_length: Tokens of each prompt, at least 1.
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

    eos = jnp.asarray(eos_token_ids, jnp.int32)
    eos = jnp.broadcast_to(
        eos.reshape((1, -1)) if eos.ndim < 2 else eos, (batch_size, eos.shape[-1])
    )
    prompt_length = prompt_length.astype(jnp.int32)

    def rows(settings):
        if isinstance(settings, SamplingRows):
            return settings
        return settings.rows(
            batch_size,
            target.vocab_size,
            prompt_length=prompt_length,
            eos_token_ids=eos,
            min_length=prompt_length + min_new_tokens if min_new_tokens else None,
        )

    cache = target.init_cache(batch_size, capacity)
    if inputs is not None:
        cache = target.apply(params.target, inputs, cache, method="encode")
    slots = ((0, 0), (0, capacity - width))
    zeros = jnp.zeros((batch_size,), jnp.int32)
    blank = jnp.zeros((batch_size, capacity), jnp.float32)
    return DecodeState(
        tokens=jnp.pad(prompts.astype(jnp.int32), slots),
        length=prompt_length,
        prompt_length=prompt_length + zeros,
        limit=prompt_length + jnp.asarray(max_new_tokens, jnp.int32),
        eos_token_ids=eos,
        finish=zeros,
        key=rng.request_keys(key, batch_size),
        sampling=rows(sampling or Sampling()),
        draft_sampling=None if draft_sampling is None else rows(draft_sampling),
        cache=cache,
        drafter_state=drafter.init(params, batch_size, capacity, inputs),
        log_probs=blank,
        policy_log_probs=jnp.zeros_like(blank),
        origin=jnp.zeros((batch_size, capacity), jnp.int8),
        counts=Counts(
            zeros,
            jnp.zeros_like(zeros),
            jnp.zeros_like(zeros),
            jnp.zeros((batch_size, drafter.depth + 1), jnp.int32),
        ),
    )


def prefill(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    chunk: int = PREFILL_CHUNK,
) -> DecodeState:
    """Reads all prompt tokens but the last, in fixed chunks, into every cache.

    The last prompt token is the first input of the first round, so a prompt of length 1
    reads nothing. Rows shorter than the longest write garbage above their length.
    """

    def read_chunk(carry):
        index, cache, drafter_state = carry
        first = index * chunk
        start = jnp.full_like(state.length, 0) + first
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, first, chunk, axis=1)
        output, cache = target.apply(
            params.target,
            tokens,
            cache.rewind(start),
            hidden_layers=drafter.hidden_layers,
        )
        num_valid = jnp.clip(state.prompt_length - 1 - start, 0, chunk)
        drafter_state = drafter.prefill(
            params, drafter_state, tokens, start, num_valid, output
        )
        return index + 1, cache, drafter_state

    longest = state.prompt_length.max() - 1
    _, cache, drafter_state = jax.lax.while_loop(
        lambda carry: carry[0] * chunk < longest,
        read_chunk,
        (jnp.zeros((), jnp.int32), state.cache, state.drafter_state),
    )
    cache = cache.rewind(state.prompt_length - 1)
    return state._replace(cache=cache, drafter_state=drafter_state)


def verify_round(
    params: Params,
    drafter_state: PyTree,
    context: RoundContext,
    sampling: SamplingRows,
    noise: Noise,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> Round:
    """Drafts, verifies, accepts, commits the path and updates the drafter.

    It knows no budget and no EOS; a nested drafter calls it with its middle model as
    target. The verify pass has one of two widths, 1 or N + 1: a round in which nobody
    drafted costs one plain step.

    Args:
      params: Variables of target and drafter.
      drafter_state: The drafter's state.
      context: What the drafter sees, its own noise and settings included.
      sampling: The target's settings.
      noise: The rule's noise.
      target: The model whose law the tokens have.
      drafter: Where the proposal comes from.
      rule: Decides how much of it to keep; its losslessness is the round's.

    Raises:
      ValueError: If the rule needs the draft's laws and the drafter has none.
    """
    num_nodes, depth = drafter.num_nodes, drafter.depth
    draft, drafter_state, cache = drafter.draft(drafter_state, context)
    _check_draft(draft, context, drafter, rule, target.vocab_size)
    draft = _clip(draft, context.max_draft)
    tree = _Tree.of(draft, depth)
    last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([last, draft.tokens], axis=1)
    judge = {
        width: _judge(width, params, context, sampling, target, drafter, rule, tree)
        for width in {1, num_nodes + 1}
    }
    operands = (tokens, draft, noise, cache.rewind(context.length - 1))
    if num_nodes == 0:
        judged = judge[1](*operands)
    else:
        judged = jax.lax.cond(
            draft.num_valid.max() > 0, judge[num_nodes + 1], judge[1], *operands
        )
    output, log_probs, looked_up, verdict, cache = judged
    if draft.parents is not None:
        cache = cache.commit(context.length, verdict.path[:, :depth])
    cache = cache.rewind(context.length + verdict.num_accepted)
    drafter_state = drafter.update(
        params,
        drafter_state,
        context._replace(target_cache=None),
        draft,
        output,
        verdict,
    )
    emitted = _emitted(draft.tokens, verdict, depth)
    return Round(
        emitted, log_probs, *looked_up, draft, verdict, drafter_state, cache
    )


def step(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[DecodeState, StepInfo]:
    """Runs one round on every row that is not finished.

    Each such row gains between 1 and depth + 1 tokens. Budgets never cut a block, since
    no more is drafted than fits; EOS does. Counts are of emitted tokens.
    """
    running = ~state.done
    room = jnp.clip(state.limit - state.length - 1, 0, drafter.depth)
    draft_sampling = (
        state.sampling if state.draft_sampling is None else state.draft_sampling
    )
    draft_noise, noise = _noise(state, draft_sampling, drafter, rule)
    context = RoundContext(
        params=params,
        tokens=state.tokens,
        length=state.length,
        max_draft=jnp.where(running, room, 0),
        sampling=draft_sampling,
        noise=draft_noise,
        target_cache=state.cache,
    )
    result = verify_round(
        params,
        state.drafter_state,
        context,
        state.sampling,
        noise,
        target=target,
        drafter=drafter,
        rule=rule,
    )
    num_emitted, finish = _cut(state, result)
    state = _emit(state, result, num_emitted, finish)
    return state, StepInfo(result.draft, result.verdict, result.tokens, num_emitted)


def run(
    params: Params,
    state: DecodeState,
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    num_rounds: int | Int[Array, ""] | None = None,
) -> DecodeState:
    """Runs rounds until every row is finished, or `num_rounds` of them.

    The tokens do not depend on how a run is cut into pieces.
    """

    def unfinished(carry):
        index, state = carry
        more = ~state.done.all()
        return more if num_rounds is None else more & (index < num_rounds)

    def body(carry):
        index, state = carry
        state, _ = step(params, state, target=target, drafter=drafter, rule=rule)
        return index + 1, state

    start = (jnp.zeros((), jnp.int32), state)
    return jax.lax.while_loop(unfinished, body, start)[1]


def generate(
    params: Params,
    key: Key[Array, "..."],
    prompts: Int[Array, "B S"],
    prompt_length: Int[Array, " B"],
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: AcceptanceRule,
    max_new_tokens: int | Int[Array, " B"],
    **settings: Any,
) -> DecodeState:
    """Decodes a batch to the end: `init`, `prefill` and rounds, as one program.

    Args:
      params: Variables of target and drafter.
      key: One typed key, or one a row. Not consumed.
      prompts: Right-padded token ids.
      prompt_length: Tokens of each prompt.
      target: The model whose law the output has.
      drafter: Where proposals come from.
      rule: The output is lossless if `rule.lossless`.
      max_new_tokens: Budget, one for all or one a row.
      **settings: The other arguments of `init`.

    Returns:
      The final state; row b's new tokens are `tokens[b, prompt_length[b]:length[b]]`.
    """
    state = init(
        params,
        key,
        prompts,
        prompt_length,
        target=target,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        **settings,
    )
    state = prefill(params, state, target=target, drafter=drafter)
    return run(params, state, target=target, drafter=drafter, rule=rule)


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


class _Tree(NamedTuple):
    """A draft's shape: depths, ancestors, and each node's path from the root."""

    block: Block | None
    tail: Int[Array, "B M P"]
    """Drafted tokens on the way to block slot s, in order; P = depth."""
    tail_length: Int[Array, "B M"]

    @classmethod
    def of(cls, draft: Draft, depth: int) -> "_Tree":
        batch_size, num_nodes = draft.tokens.shape
        slots = num_nodes + 1
        if draft.parents is None:
            tail = jnp.broadcast_to(
                draft.tokens[:, None], (batch_size, slots, num_nodes)
            )
            lengths = jnp.arange(slots, dtype=jnp.int32)[None]
            return cls(None, tail, jnp.broadcast_to(lengths, (batch_size, slots)))
        ancestors, depths = ancestry(draft.parents)
        tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))
        # Node at depth d + 1 on the way to s, if any: a path has one node a depth.
        levels = jnp.arange(1, depth + 1, dtype=jnp.int32)
        on_path = ancestors[:, :, None, :] & (
            depths[:, None, None, :] == levels[None, None, :, None]
        )
        tail = jnp.where(on_path, tokens[:, None, None, :], 0).sum(-1, dtype=jnp.int32)
        return cls(Block(depths, ancestors), tail, depths)

    def cut(self, width: int) -> "_Tree":
        block = self.block
        if block is not None:
            block = Block(block.depth[:, :width], block.ancestors[:, :width, :width])
        return _Tree(block, self.tail[:, :width], self.tail_length[:, :width])


def ancestry(
    parents: Int[Array, "B N"],
) -> tuple[Bool[Array, "B M M"], Int[Array, "B M"]]:
    """Returns ancestors-or-self and depth of the block `[last token, nodes]`.

    Parents come before their children, so one pass over the nodes is enough.

    Example:
      >>> ancestors, depth = ancestry(jnp.array([[-1, -1, 0]]))
      >>> depth.tolist()
      [[0, 1, 1, 2]]
      >>> ancestors[0, 3].tolist()
      [True, True, False, True]
    """
    batch_size, num_nodes = parents.shape
    size = num_nodes + 1
    rows = jnp.arange(batch_size)
    itself = jnp.eye(size, dtype=bool)

    def add_node(node, ancestors):
        inherited = ancestors[rows, parents[:, node] + 1]
        return ancestors.at[:, node + 1].set(inherited | itself[node + 1][None])

    start = jnp.broadcast_to(itself, (batch_size, size, size))
    ancestors = jax.lax.fori_loop(0, num_nodes, add_node, start)
    return ancestors, ancestors.sum(-1, dtype=jnp.int32) - 1


def _check_draft(draft, context, drafter, rule, vocab_size):
    """Guards the seam where a drafter, perhaps a user's, hands over."""
    shape = (context.length.shape[0], drafter.num_nodes)
    chex.assert_shape(draft.tokens, shape)
    chex.assert_shape(draft.num_valid, shape[:1])
    chex.assert_type([draft.tokens, draft.num_valid], jnp.int32)
    if draft.log_probs is not None:
        chex.assert_shape(draft.log_probs, (*shape, vocab_size))
    elif rule.needs_log_probs:
        raise ValueError(
            f"{rule} needs the law of every drafted token and {drafter} gives none; "
            "use the rejection or the coupled rule."
        )
    if draft.parents is not None:
        chex.assert_shape(draft.parents, shape)


def _clip(draft: Draft, max_draft: Int[Array, " B"]) -> Draft:
    """Cuts a draft to `max_draft` tokens, a tree to that depth."""
    if draft.parents is None:
        allowed = max_draft
    else:
        _, depths = ancestry(draft.parents)
        allowed = (depths[:, 1:] <= max_draft[:, None]).sum(-1, dtype=jnp.int32)
    return draft._replace(num_valid=jnp.minimum(draft.num_valid, allowed))


def _judge(width, params, context, sampling, target, drafter, rule, tree):
    """Returns the function that verifies the block's first `width` tokens.

    Its results have the shapes of the full block, so that two widths can be the two
    branches of one conditional.
    """
    missing = drafter.num_nodes + 1 - width
    depth = drafter.depth
    tree = tree.cut(width)

    def widen(rows, fill=0):
        return jnp.pad(
            rows,
            ((0, 0), (0, missing)) + ((0, 0),) * (rows.ndim - 2),
            constant_values=fill,
        )

    def judge(tokens, draft, noise, cache):
        output, cache = target.apply(
            params.target,
            tokens[:, :width],
            cache,
            block=tree.block,
            hidden_layers=drafter.hidden_layers,
        )
        history = History(context.tokens, context.length, tree.tail, tree.tail_length)
        log_probs = policy(output.logits, sampling, history)
        cut = jax.tree.map(lambda leaf: leaf[:, : width - 1], draft._replace(num_valid=0))
        cut = cut._replace(num_valid=draft.num_valid)
        verdict = jax.vmap(rule)(noise, cut, log_probs)
        verdict = verdict._replace(path=widen(verdict.path))
        # Block slot behind each emitted token: the last token, then the path.
        slots = jnp.pad(verdict.path[:, :depth] + 1, ((0, 0), (1, 0)))
        slots = jnp.minimum(slots, width - 1)
        emitted = _emitted(draft.tokens, verdict, depth)
        looked_up = _look_up(output.logits, log_probs, slots, emitted)
        if draft.parents is not None:
            log_probs = jnp.take_along_axis(log_probs, slots[..., None], axis=1)
        else:
            log_probs = widen(log_probs)
        output = output._replace(
            logits=widen(output.logits), hidden=tuple(map(widen, output.hidden))
        )
        return output, log_probs, looked_up, verdict, cache

    return judge


def _look_up(logits, log_probs, slots, tokens):
    """Returns raw and policy log-probability of each token, and if they can be used."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    norm = jax.nn.logsumexp(logits, axis=-1)
    finite = jnp.isfinite(norm) & ~jnp.isnan(logits).any(axis=-1)
    norm = jnp.take_along_axis(norm, slots, axis=1)
    rows = jnp.arange(len(tokens))[:, None]
    model_log_probs = (logits[rows, slots, tokens] - norm).astype(jnp.float32)
    policy_log_probs = log_probs[rows, slots, tokens].astype(jnp.float32)
    finite = jnp.take_along_axis(finite, slots, axis=1)
    return model_log_probs, policy_log_probs, finite


def _emitted(drafted, verdict, depth):
    """Returns the accepted tokens and the next one, [B, depth + 1]."""
    path = verdict.path[:, :depth]
    accepted = jnp.take_along_axis(drafted, path, axis=1)
    padded = jnp.pad(accepted, ((0, 0), (0, 1)))
    places = jnp.arange(depth + 1)[None]
    here = places == verdict.num_accepted[:, None]
    return jnp.where(here, verdict.next_token[:, None], padded)


def _noise(state, draft_sampling, drafter, rule):
    """Returns the drafter's noise and the rule's for this round."""
    if is_greedy(state.sampling) and is_greedy(draft_sampling):
        return rng.NoNoise(), rng.NoNoise()
    if rule.noise == "position" or drafter.num_nodes == 0:
        shared = rng.PositionNoise(state.key, state.length)
        return shared, shared
    return (
        rng.RoundNoise.at(state.key, state.length, rng.DRAFT),
        rng.RoundNoise.at(state.key, state.length, rng.ACCEPT),
    )


def _cut(state: DecodeState, result: Round):
    """Returns how many of the round's tokens are emitted, and what finishes the row."""
    places = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    never = result.tokens.shape[1]

    def first(mask):
        return jnp.where(mask, places, never).min(axis=1)

    wanted = result.verdict.num_accepted + 1
    is_eos = (result.tokens[..., None] == state.eos_token_ids[:, None]).any(-1)
    num_eos = first(is_eos) + 1
    num_usable = first(~result.finite)
    num_emitted = jnp.minimum(jnp.minimum(wanted, num_eos), num_usable)
    num_emitted = jnp.where(state.done, 0, num_emitted)
    full = state.length + num_emitted >= state.limit
    finish = jnp.select(
        [
            state.done,
            num_eos <= jnp.minimum(wanted, num_usable),
            num_usable < wanted,
            full,
        ],
        [state.finish, EOS, ERROR, LENGTH],
        RUNNING,
    )
    return num_emitted, finish.astype(jnp.int32)


def _emit(state: DecodeState, result: Round, num_emitted, finish) -> DecodeState:
    """Commits the emitted tokens and counts them."""
    verdict, draft = result.verdict, result.draft
    rows = jnp.arange(len(state.tokens))[:, None]
    places = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    # Places past the last emitted token go out of range, where they are dropped.
    slots = jnp.where(
        places < num_emitted[:, None],
        state.length[:, None] + places,
        state.tokens.shape[1],
    )

    def write(buffer, values):
        return buffer.at[rows, slots].set(values.astype(buffer.dtype), mode="drop")

    emitting = num_emitted > 0
    kept = jnp.minimum(verdict.num_accepted, num_emitted)
    last = jnp.where(_was_judged(draft, verdict), CORRECTED, BONUS)
    accepted = places < verdict.num_accepted[:, None]
    origin = jnp.where(accepted, ACCEPTED, last[:, None])
    counts = state.counts
    counts = Counts(
        rounds=counts.rounds + emitting,
        num_drafted=counts.num_drafted + jnp.where(emitting, draft.num_valid, 0),
        num_accepted=counts.num_accepted + kept,
        histogram=counts.histogram.at[rows[:, 0], kept].add(emitting),
    )
    length = state.length + num_emitted
    return state._replace(
        tokens=write(state.tokens, result.tokens),
        length=length,
        finish=finish,
        cache=result.cache.rewind(length - 1),
        drafter_state=result.drafter_state,
        log_probs=write(state.log_probs, result.model_log_probs),
        policy_log_probs=write(state.policy_log_probs, result.policy_log_probs),
        origin=write(state.origin, origin),
        counts=counts,
    )


def _was_judged(draft: Draft, verdict: Verdict) -> Bool[Array, " B"]:
    """Returns whether anything was drafted at the place of the next token."""
    if draft.parents is None:
        return verdict.num_accepted < draft.num_valid
    slots = jnp.arange(draft.tokens.shape[1])[None]
    deepest = jnp.take_along_axis(
        jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1),
        verdict.num_accepted[:, None],
        axis=1,
    )
    children = (draft.parents == deepest) & (slots < draft.num_valid[:, None])
    return children.any(axis=1)

"""One round, seen by itself: draft, verify, accept, commit the path, update.

The block that the target reads is `[last committed token, draft]`. Row i of its logits
judges what was drafted after block slot i, and the row of the deepest accepted slot
gives the corrected or bonus token.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.base import (
    AcceptanceRule,
    Block,
    Cache,
    Draft,
    Drafter,
    LanguageModel,
    Noise,
    Params,
    PyTree,
    RoundContext,
    Verdict,
)
from specdec_jax.sampling import History, SamplingRows, law_dtype, policy


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
    tree = _Tree.of(draft, depth)
    draft = _clip(draft, tree, context.max_draft)
    last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([last, draft.tokens], axis=1)
    judge = {
        width: _judge(width, params, context, sampling, target, drafter, rule, tree)
        for width in (1, num_nodes + 1)
    }
    operands = (tokens, draft, noise)
    cache = cache.rewind(context.length - 1)
    if num_nodes == 0:
        judged = judge[1](operands, cache)
    else:
        width = jnp.where(draft.num_valid.max() > 0, num_nodes + 1, 1)
        judged = _run_one(judge, width, operands, cache)
    output, log_probs, emitted, verdict, cache = judged
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
    return Round(
        tokens=emitted.tokens,
        log_probs=log_probs,
        model_log_probs=emitted.model_log_probs,
        policy_log_probs=emitted.policy_log_probs,
        finite=emitted.finite,
        draft=draft,
        verdict=verdict,
        drafter_state=drafter_state,
        cache=cache,
    )


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

    All nodes climb to the root together, in as many steps as the tree is deep.

    Example:
      >>> ancestors, depth = ancestry(jnp.array([[-1, -1, 0]]))
      >>> depth.tolist()
      [[0, 1, 1, 2]]
      >>> ancestors[0, 3].tolist()
      [True, True, False, True]
    """
    batch_size, num_nodes = parents.shape
    size = num_nodes + 1
    slots = jnp.arange(size, dtype=jnp.int32)
    # Slot above each slot; the root's is -1, where climbing ends.
    above = jnp.pad(parents + 1, ((0, 0), (1, 0)), constant_values=-1)

    def climb(carry):
        at, ancestors = carry
        ancestors |= at[:, :, None] == slots[None, None]
        higher = jnp.take_along_axis(above, jnp.maximum(at, 0), axis=1)
        return jnp.where(at < 0, -1, higher), ancestors

    start = jnp.broadcast_to(slots[None], above.shape)
    none = jnp.zeros((batch_size, size, size), bool)
    _, ancestors = jax.lax.while_loop(
        lambda carry: (carry[0] >= 0).any(), climb, (start, none)
    )
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
    siblings = "none" if draft.parents is None else drafter.siblings
    if siblings not in rule.siblings:
        raise ValueError(
            f"{rule} judges drafts whose siblings are {' or '.join(rule.siblings)}, "
            f"and those of {drafter} are {siblings}: its output would not be the "
            "target's; use the coupled rule, which takes any draft"
        )


def _clip(draft: Draft, tree: _Tree, max_draft: Int[Array, " B"]) -> Draft:
    """Cuts a draft to `max_draft` tokens, a tree to that depth.

    Nodes are breadth first, so what is too deep comes last. Padding may have any depth:
    only nodes before the first one that does not fit count.
    """
    fits = tree.tail_length[:, 1:] <= max_draft[:, None]
    allowed = jnp.cumprod(fits, axis=-1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)
    return draft._replace(num_valid=jnp.minimum(draft.num_valid, allowed))


def _run_one(branches, chosen, operands, cache):
    """Runs the branch named `chosen`: a switch that updates the cache in place.

    XLA copies what a conditional's branches write to, the whole cache in each round;
    it does not copy what loops carry. So each branch is a loop of one pass or none.
    """
    # Traced once, for its shapes and for its loop.
    branches = {name: jax.jit(branch) for name, branch in branches.items()}
    shapes = jax.eval_shape(branches[1], operands, cache)
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:-1])

    for name, branch in branches.items():

        def body(carry, branch=branch):
            _, _, cache = carry
            *results, cache = branch(operands, cache)
            return jnp.ones((), bool), tuple(results), cache

        def wanted(carry, name=name):
            return ~carry[0] & (chosen == name)

        start = (jnp.zeros((), bool), results, cache)
        with jax.named_scope(f"width_{name}"):  # `plan` tells the loops by it
            _, results, cache = jax.lax.while_loop(wanted, body, start)
    return *results, cache


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

    def judge(operands, cache):
        tokens, draft, noise = operands
        output, cache = target.apply(
            params.target,
            tokens[:, :width],
            cache,
            block=tree.block,
            hidden_layers=drafter.hidden_layers,
        )
        history = History(context.tokens, context.length, tree.tail, tree.tail_length)
        log_probs = policy(output.logits, sampling, history)
        nodes = draft._replace(num_valid=None)
        cut = jax.tree.map(lambda leaf: leaf[:, : width - 1], nodes)
        cut = cut._replace(num_valid=draft.num_valid)
        verdict = jax.vmap(rule)(noise, cut, log_probs)
        verdict = verdict._replace(path=widen(verdict.path))
        # Block slot behind each emitted token: the last token, then the path.
        slots = jnp.pad(verdict.path[:, :depth] + 1, ((0, 0), (1, 0)))
        slots = jnp.minimum(slots, width - 1)
        emitted = _Emitted.of(
            _emitted_tokens(draft.tokens, verdict, depth),
            slots,
            output.logits,
            log_probs,
        )
        if draft.parents is not None:
            log_probs = jnp.take_along_axis(log_probs, slots[..., None], axis=1)
        else:
            log_probs = widen(log_probs)
        output = output._replace(
            logits=widen(output.logits), hidden=tuple(map(widen, output.hidden))
        )
        return output, log_probs, emitted, verdict, cache

    return judge


class _Emitted(NamedTuple):
    """The tokens a row may emit, with what `Round` says of each."""

    tokens: Int[Array, "B E"]
    model_log_probs: Float[Array, "B E"]
    policy_log_probs: Float[Array, "B E"]
    finite: Bool[Array, "B E"]

    @classmethod
    def of(cls, tokens, slots, logits, log_probs) -> "_Emitted":
        """Looks up each token in the row of the block slot behind it."""
        # Strict promotion knows no bfloat16 to float32.
        logits = logits.astype(law_dtype(logits))
        norm = jnp.take_along_axis(jax.nn.logsumexp(logits, axis=-1), slots, axis=1)
        rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
        model_log_probs = logits[rows, slots, tokens] - norm
        policy_log_probs = log_probs[rows, slots, tokens]
        return cls(
            tokens=tokens,
            model_log_probs=model_log_probs.astype(jnp.float32),
            policy_log_probs=policy_log_probs.astype(jnp.float32),
            # A policy row without a finite maximum is NaN throughout.
            finite=~jnp.isnan(policy_log_probs),
        )


def _emitted_tokens(drafted, verdict, depth):
    """Returns the accepted tokens and the next one, [B, depth + 1]."""
    path = verdict.path[:, :depth]
    accepted = jnp.take_along_axis(drafted, path, axis=1)
    padded = jnp.pad(accepted, ((0, 0), (0, 1)))
    places = jnp.arange(depth + 1, dtype=jnp.int32)[None]
    here = places == verdict.num_accepted[:, None]
    return jnp.where(here, verdict.next_token[:, None], padded)

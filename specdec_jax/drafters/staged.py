"""Several drafters share the draft length: each goes on where the one before stopped.

Every token keeps the law of the drafter that drew it, so that the draft is lossless
under every rule, in any order of the stages; for a fixed cost, the strongest first is
best, since a token counts only if all before it were accepted (the horizontal cascade
of Cascade Speculative Drafting, arXiv:2312.11462).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.base import (
    Draft,
    Drafter,
    ModelOutput,
    Params,
    RoundContext,
    Verdict,
)
from specdec_jax.drafters.children import (
    check_children,
    with_num_draft_tokens,
    with_window,
)
from specdec_jax.sampling import certain
from specdec_jax.state import append


@dataclass(frozen=True)
class Staged:
    """Drafts a chain in stages; `Params.draft` has one entry a stage.

    A later stage first reads what earlier ones drafted, in one pass. The target's cache
    is at the first stage's disposal alone: later ones stand behind tokens it lacks.

    Args:
      stages: Chain drafters, with the number of tokens each drafts at the most.

    Raises:
      ValueError: There is no stage, or one that reads hidden states or drafts a tree.
    """

    stages: tuple[Drafter, ...]
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses stages that cannot be."""
        if not self.stages:
            raise ValueError("stages is empty; give at least one drafter")
        check_children("staged", self.stages)

    @property
    def num_nodes(self) -> int:
        """The tokens of all stages, K."""
        return sum(stage.num_nodes for stage in self.stages)

    depth = num_nodes

    @property
    def model(self) -> tuple[Any, ...]:
        """The models that draft, in the structure of `Params.draft`."""
        return tuple(getattr(stage, "model", None) for stage in self.stages)

    def with_num_draft_tokens(self, num_draft_tokens: int) -> "Staged":
        """Returns the same stages with another K, shared as evenly as it can be.

        With a K below their number the last ones are left out.
        """
        shares = share(num_draft_tokens, len(self.stages))
        return Staged(
            tuple(
                with_num_draft_tokens(stage, size)
                for stage, size in zip(self.stages, shares, strict=True)
                if size
            )
        )

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the states of the stages."""
        states = tuple(
            stage.init(own, batch_size, capacity, inputs)
            for stage, own in self._each(params)
        )
        # No leaf is shared between two fields of a state: it is donated.
        taken = tuple(jnp.zeros((batch_size,), jnp.int32) for _ in self.stages)
        return _State(states, taken)

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts with every stage."""
        states = tuple(
            stage.prefill(own, one, tokens, start, num_valid, target_output)
            for one, (stage, own) in zip(state.stages, self._each(params), strict=True)
        )
        return state._replace(stages=states)

    def draft(self, state, context: RoundContext):
        """Drafts stage by stage; one that has little to say leaves room for others."""
        tokens, length = context.tokens, context.length
        states, parts, cache = [], [], context.target_cache
        for index, (stage, own) in enumerate(self._each(context.params)):
            filled = length - context.length
            inner = context._replace(
                params=own,
                tokens=tokens,
                length=length,
                max_draft=jnp.clip(context.max_draft - filled, 0, stage.depth),
                noise=context.noise.child(index, filled),
                target_cache=cache if index == 0 else None,
            )
            draft, one, used = stage.draft(state.stages[index], inner)
            draft = draft._replace(
                num_valid=jnp.minimum(draft.num_valid, inner.max_draft)
            )
            cache = used if index == 0 else cache
            tokens = append(tokens, length, draft.tokens, draft.num_valid)
            length = length + draft.num_valid
            states.append(one)
            parts.append(_Part(filled, draft))
        slots = context.length[:, None] + _places(self.num_nodes)
        draft = Draft(
            jnp.take_along_axis(tokens, slots, axis=1),
            length - context.length,
            _laws(parts, self.num_nodes),
        )
        taken = tuple(part.draft.num_valid for part in parts)
        return draft, _State(tuple(states), taken), cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Tells every stage what became of its own tokens."""
        tokens = append(context.tokens, context.length, draft.tokens, draft.num_valid)
        context = context._replace(tokens=tokens)
        filled = jnp.zeros_like(context.length)
        states = []
        for index, (stage, own) in enumerate(self._each(params)):
            taken = state.taken[index]
            seen = _seen_by_stage(
                context._replace(params=own, noise=context.noise.child(index, filled)),
                draft,
                target_output,
                verdict,
                first=filled,
                taken=taken,
                size=stage.num_nodes,
            )
            states.append(stage.update(own, state.stages[index], *seen))
            filled = filled + taken
        return state._replace(stages=tuple(states))

    def _each(self, params: Params) -> Iterator[tuple[Drafter, Params]]:
        """Yields the stages, which see a whole round's tokens, and their variables."""
        variables = params.draft or (None,) * len(self.stages)
        for stage, own in zip(self.stages, variables, strict=False):
            yield with_window(stage, self.num_nodes + 1), Params(params.target, own)


class _State(NamedTuple):
    stages: tuple[Any, ...]
    taken: tuple[Int[Array, " B"], ...]
    """Tokens that each stage drafted in the last round."""


class _Part(NamedTuple):
    """What a stage drafted, and how many tokens there were before it."""

    first: Int[Array, " B"]
    draft: Draft


def share(num_draft_tokens: int, number: int) -> list[int]:
    """Shares K among stages; the first ones get what is over.

    Example:
      >>> share(5, 2), share(1, 2)
      ([3, 2], [1, 0])
    """
    each, over = divmod(num_draft_tokens, number)
    return [each + (index < over) for index in range(number)]


def _places(size: int) -> Int[Array, "1 M"]:
    return jnp.arange(size, dtype=jnp.int32)[None]


def _laws(parts: list[_Part], size: int) -> Float[Array, "B K V"] | None:
    """Returns the law of every token; of a deterministic one it is all on the token."""
    told = [part.draft.log_probs for part in parts]
    vocab_size = next((law.shape[-1] for law in told if law is not None), None)
    if vocab_size is None:
        return None
    laws = jnp.zeros((len(parts[0].first), size, vocab_size), jnp.float32)
    for first, draft in parts:
        law = draft.log_probs
        if law is None:
            law = certain(draft.tokens, vocab_size)
        laws = append(laws, first, law, draft.num_valid)
    return laws


def _seen_by_stage(
    context: RoundContext,
    draft: Draft,
    output: ModelOutput,
    verdict: Verdict,
    *,
    first: Int[Array, " B"],
    taken: Int[Array, " B"],
    size: int,
) -> tuple[RoundContext, Draft, ModelOutput, Verdict]:
    """Returns a round as the stage sees it that drafted `taken` tokens from `first` on.

    Where the verdict stopped before them, the stage drafted nothing; where it went on
    after them, the next stage's first token is the next token.
    """
    accepted = verdict.num_accepted
    base = jnp.minimum(first, accepted)
    num_valid = jnp.where(accepted >= first, taken, 0)
    kept = jnp.minimum(accepted - base, num_valid)
    end = (base + kept)[:, None]
    last = draft.tokens.shape[1] - 1
    after = jnp.take_along_axis(draft.tokens, jnp.minimum(end, last), axis=1)[:, 0]
    own = base[:, None] + _places(size)
    block = base[:, None] + _places(size + 1)

    def rows(leaf: Array, slots: Array) -> Array:
        slots = jnp.minimum(slots, leaf.shape[1] - 1)
        return jnp.take_along_axis(
            leaf, slots.reshape(slots.shape + (1,) * (leaf.ndim - 2)), axis=1
        )

    mine = Draft(
        rows(draft.tokens, own),
        num_valid,
        None if draft.log_probs is None else rows(draft.log_probs, own),
    )
    seen = context._replace(
        length=context.length + base,
        max_draft=jnp.clip(context.max_draft - base, 0, size),
    )
    told = Verdict(
        kept,
        jnp.where(accepted > base + kept, after, verdict.next_token),
        jnp.broadcast_to(_places(size), own.shape),
    )
    output = ModelOutput(
        rows(output.logits, block), tuple(rows(one, block) for one in output.hidden)
    )
    return seen, mine, output, told

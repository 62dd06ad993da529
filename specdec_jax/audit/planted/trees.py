"""Recursive rejection, wrong in the ways that were shipped (ALGORITHMS B.6.2)."""

from dataclasses import dataclass

import jax.numpy as jnp

from specdec_jax.acceptance import MultiDraft
from specdec_jax.acceptance.rejection import residual


@dataclass(frozen=True)
class JudgedAlone(MultiDraft):
    """Tests each sibling against the whole target, and takes one residual at the end.

    So a token that several siblings propose has several chances.
    """

    def _log_ratio(self, target_row, row, proposal, token):
        return super()._log_ratio(target_row, target_row, proposal, token)

    def _left(self, target_row, row, proposal, draft, token):
        if draft.log_probs is None:
            return super()._left(target_row, row, proposal, draft, token)
        return residual(target_row, proposal)


@dataclass(frozen=True)
class MergesDuplicates(MultiDraft):
    """Tests one of several equal siblings, and takes no residual for the others."""

    def _nodes(self, draft):
        parents, valid = super()._nodes(draft)
        slots = jnp.arange(len(parents), dtype=jnp.int32)
        same = draft.tokens[:, None] == draft.tokens[None]
        same &= (parents[:, None] == parents[None]) & (slots[:, None] > slots[None])
        return parents, valid & ~same.any(axis=1)


@dataclass(frozen=True)
class NotRenormalised(MultiDraft):
    """Leaves the draft's law as it was when a sibling is taken out of it."""

    def _proposal(self, draft, node, token, gone):
        if draft.log_probs is None:
            return super()._proposal(draft, node, token, gone)
        return jnp.where(gone, -jnp.inf, draft.log_probs[node])


@dataclass(frozen=True)
class LikeliestFirst(MultiDraft):
    """Tests siblings from the likeliest on, not in the order drawn."""

    def law(self, draft, target_log_probs):
        """See `base.AcceptanceRule.law`."""
        draft, order = _sorted(draft)
        slots = jnp.append(jnp.zeros((1,), jnp.int32), order + 1)
        stop, rows = super().law(draft, target_log_probs[slots])
        back = jnp.argsort(slots)
        return stop[back], rows[back]

    def __call__(self, noise, draft, target_log_probs):
        """See `base.AcceptanceRule`."""
        draft, order = _sorted(draft)
        slots = jnp.append(jnp.zeros((1,), jnp.int32), order + 1)
        verdict = super().__call__(noise, draft, target_log_probs[slots])
        return verdict._replace(path=order[verdict.path])


def _sorted(draft):
    """Returns the draft with its siblings by falling probability, and the old slots."""
    slots = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    if draft.parents is None or draft.log_probs is None:
        return draft, slots
    chance = draft.log_probs[slots, draft.tokens]
    parents = jnp.where(slots < draft.num_valid, draft.parents, len(slots))
    order = jnp.lexsort((-chance, parents)).astype(jnp.int32)
    new = jnp.append(jnp.argsort(order).astype(jnp.int32), jnp.int32(-1))
    draft = draft._replace(
        tokens=draft.tokens[order],
        log_probs=draft.log_probs[order],
        parents=new[draft.parents[order]],
    )
    return draft, order

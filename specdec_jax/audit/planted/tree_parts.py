"""Wrong models, caches and drafters that only a tree brings to light."""

from dataclasses import dataclass

import jax.numpy as jnp

from specdec_jax.audit.planted.parts import of_tokens
from specdec_jax.audit.table import TableCache, TableModel
from specdec_jax.base import Block
from specdec_jax.drafters import TreeDrafter


@dataclass(frozen=True)
class SeesSiblings(TableModel):
    """Lets each node of a tree see all nodes before it."""

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        if block is not None:
            block = Block(block.depth, jnp.tril(jnp.ones_like(block.ancestors)))
        return super().apply(
            variables, tokens, cache, block=block, hidden_layers=hidden_layers
        )


@dataclass(frozen=True)
class PositionIsSlot(TableModel):
    """Puts each node of a tree at the position of its slot, not of its depth."""

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        if block is not None:
            slots = jnp.arange(block.depth.shape[1], dtype=jnp.int32)[None]
            slots = jnp.broadcast_to(slots, block.depth.shape)
            block = Block(slots, block.ancestors)
        return super().apply(
            variables, tokens, cache, block=block, hidden_layers=hidden_layers
        )


class Uncommitted(TableCache):
    """Leaves the accepted path where it was, scattered among the nodes."""

    def commit(self, start, path):
        """See `base.Cache`."""
        return self


class CommittedAlong(TableCache):
    """Moves slot after slot and counts each from the one that was written last."""

    def commit(self, start, path):
        """See `base.Cache`."""
        cache = TableCache(*self)
        for i in range(path.shape[1]):
            cache = cache.commit(start + i, path[:, i : i + 1])
        return CommittedAlong(*cache)


@dataclass(frozen=True)
class WithCache(TableModel):
    """A table model whose caches are of another kind."""

    kind: type = TableCache

    def init_cache(self, batch_size, capacity):
        """See `base.LanguageModel`."""
        return self.kind(*super().init_cache(batch_size, capacity))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        output, after = super().apply(
            variables, tokens, cache, block=block, hidden_layers=hidden_layers
        )
        return output, self.kind(*after)


@dataclass(frozen=True)
class LikeliestToldAsDrawn(TreeDrafter):
    """Takes the likeliest children and says that they were drawn from the law."""

    def draft(self, state, context):
        """See `base.Drafter`."""
        honest = TreeDrafter(self.model, self.parents, "ranked", self.vocab_size)
        told, _, _ = super().draft(state, context)
        draft, state, cache = honest.draft(state, context)
        if told.log_probs is None:  # a greedy draft is ranked and honest
            return draft, state, cache
        return draft._replace(log_probs=told.log_probs), state, cache


@dataclass(frozen=True)
class PrunesUnlikely(TreeDrafter):
    """Draws children of the root and keeps the likeliest, in the order drawn."""

    kept: int = 2

    def draft(self, state, context):
        """See `base.Drafter`."""
        draft, state, cache = super().draft(state, context)
        if draft.log_probs is None:  # a greedy draft is one-hot and honest
            return draft, state, cache
        chance = of_tokens(draft.log_probs, draft.tokens)
        likelier = (chance[:, None] > chance[..., None]).sum(-1, dtype=jnp.int32)
        order = jnp.argsort(likelier >= self.kept, axis=1, stable=True)
        draft = draft._replace(
            tokens=jnp.take_along_axis(draft.tokens, order, axis=1),
            num_valid=jnp.minimum(draft.num_valid, self.kept),
        )
        return draft, state, cache

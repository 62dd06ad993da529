"""Several trees under one root (SpecInfer, arXiv:2305.09781).

Each draft model grows branches of its own from the last committed token, and one pass
of the target verifies all of them. Left as they are, equal nodes of two models stay
apart, each with the law it was drawn from: siblings are independent, and recursive
rejection judges them. Merged, nodes with the same tokens on the way are one, which has
the children of both; siblings are then of no one law, and the coupled rule judges them.

Several samples of one model are one tree with independent siblings, or distinct ones;
`TreeDrafter` grows those. Joined with itself and merged, such a tree gives its
duplicates' children to one node.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.base import Draft, Params, RoundContext
from specdec_jax.drafters.tree import MAX_NODES, TreeDrafter, node_depths
from specdec_jax.sampling import certain


@dataclass(frozen=True)
class JoinedTrees:
    """Drafts with several trees at once; `params.draft` has one entry a tree.

    Args:
      trees: The trees. Their windows are widened to what the deepest one needs.
      merge: Whether equal nodes become one. Needed unless all siblings are independent.

    Raises:
      ValueError: There is no tree, there are too many nodes, or trees whose siblings
        are not independent are not to be merged.
    """

    trees: tuple[TreeDrafter, ...]
    merge: bool = False
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses what no rule could judge, and widens the windows."""
        if not 1 <= sum(tree.num_nodes for tree in self.trees) <= MAX_NODES:
            raise ValueError(
                f"{len(self.trees)} trees of "
                f"{[tree.num_nodes for tree in self.trees]} nodes were joined; they "
                f"must have 1 to {MAX_NODES} together"
            )
        if not self.merge and any(t.siblings != "independent" for t in self.trees):
            raise ValueError(
                "trees that are not merged must have independent siblings: children of "
                "one node come from several models"
            )
        window = self.depth + 1
        widened = (replace(t, window=max(t.window, window)) for t in self.trees)
        object.__setattr__(self, "trees", tuple(widened))

    @property
    def num_nodes(self) -> int:
        """N, of all trees together."""
        return sum(tree.num_nodes for tree in self.trees)

    @property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return max(tree.depth for tree in self.trees)

    @property
    def siblings(self) -> str:
        """Independent, or ranked if merged."""
        return "ranked" if self.merge else "independent"

    @property
    def model(self) -> tuple[Any, ...]:
        """The models that draft, in the structure of `Params.draft`."""
        return tuple(tree.model for tree in self.trees)

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the trees' empty states."""
        return tuple(
            tree.init(own, batch_size, capacity, inputs)
            for tree, own in zip(self.trees, self._each(params), strict=True)
        )

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts with every model."""
        chunk = (tokens, start, num_valid, target_output)
        return tuple(
            tree.prefill(own, each, *chunk)
            for tree, own, each in zip(
                self.trees, self._each(params), state, strict=True
            )
        )

    def draft(self, state, context: RoundContext):
        """Grows all trees and joins them, breadth first."""
        drafts, states = [], []
        owns = self._each(context.params)
        for index, (tree, own) in enumerate(zip(self.trees, owns, strict=True)):
            inner = context._replace(
                params=own,
                max_draft=jnp.minimum(context.max_draft, tree.depth),
                # By position there is one noise for all: each draws what is coupled.
                noise=context.noise.child(index),
            )
            draft, new_state, _ = tree.draft(state[index], inner)
            drafts.append(draft)
            states.append(new_state)
        parents, order = _join(self.trees)
        batch = len(context.length)
        tokens = jnp.concatenate([draft.tokens for draft in drafts], axis=1)
        laws = _laws(drafts)
        joined = Draft(
            tokens=tokens[:, order],
            num_valid=jnp.full((batch,), self.num_nodes, jnp.int32),
            log_probs=None if laws is None else laws[:, order],
            parents=jnp.broadcast_to(jnp.asarray(parents), (batch, self.num_nodes)),
        )
        if self.merge:
            joined = merge_duplicates(joined)
        return joined, tuple(states), context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is: the next windows read what was accepted."""
        return state

    def _each(self, params: Params) -> list[Params]:
        return [Params(params.target, own) for own in params.draft]


def _join(trees) -> tuple[np.ndarray, np.ndarray]:
    """Returns the joined tree's parents, and which of all nodes each of its is."""
    depths, parents, first = [], [], 0
    for tree in trees:
        depths += node_depths(tree.parents)
        parents += [parent + first if parent >= 0 else -1 for parent in tree.parents]
        first += tree.num_nodes
    order = np.argsort(depths, kind="stable")
    place = np.argsort(order)
    above = np.array(parents)[order]
    joined = np.where(above < 0, -1, place[above])
    return joined.astype(np.int32), order


def _laws(drafts: list[Draft]) -> Float[Array, "B N V"] | None:
    """Returns the laws that all trees' nodes were drawn from; None if none has any."""
    told = [draft.log_probs for draft in drafts if draft.log_probs is not None]
    if not told:
        return None
    each = [
        certain(draft.tokens, told[0].shape[-1])
        if draft.log_probs is None
        else draft.log_probs
        for draft in drafts
    ]
    return jnp.concatenate(each, axis=1)


def merge_duplicates(draft: Draft) -> Draft:
    """Returns a tree in which nodes with the same tokens on the way are one.

    Of equal nodes the first stays, with its law and the children of all. Nodes stay
    breadth first, and `num_valid` counts those that are left.

    Example:
      Two chains 5 6 and 5 7 become one node with two children:

      >>> merged = merge_duplicates(Draft(
      ...     tokens=jnp.array([[5, 5, 6, 7]]), num_valid=jnp.array([4]),
      ...     parents=jnp.array([[-1, -1, 0, 1]])))
      >>> merged.tokens[0, :3].tolist(), merged.parents[0, :3].tolist()
      ([5, 6, 7], [-1, 0, 0])
      >>> merged.num_valid.tolist()
      [3]
    """
    assert draft.parents is not None
    tokens, parents = draft.tokens, draft.parents
    batch, num_nodes = tokens.shape
    rows = jnp.arange(batch, dtype=jnp.int32)
    slots = jnp.arange(num_nodes, dtype=jnp.int32)[None]

    def merge_node(
        node: Array, carry: tuple[Array, Array]
    ) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
        first, above = carry  # first of each node's equals; its parent, merged
        parent = parents[:, node]
        parent = jnp.where(parent < 0, -1, first[rows, jnp.maximum(parent, 0)])
        above = above.at[:, node].set(parent)
        same = (above == parent[:, None]) & (tokens == tokens[:, node][:, None])
        found = jnp.argmax(same & (slots <= node), axis=1).astype(jnp.int32)
        return first.at[:, node].set(found), above

    start = jnp.full_like(parents, -2)  # no node's parent
    first, above = jax.lax.fori_loop(0, num_nodes, merge_node, (start, start))
    alive = (first == slots) & (slots < draft.num_valid[:, None])
    place = jnp.cumsum(alive, axis=1, dtype=jnp.int32) - 1
    order = jnp.argsort(~alive, axis=1, stable=True).astype(jnp.int32)
    above = jnp.take_along_axis(above, order, axis=1)
    moved = jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1)
    left = alive.sum(axis=1, dtype=jnp.int32)
    parents = jnp.where((above < 0) | (slots >= left[:, None]), -1, moved)
    laws = draft.log_probs
    if laws is not None:  # for whoever records rounds: the rule needs none
        laws = jnp.take_along_axis(laws, order[..., None], axis=1)
    return Draft(
        tokens=jnp.take_along_axis(tokens, order, axis=1),
        num_valid=left,
        log_probs=laws,
        parents=parents,
    )

"""A token tree whose shape follows the draft's confidence (EAGLE-2, arXiv:2406.16858).

A node is worth the product of the draft's probabilities on the way to it. Level by
level the `width` most valuable nodes are expanded by their `width` likeliest children,
and of all nodes seen the N most valuable are kept. Values fall along paths, so what is
kept is a tree; its shape is computed on the device, in arrays of fixed size.

The children are chosen by what they are: they are ranked, and only the coupled rule
can judge them.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.base import Block, Draft, LanguageModel, RoundContext
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.siblings import choose, lively, unfiltered
from specdec_jax.drafters.tree import MAX_NODES
from specdec_jax.rng import NoNoise
from specdec_jax.sampling import History, policy
from specdec_jax.verify import ancestry


class Candidates(NamedTuple):
    """Nodes seen so far, breadth first."""

    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]
    """Among the candidates; -1 is the last committed token."""
    values: Float[Array, "B C"]
    """Log of the product of the draft's probabilities on the way; no NaN."""


class _Frontier(NamedTuple):
    """The nodes that the next level hangs from."""

    slots: Int[Array, "B F"]
    """Their places among the candidates; -1 for the last committed token."""
    values: Float[Array, "B F"]
    tail: Int[Array, "B F P"]
    """Tokens on the way to each of them, itself included."""


@dataclass(frozen=True)
class DynamicTreeDrafter:
    """Grows the N most valuable nodes, for one forward of the draft model a level.

    Args:
      model: The draft model.
      num_nodes: Nodes of the tree, N.
      depth: Levels, at the most.
      width: Nodes expanded on each level, and children of each.
      vocab_size: The target's; None where it is the model's own.
      window: Tokens re-read each round, if more than depth + 1; see `TreeDrafter`.

    Raises:
      ValueError: The sizes make no tree.
    """

    model: LanguageModel
    num_nodes: int
    depth: int
    width: int
    vocab_size: int | None = None
    window: int = 0
    siblings: ClassVar[str] = "ranked"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses sizes that make no tree."""
        if self.depth < 1 or self.width < 1:
            raise ValueError(
                f"depth is {self.depth} and width {self.width}; they must be at least 1"
            )
        seen = self.width + (self.depth - 1) * self.width**2
        if not self.depth <= self.num_nodes <= min(seen, MAX_NODES):
            raise ValueError(
                f"num_nodes is {self.num_nodes}; depth {self.depth} and width "
                f"{self.width} make trees of {self.depth} to {min(seen, MAX_NODES)}"
            )

    @property
    def reader(self) -> ModelDrafter:
        """What reads tokens into the model's cache."""
        window = max(self.window, self.depth + 1)
        return ModelDrafter(self.model, self.depth, self.vocab_size, window)

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns an empty cache."""
        # A level is read before it is known which of its nodes are kept.
        read = (self.depth - 1) * self.width
        extra = max(read - self.num_nodes, 0)
        return self.model.init_cache(batch_size, capacity + extra)

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts."""
        return self.reader.prefill(
            params, state, tokens, start, num_valid, target_output
        )

    def draft(self, state, context: RoundContext):
        """Grows the tree, one forward a level, and keeps the best of it."""
        logits, cache = self.reader._catch_up(state, context)
        candidates, frontier = _roots(context)
        fed_slots = jnp.zeros((len(context.length), 0), jnp.int32)
        for depth in range(self.depth):
            if depth > 0:
                frontier = _expand(candidates, frontier, depth, self.width)
                fed_slots = jnp.concatenate([fed_slots, frontier.slots], axis=1)
                block = _block(candidates, fed_slots, self.width)
                logits, cache = self.reader._apply(
                    context.params, frontier.tail[:, :, -1], cache, block
                )
            candidates = self._hang(candidates, frontier, logits, context)
        return keep_best(candidates, self.num_nodes), cache, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is: the next window reads what was accepted."""
        return state

    def _hang(self, candidates, frontier, logits, context):
        """Returns the candidates with the children of the frontier."""
        settings, greedy = lively(context.sampling, len(context.length))
        size = jnp.full(frontier.slots.shape, frontier.tail.shape[2], jnp.int32)
        history = History(context.tokens, context.length, frontier.tail, size)
        law = policy(logits, unfiltered(settings), history)
        children = choose(
            law, greedy, NoNoise(), 0, kind="ranked", count=self.width
        )  # [B F width]
        values = frontier.values[:, :, None] + jnp.take_along_axis(law, children, 2)
        values = jnp.where(jnp.isnan(values), -jnp.inf, values).astype(jnp.float32)
        parents = jnp.broadcast_to(frontier.slots[:, :, None], children.shape)
        batch = len(children)
        return Candidates(
            *(
                jnp.concatenate([old, new.reshape(batch, -1)], axis=1)
                for old, new in zip(
                    candidates, (children, parents, values), strict=True
                )
            )
        )


def _roots(context: RoundContext) -> tuple[Candidates, _Frontier]:
    """Returns no candidates, and the last committed token as frontier."""
    batch = len(context.length)
    none = jnp.zeros((batch, 0), jnp.int32)
    start = _Frontier(
        slots=jnp.full((batch, 1), -1, jnp.int32),
        values=jnp.zeros((batch, 1), jnp.float32),
        tail=jnp.zeros((batch, 1, 0), jnp.int32),
    )
    return Candidates(none, none, none.astype(jnp.float32)), start


def _expand(
    candidates: Candidates, frontier: _Frontier, depth: int, width: int
) -> _Frontier:
    """Returns the most valuable nodes of the level that was hung last."""
    level = candidates.values.shape[1] - frontier.slots.shape[1] * width
    values, place = jax.lax.top_k(candidates.values[:, level:], width)
    slots = level + place
    tokens = jnp.take_along_axis(candidates.tokens, slots, axis=1)
    # Children of one node lie together, in the frontier's order.
    above = jnp.take_along_axis(frontier.tail, (place // width)[..., None], axis=1)
    tail = jnp.concatenate([above, tokens[..., None]], axis=2)
    assert tail.shape[2] == depth
    return _Frontier(slots, values, tail)


def _block(candidates: Candidates, fed_slots: Int[Array, "B M"], width: int) -> Block:
    """Returns how the nodes read so far hang together; each level has `width`."""
    parents = jnp.take_along_axis(candidates.parents, fed_slots, axis=1)
    # A node's parent was read as well, and no other node has its place.
    same = parents[:, :, None] == fed_slots[:, None, :]
    fed_parents = jnp.where(same.any(-1), jnp.argmax(same, axis=-1), -1)
    ancestors, depth = ancestry(fed_parents.astype(jnp.int32))
    return Block(depth[:, 1:] - 1, ancestors[:, 1:, 1:])


def keep_best(candidates: Candidates, num_nodes: int) -> Draft:
    """Returns the tree of the most valuable candidates; of equals the earlier ones.

    A parent comes before its children and is worth no less, so it is kept with them.

    Args:
      candidates: Breadth first.
      num_nodes: How many to keep.

    Example:
      Nodes 0 and 1 follow the last token, 2 and 3 follow 0, and 4 follows 1:

      >>> draft = keep_best(Candidates(
      ...     tokens=jnp.array([[7, 8, 9, 5, 6]]),
      ...     parents=jnp.array([[-1, -1, 0, 0, 1]]),
      ...     values=jnp.log(jnp.array([[0.6, 0.3, 0.1, 0.5, 0.2]]))), 4)
      >>> draft.tokens.tolist(), draft.parents.tolist()
      ([[7, 8, 5, 6]], [[-1, -1, 0, 1]])
    """
    best = jax.lax.top_k(candidates.values, num_nodes)[1]
    slots = jnp.sort(best, axis=1)
    parents = jnp.take_along_axis(candidates.parents, slots, axis=1)
    place = jnp.argmax(parents[:, :, None] == slots[:, None, :], axis=-1)
    batch = len(slots)
    return Draft(
        tokens=jnp.take_along_axis(candidates.tokens, slots, axis=1),
        num_valid=jnp.full((batch,), num_nodes, jnp.int32),
        parents=jnp.where(parents < 0, -1, place).astype(jnp.int32),
    )

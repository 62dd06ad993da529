"""A token tree of fixed shape, grown from a small language model level by level.

    branching (2, 1)              slots 0 1 | 2 3, parents -1 -1 | 0 1

    last token --- 0 --- 2        one forward gives the law of 0 and 1, the next one
               |                  reads 0 and 1 together and gives those of 2 and 3:
               `-- 1 --- 3        a level costs one forward

SpecInfer (arXiv:2305.09781) and Sequoia (arXiv:2402.12374) verify such trees in one
pass; `tree_choice` finds the shape. What is drawn, and which rules can judge it, is
in `siblings`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specdec_jax.base import Block, Draft, LanguageModel, RoundContext
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.siblings import (
    KINDS,
    choose,
    has_laws,
    lively,
    told,
    unfiltered,
)
from specdec_jax.sampling import History, policy

MAX_NODES = 1024


def branching_parents(branching: Sequence[int]) -> tuple[int, ...]:
    """Returns the parents of a tree in which nodes of level i have `branching[i]` each.

    Raises:
      ValueError: A number is below 1, there is none, or the tree has more than
        `MAX_NODES` nodes.

    Example:
      >>> branching_parents((2, 1))
      (-1, -1, 0, 1)
    """
    if not branching or not all(
        isinstance(b, int) and not isinstance(b, bool) and b >= 1 for b in branching
    ):
        raise ValueError(
            f"branching is {branching!r}; give whole numbers of at least 1, such as "
            "3,2,1: the children of each node, level by level"
        )
    parents: list[int] = []
    level = [-1]
    for number in branching:
        if len(parents) + len(level) * number > MAX_NODES:
            sizes = np.cumprod([float(b) for b in branching]).sum()
            raise ValueError(
                f"branching {','.join(map(str, branching))} makes a tree of "
                f"{sizes:.0f} nodes; at most {MAX_NODES} are offered"
            )
        first = len(parents)
        parents += [node for node in level for _ in range(number)]
        level = list(range(first, len(parents)))
    return tuple(parents)


def read_parents(branching: Sequence[int]) -> tuple[int, ...]:
    """Returns the parents of a tree as users give it: a branching, or the parents.

    Args:
      branching: Children of each node, level by level; or the parent of each node,
        breadth first, which begins with -1.

    Raises:
      ValueError: It is neither.

    Example:
      >>> read_parents((2, 1)), read_parents((-1, -1, 0))
      ((-1, -1, 0, 1), (-1, -1, 0))
    """
    if not branching or branching[0] != -1:
        return branching_parents(branching)
    parents = tuple(branching)
    check_parents(parents)
    return parents


def node_depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each node, 1 for those that follow the last token.

    Example:
      >>> node_depths((-1, -1, 0))
      [1, 1, 2]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def check_parents(parents: Sequence[int]) -> None:
    """Refuses what is no tree in breadth-first order.

    Raises:
      ValueError: Saying which node is wrong.
    """
    if not 1 <= len(parents) <= MAX_NODES:
        raise ValueError(
            f"the tree has {len(parents)} nodes; it must have 1 to {MAX_NODES}"
        )
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"node {node} has parent {parent}; parents come before their children, "
                "and -1 is the last committed token"
            )
    depths = node_depths(parents)
    for node in range(1, len(parents)):
        if depths[node] < depths[node - 1]:
            raise ValueError(
                f"node {node} has depth {depths[node]} and follows one of depth "
                f"{depths[node - 1]}; give the nodes breadth first"
            )


class _Level(NamedTuple):
    """One level of a fixed tree: its nodes, and the inner nodes that they hang from."""

    fed: list[int]
    """Nodes of the level above that have children, read in this level's forward; empty
    for the first level, which hangs from the last token."""
    parent: list[int]
    """Place of each node's parent in `fed`; 0 on the first level."""
    rank: list[int]
    """Place of each node among its siblings."""
    paths: list[list[int]]
    """Nodes on the way to each fed node, itself included."""


def _levels(parents: Sequence[int]) -> list[_Level]:
    """Returns the levels of a tree, in order."""
    depths, levels = node_depths(parents), []
    for depth in range(1, max(depths) + 1):
        nodes = [i for i, d in enumerate(depths) if d == depth]
        fed = sorted({parents[i] for i in nodes})
        family = [[i for i in nodes if parents[i] == node] for node in fed]
        place = [fed.index(parents[i]) for i in nodes]
        rank = [family[p].index(i) for i, p in zip(nodes, place, strict=True)]
        if depth == 1:
            fed = []
        levels.append(_Level(fed, place, rank, [_path(parents, node) for node in fed]))
    return levels


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def fixed_block(parents: Sequence[int], read: Sequence[int], batch_size: int) -> Block:
    """Returns the block of the nodes read so far, as `base.Block` wants it.

    Args:
      parents: Of the whole tree.
      read: Nodes read so far and in this call, in order; their parents are among them.
      batch_size: B; every row has the same tree.
    """
    place = {node: slot for slot, node in enumerate(read)}
    ancestors = np.zeros((len(read), len(read)), bool)
    for node, slot in place.items():
        ancestors[slot, [place[above] for above in _path(parents, node)]] = True
    depth = ancestors.sum(-1).astype(np.int32) - 1
    return Block(
        jnp.broadcast_to(jnp.asarray(depth), (batch_size, len(read))),
        jnp.broadcast_to(jnp.asarray(ancestors), (batch_size, *ancestors.shape)),
    )


@dataclass(frozen=True)
class TreeDrafter:
    """Draws a tree of fixed shape from a causal language model with its own cache.

    Every call re-reads the last `window` committed tokens: the accepted path lies
    scattered among the nodes that the last round read, so no slot above the last
    committed token of that round is used again.

    Args:
      model: The draft model.
      parents: Parent of each node, breadth first, -1 for the last committed token; see
        `branching_parents`.
      siblings: How children are chosen: "independent", "distinct" or "ranked".
      vocab_size: The target's; None where it is the model's own.
      window: Tokens re-read each round, if more than depth + 1, which a round emits at
        the most. A child of a composed drafter needs the outermost depth + 1.

    Raises:
      ValueError: The parents are no tree in breadth-first order, or there is no such
        way to choose siblings.
    """

    model: LanguageModel
    parents: tuple[int, ...]
    siblings: str = "distinct"
    vocab_size: int | None = None
    window: int = 0
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses what is no tree."""
        check_parents(self.parents)
        if self.siblings not in KINDS:
            raise ValueError(
                f"siblings is {self.siblings!r}; offered are {', '.join(KINDS)}"
            )

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        return max(node_depths(self.parents))

    @property
    def reader(self) -> ModelDrafter:
        """What reads tokens into the model's cache."""
        window = max(self.window, self.depth + 1)
        return ModelDrafter(self.model, self.depth, self.vocab_size, window)

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns an empty cache."""
        return self.model.init_cache(batch_size, capacity)

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts."""
        return self.reader.prefill(
            params, state, tokens, start, num_valid, target_output
        )

    def draft(self, state, context: RoundContext):
        """Grows the tree, one forward a level."""
        batch_size = context.length.shape[0]
        settings, greedy = lively(context.sampling, batch_size)
        if self.siblings == "ranked":
            settings = unfiltered(settings)
        logits, cache = self.reader._catch_up(state, context)
        tokens = jnp.zeros((batch_size, 0), jnp.int32)
        laws, read = [], []
        for depth, level in enumerate(_levels(self.parents)):
            if level.fed:
                read += level.fed
                block = fixed_block(self.parents, read, batch_size)
                fed = tokens[:, np.array(level.fed)]
                logits, cache = self.reader._apply(context.params, fed, cache, block)
            history = _history(context, tokens, level)
            law = policy(logits, settings, history)
            chosen = choose(
                law,
                greedy,
                context.noise,
                depth,
                kind=self.siblings,
                count=max(level.rank) + 1,
            )
            place, rank = np.array(level.parent), np.array(level.rank)
            own = chosen[:, place, rank]
            tokens = jnp.concatenate([tokens, own], axis=1)
            if has_laws(context.sampling, self.siblings):
                laws.append(told(law[:, place], own, greedy))
        parents = jnp.broadcast_to(
            jnp.array(self.parents, jnp.int32), (batch_size, self.num_nodes)
        )
        draft = Draft(
            tokens=tokens,
            num_valid=jnp.full((batch_size,), self.num_nodes, jnp.int32),
            log_probs=jnp.concatenate(laws, axis=1) if laws else None,
            parents=parents,
        )
        return draft, cache, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is: the next window reads what was accepted."""
        return state


def _history(context: RoundContext, tokens: Int[Array, "B N"], level: _Level) -> Any:
    """Returns what came before each node that the level hangs from."""
    if not level.fed:
        return History.plain(context.tokens, context.length)
    tail = tokens[:, np.array(level.paths)]
    return History(
        context.tokens,
        context.length,
        tail,
        jnp.full(tail.shape[:2], tail.shape[2], jnp.int32),
    )

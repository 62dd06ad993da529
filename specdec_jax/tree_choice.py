"""Which token tree to draft: the one that gains most for what it costs.

What a target follows at a node is its child of rank 0, 1, 2, ... or none. With a_r the
chance of rank r, a node is reached with the product of these along its path, and

    E[N] = 1 + sum over nodes of that product

Sequoia (Chen et al., arXiv:2402.12374) finds the best tree of N nodes by a dynamic
programme over how a node's budget is shared among its children. A round costs v(N) for
the target's pass over N + 1 tokens and 1/c for each level that is drafted, in plain
steps; see `theory` for both.

Plain numpy on the host: it runs once, before anything is compiled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class TreeChoice(NamedTuple):
    """A tree, and what it is expected to bring."""

    parents: tuple[int, ...]
    """Breadth first, -1 for the last committed token; empty: do not speculate."""
    expected_tokens: float
    """E[N], in tokens a round."""
    speedup: float
    """Plain time over speculative time a token."""


def node_acceptance(
    parents: Sequence[int], acceptance: Float[np.ndarray, "*L R"]
) -> Float[np.ndarray, " N"]:
    """Returns the chance that each node is accepted.

    Args:
      parents: Of each node, parents first, siblings in the order of their ranks.
      acceptance: a_r; or [D, R], one row a level.

    Raises:
      ValueError: A node has a depth or rank that has no chance given.

    Example:
      >>> node_acceptance((-1, -1, 0), np.array([0.6, 0.2])).round(2).tolist()
      [0.6, 0.2, 0.36]
    """
    depths: list[int] = []
    chances: list[float] = []
    for node, parent in enumerate(parents):
        depth = depths[parent] + 1 if parent >= 0 else 0
        rank = list(parents[:node]).count(parent)
        by_level = acceptance.ndim == 2
        if rank >= acceptance.shape[-1] or (by_level and depth >= len(acceptance)):
            raise ValueError(
                f"node {node} is on level {depth + 1} and of rank {rank}; chances came "
                f"in the shape {acceptance.shape}"
            )
        depths.append(depth)
        own = acceptance[depth, rank] if by_level else acceptance[rank]
        chances.append(float(own) * (chances[parent] if parent >= 0 else 1.0))
    return np.array(chances)


def best_tree(
    acceptance: Float[np.ndarray, "*L R"], num_nodes: int, depth: int
) -> tuple[tuple[int, ...], float]:
    """Returns the tree of the most expected tokens, and these.

    Args:
      acceptance: a_r, the chance that the child of rank r is the accepted one, given
        that its parent was accepted; or [D, R], one row a level.
      num_nodes: Nodes at the most; fewer where more would bring nothing.
      depth: Levels at the most.

    Raises:
      ValueError: A size is below 1, or chances are missing or no chances.

    Example:
      >>> parents, expected = best_tree(np.array([0.6, 0.2]), 4, 3)
      >>> parents, round(expected, 3)
      ((-1, -1, 0, 2), 2.376)
    """
    values, choices = _programme(_by_level(acceptance, num_nodes, depth), num_nodes)
    return _build(choices, num_nodes), 1 + float(values[num_nodes])


def choose_tree(
    acceptance: Float[np.ndarray, "*L R"],
    cost_ratio: float,
    verify_factor: Float[np.ndarray, " M"],
    depth: int,
) -> TreeChoice:
    """Returns the fastest tree of up to M - 1 nodes and the given depth.

    Args:
      acceptance: As for `best_tree`.
      cost_ratio: c, a plain step of the target over a forward of the draft model.
      verify_factor: v(0..N), in plain steps, for blocks of 1 to N + 1 tokens.
      depth: Levels at the most.

    Example:
      Where nodes are free to verify, all of them are used; where each costs half a
      plain step, the likely ones:

      >>> acceptance, free = np.array([0.6, 0.2]), np.ones(5)
      >>> choose_tree(acceptance, 20.0, free, 2).parents
      (-1, -1, 0, 1)
      >>> choose_tree(acceptance, 20.0, 1 + 0.5 * np.arange(5), 2).parents
      (-1,)
    """
    sized = trees_by_size(acceptance, cost_ratio, verify_factor, depth)
    return max([TreeChoice((), 1.0, 1.0), *sized], key=lambda one: one.speedup)


def trees_by_size(
    acceptance: Float[np.ndarray, "*L R"],
    cost_ratio: float,
    verify_factor: Float[np.ndarray, " M"],
    depth: int,
) -> list[TreeChoice]:
    """Returns the fastest tree of each size from 1 to M - 1 nodes, as `choose_tree`.

    The same budget may go into few levels or many: a level costs a draft step. Where
    one more node would bring nothing, whatever the depth, a size is left out.

    Example:
      >>> sized = trees_by_size(np.array([0.6, 0.2]), 20.0, np.ones(5), 4)
      >>> [one.parents for one in sized]
      [(-1,), (-1, 0), (-1, -1, 0), (-1, -1, 0, 1)]
    """
    num_nodes = len(verify_factor) - 1
    best: dict[int, TreeChoice] = {}
    for levels in range(1, depth + 1):
        values, choices = _programme(
            _by_level(acceptance, num_nodes, levels), num_nodes
        )
        speedups = (1 + values) / (verify_factor + levels / cost_ratio)
        for size in range(1, num_nodes + 1):
            parents = _build(choices, size)
            one = TreeChoice(parents, 1 + float(values[size]), float(speedups[size]))
            is_first = size not in best
            if len(parents) == size and (is_first or one.speedup > best[size].speedup):
                best[size] = one
    return [best[size] for size in sorted(best)]


def rank_acceptance(
    parents: np.ndarray, accepted: np.ndarray, num_valid: np.ndarray
) -> tuple[Float[np.ndarray, " R"], np.ndarray]:
    """Returns the measured a_r of rounds, and how often each rank was offered.

    A rank is offered where a node was accepted (or is the last committed token) and has
    a child of that rank.

    Args:
      parents: [..., N], as in `trace.Trace`, whose other fields these are as well.
      accepted: [..., N].
      num_valid: [...]; 0 for rounds that did not happen.

    Example:
      Two rounds of a tree of two roots: the second was accepted, then none:

      >>> rates, offered = rank_acceptance(np.array([[-1, -1], [-1, -1]]),
      ...     np.array([[False, True], [False, False]]), np.array([2, 2]))
      >>> rates.tolist(), offered.tolist()
      ([0.0, 0.5], [2, 2])
    """
    num_nodes = parents.shape[-1]
    rows = zip(
        parents.reshape(-1, num_nodes).tolist(),
        accepted.reshape(-1, num_nodes).tolist(),
        num_valid.reshape(-1).tolist(),
        strict=True,
    )
    offered, kept = np.zeros(num_nodes, int), np.zeros(num_nodes, int)
    for above, taken, valid in rows:
        seen: dict[int, int] = {}
        for node in range(valid):
            parent = above[node]
            rank = seen[parent] = seen.get(parent, -1) + 1
            if parent < 0 or taken[parent]:
                offered[rank] += 1
                kept[rank] += taken[node]
    size = max(int((offered > 0).sum()), 1)
    rates = kept[:size] / np.maximum(offered[:size], 1)
    return rates, offered[:size]


def _by_level(
    acceptance: Float[np.ndarray, "*L R"], num_nodes: int, depth: int
) -> Float[np.ndarray, "D R"]:
    """Returns one row of chances a level, checked."""
    if num_nodes < 1 or depth < 1:
        raise ValueError(
            f"num_nodes is {num_nodes} and depth {depth}; they must be at least 1"
        )
    acceptance = np.asarray(acceptance, np.float64)
    if acceptance.ndim == 1:
        acceptance = np.broadcast_to(acceptance, (depth, len(acceptance)))
    if acceptance.ndim != 2 or len(acceptance) < depth or not acceptance.shape[1]:
        raise ValueError(
            f"chances of shape {acceptance.shape} came for depth {depth}; give [R] or "
            "one row a level"
        )
    sums = acceptance.sum(-1)
    if (
        not (np.isfinite(acceptance).all() and (acceptance >= 0).all())
        or (sums > 1 + 1e-6).any()
    ):
        raise ValueError(
            "at most one child is accepted: the chances of a level must be at least 0 "
            f"and sum to at most 1, got {acceptance.tolist()}"
        )
    return acceptance[:depth]


def _programme(
    acceptance: Float[np.ndarray, "D R"], num_nodes: int
) -> tuple[Float[np.ndarray, " M"], list[np.ndarray]]:
    """Returns the most accepted tokens of up to 0..N nodes, and how to get them.

    `choices[t][r, n]` nodes go to the child of rank r and what is below it, where n are
    left for the ranks from r on below a node of level t; 0 ends the children.
    """
    sizes = np.arange(num_nodes + 1)
    below = np.zeros(num_nodes + 1)
    choices: list[np.ndarray] = []
    for level in acceptance[::-1]:
        # The child itself and the best of what hangs from it, for m = 1..N nodes.
        subtree = 1 + below[:-1]
        rest = np.zeros(num_nodes + 1)
        chosen = np.zeros((len(level) + 1, num_nodes + 1), int)
        for rank in range(len(level) - 1, -1, -1):
            left = sizes[:, None] - sizes[None, 1:]
            value = level[rank] * subtree + rest[np.maximum(left, 0)]
            value = np.where(left >= 0, value, -1.0)
            # First of equals, and no child where none brings anything.
            value = np.concatenate([np.zeros((num_nodes + 1, 1)), value], axis=1)
            chosen[rank] = value.argmax(axis=1)
            rest = value.max(axis=1)
        below = rest
        choices.insert(0, chosen)
    return below, choices


def _build(choices: list[np.ndarray], num_nodes: int) -> tuple[int, ...]:
    """Returns the parents of the tree that the choices lead to, breadth first."""
    parents: list[int] = []
    waiting = [(-1, 0, num_nodes)]
    for node, level, budget in waiting:
        rank = 0
        while level < len(choices) and choices[level][rank, budget]:
            share = int(choices[level][rank, budget])
            waiting.append((len(parents), level + 1, share - 1))
            parents.append(node)
            budget -= share
            rank += 1
    return tuple(parents)

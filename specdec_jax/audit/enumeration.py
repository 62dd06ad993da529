"""The exact joint law that one round emits, by summing over everything it may draw.

For small vocabularies the sum over all drafts (V^N of them, chain or tree), stopping
places and next tokens is finite: no randomness, no threshold, deviations of order 1e-16
in float64. It sees what tests of the first token or of greedy text cannot: a wrong
bonus row, a token-wise residual under block acceptance, siblings that are judged alone.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Draft

Rows = Sequence[np.ndarray]
"""Policy rows by depth: item d has shape (V,) * (d + 1), the row after d tokens."""


def completed_law(target: Rows) -> np.ndarray:
    """Returns the target's joint law of len(target) tokens, (V,) * len(target).

    Args:
      target: Log-probabilities in nats, by depth.
    """
    law = np.ones(())
    for rows in target:
        law = law[..., None] * np.exp(rows)
    return law


def joint_law(
    law: Callable,
    target: Rows,
    draft: Sequence[Rows],
    *,
    parents: Sequence[int] | None = None,
    siblings: str = "none",
    num_valid: int | None = None,
    one_hot: bool = False,
) -> np.ndarray:
    """Returns the joint law of depth + 1 tokens when a round drafts a chain or a tree.

    Rounds that emit fewer tokens are completed by the target, so that a lossless rule
    gives `completed_law(target)` whatever the draft.

    Args:
      law: A rule's `law`, or anything of its signature.
      target: Policy rows of depth + 1 levels.
      draft: For each node the rows that it is drawn from, by depth: nodes may come from
        several models.
      parents: Of each node, -1 for the roots; None is a chain.
      siblings: How the children of a node are drawn, one of `base.SIBLINGS`. Ranked
        ones are the likeliest of their row, in order.
      num_valid: Nodes that the rule is told to look at; None is all.
      one_hot: The rule is told no law (`log_probs` None).

    Returns:
      float64 probabilities of shape (V,) * (depth + 1).
    """
    num_nodes, vocab_size = len(draft), target[0].shape[-1]
    above = list(range(-1, num_nodes - 1)) if parents is None else list(parents)
    paths: list[list[int]] = [[]]  # of each block slot, the nodes that lead there
    for node, parent in enumerate(above):
        paths.append([*paths[parent + 1], node])
    drafts = np.array(
        list(itertools.product(range(vocab_size), repeat=num_nodes)), np.int32
    ).reshape(-1, num_nodes)
    size = len(drafts)

    def rows_after(rows: Rows, path: list[int]) -> np.ndarray:
        found = rows[len(path)][tuple(drafts[:, path].T)]
        return np.broadcast_to(found, (size, vocab_size))

    target_rows = np.stack([rows_after(target, path) for path in paths], axis=1)
    draft_rows = np.zeros((size, num_nodes, vocab_size))
    for node, own in enumerate(draft):
        draft_rows[:, node] = rows_after(own, paths[above[node] + 1])
    batch = Draft(
        tokens=jnp.asarray(drafts),
        num_valid=jnp.full((size,), _or(num_valid, num_nodes), jnp.int32),
        log_probs=None if one_hot else jnp.asarray(draft_rows),
        parents=None if parents is None else jnp.tile(jnp.int32(parents), (size, 1)),
    )
    stop, following = _compiled(law)(batch, jnp.asarray(target_rows))
    mass = _mass(drafts, draft_rows, above, siblings)
    mass = mass[:, None] * np.asarray(stop, np.float64)
    # A draft that is never made has no law to speak of (0/0 there, 0 here).
    cases = np.where(mass[..., None] > 0, mass[..., None] * np.asarray(following), 0)

    emitted = [np.zeros((vocab_size,) * (depth + 1)) for depth in range(len(target))]
    for slot, path in enumerate(paths):
        place = (np.zeros(size, int), *drafts[:, path].T)  # a path may be empty
        np.add.at(emitted[len(path)][None], place, cases[:, slot])
    total = np.zeros(())
    for depth, rows in enumerate(target):
        if depth:
            total = total[..., None] * np.exp(rows)
        total = total + emitted[depth]
    return total


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def _mass(
    drafts: np.ndarray, rows: np.ndarray, above: list[int], siblings: str
) -> np.ndarray:
    """Returns the probability of each draft, [A].

    Where a law has fewer tokens than distinct siblings, the rest are drawn evenly from
    the tokens that are left, as garbage of any kind might be.
    """
    mass = np.ones(len(drafts))
    every = np.arange(len(drafts))
    for node, parent in enumerate(above):
        probs = np.exp(rows[:, node])
        older = [other for other in range(node) if above[other] == parent]
        if siblings == "distinct" and older:
            free = np.ones(probs.shape)
            np.put_along_axis(free, drafts[:, older], 0, axis=1)
            left = probs * free
            left = np.where(left.sum(-1, keepdims=True) > 0, left, free)
            probs = left / left.sum(-1, keepdims=True)
        elif siblings == "ranked":
            order = np.argsort(-probs, axis=-1, kind="stable")
            probs = np.zeros(probs.shape)
            np.put_along_axis(probs, order[:, len(older), None], 1, axis=1)
        mass = mass * probs[every, drafts[:, node]]
    return mass


def chain_law(law: Callable, target: Rows, draft: Rows, **options: Any) -> np.ndarray:
    """Returns `joint_law` of a chain whose nodes all come from one model.

    Args:
      law: A rule's `law`, or anything of its signature.
      target: K + 1 arrays of policy rows.
      draft: K arrays of the rows that draft tokens are drawn from.
      **options: `num_valid` and `one_hot` of `joint_law`.
    """
    return joint_law(law, target, [draft] * len(draft), **options)


@functools.lru_cache(maxsize=16)
def _compiled(law: Callable) -> Callable:
    return jax.jit(jax.vmap(law))


def deviation(law: Callable, target: Rows, draft: Rows, **options) -> float:
    """Returns the largest absolute deviation from the target's joint law."""
    return _furthest(chain_law(law, target, draft, **options), target)


def _furthest(emitted: np.ndarray, target: Rows) -> float:
    """Returns the largest deviation from the target; a NaN is no law."""
    worst = float(np.abs(emitted - completed_law(target)).max())
    return worst if worst == worst else float("inf")


TOLERANCE = 1e-12
"""Deviation, in probability, that float64 sums over small tables explain."""

SIZES = ((3, 1), (4, 2), (3, 3))
"""Pairs of vocabulary size and draft length on which `worst_deviation` sums."""


def random_tables(
    seed: int,
    vocab_size: int,
    num_draft_tokens: int,
    *,
    keep: int | None = None,
    target_keep: int | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns policy rows that depend on the context: the target's and the draft's.

    Args:
      seed: Of the tables.
      vocab_size: V.
      num_draft_tokens: K.
      keep: The draft's rows keep that many tokens, as top-k does; None keeps all.
      target_keep: The same of the target's rows.
    """
    rng = np.random.default_rng(seed)

    def rows(depth: int) -> np.ndarray:
        logits = 1.5 * rng.standard_normal((vocab_size,) * (depth + 1))
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    target = [rows(depth) for depth in range(num_draft_tokens + 1)]
    draft = [rows(depth) for depth in range(num_draft_tokens)]
    if target_keep is not None:
        target = [_cut(row, target_keep) for row in target]
    if keep is not None:
        draft = [_cut(row, keep) for row in draft]
    return target, draft


def _cut(rows: np.ndarray, keep: int) -> np.ndarray:
    bar = np.sort(rows, axis=-1)[..., -keep, None]
    kept = np.where(rows >= bar, rows, -np.inf)
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


TREES = ((-1, -1, 0, 0, 1, 1), (-1, -1, -1, 0, 0, 2))
"""Parents of the small trees on which `tree_deviation` sums; of one size."""


def tree_deviation(
    rule: Any, siblings: str, vocab_size: int = 3, trees: Sequence = TREES
) -> float:
    """Returns the largest deviation of a rule's joint law on small trees.

    Draft laws with all tokens, with two, and with one (as at temperature 0: the further
    siblings are garbage); a greedy target; drafts that are not all valid. Independent
    siblings come from several models, one a rank.
    """
    worst = 0.0
    for seed, parents in enumerate(trees):
        ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        for keep, target_keep, num_valid in _TREE_CASES:
            target, _ = random_tables(seed, vocab_size, 2, target_keep=target_keep)
            models = [
                random_tables(10 * seed + rank, vocab_size, 2, keep=keep)[1]
                for rank in range(max(ranks) + 1)
            ]
            several = siblings == "independent"
            draft = [models[rank if several else 0] for rank in ranks]
            options = {"parents": parents, "siblings": siblings, "num_valid": num_valid}
            emitted = joint_law(rule.law, target, draft, **options)
            worst = max(worst, _furthest(emitted, target))
            if keep is None and not rule.needs_log_probs:
                emitted = joint_law(rule.law, target, draft, one_hot=True, **options)
                worst = max(worst, _furthest(emitted, target))
    return worst


_TREE_CASES = (
    (None, None, None), (2, None, None), (1, None, None), (None, 1, None), (None, 2, 4),
)  # fmt: skip
"""Tokens that the draft's rows keep, that the target's do, and valid nodes."""


def worst_deviation(rule: Any, sizes: Sequence[tuple[int, int]] = SIZES) -> float:
    """Returns the largest deviation of a rule's joint law on small random tables.

    Chains: drafts with a law, cut drafts, drafts without one (deterministic), and
    drafts that are not all valid. Trees: of every kind of siblings that the rule
    judges. A lossless rule comes to 1e-15 or so.
    """
    worst = 0.0
    with jax.enable_x64(True):
        for seed, (vocab_size, num_draft) in enumerate(sizes):
            for keep in (None, 2):
                target, draft = random_tables(seed, vocab_size, num_draft, keep=keep)
                for valid in {num_draft, max(num_draft - 1, 1)}:
                    found = deviation(rule.law, target, draft, num_valid=valid)
                    worst = max(worst, found)
            if not rule.needs_log_probs and num_draft == 2:
                target, draft = random_tables(seed, vocab_size, num_draft, keep=1)
                worst = max(worst, deviation(rule.law, target, draft, one_hot=True))
        for siblings in rule.siblings:
            if siblings != "none":
                worst = max(worst, tree_deviation(rule, siblings))
    return worst

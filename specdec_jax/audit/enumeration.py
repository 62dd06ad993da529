"""The exact joint law that one round emits, by summing over everything it may draw.

For small vocabularies and draft lengths the sum over all V^K drafts, stopping places
and next tokens is finite: no randomness, no threshold, deviations of order 1e-16 in
float64. It sees what tests of the first token or of greedy text cannot (a wrong bonus
row, a token-wise residual under block acceptance).
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


def chain_law(law: Callable, target: Rows, draft: Rows, *, one_hot: bool = False):
    """Returns the joint law of K + 1 tokens when a round drafts a chain of K.

    Rounds that emit fewer tokens are completed by the target, so that a lossless rule
    gives `completed_law(target)` whatever the draft.

    Args:
      law: A rule's `law`, or anything of its signature.
      target: K + 1 arrays of policy rows.
      draft: K arrays of the rows that draft tokens are drawn from.
      one_hot: The draft is deterministic and tells the rule so (`log_probs` None).

    Returns:
      float64 probabilities of shape (V,) * (K + 1).
    """
    num_draft, vocab_size = len(draft), target[0].shape[-1]
    chains = np.array(
        list(itertools.product(range(vocab_size), repeat=num_draft)), np.int32
    ).reshape(-1, num_draft)

    def rows_along(rows: Rows) -> np.ndarray:
        return np.stack(
            [r[tuple(chains[:, :d].T)] + np.zeros((len(chains), 1)) for d, r in
             enumerate(rows)],
            axis=1,
        )  # fmt: skip

    target_rows, draft_rows = rows_along(target), rows_along(draft)
    proposed = np.take_along_axis(draft_rows, chains[..., None], axis=2)[..., 0]
    batch = Draft(
        tokens=jnp.asarray(chains),
        num_valid=jnp.full((len(chains),), num_draft, jnp.int32),
        log_probs=None if one_hot else jnp.asarray(draft_rows),
    )
    stop, following = _compiled(law)(batch, jnp.asarray(target_rows))
    mass = np.exp(proposed.sum(axis=1))[:, None] * np.asarray(stop, np.float64)
    # A chain that is never drafted has no law to speak of (0/0 there, 0 here).
    cases = np.where(mass[..., None] > 0, mass[..., None] * np.asarray(following), 0)

    total = np.zeros((vocab_size,) * (num_draft + 1))
    for num_accepted in range(num_draft + 1):
        emitted = cases[:, num_accepted].reshape((vocab_size,) * (num_draft + 1))
        emitted = emitted.sum(axis=tuple(range(num_accepted, num_draft)))
        for rows in target[num_accepted + 1 :]:
            emitted = emitted[..., None] * np.exp(rows)
        total += emitted
    return total


@functools.lru_cache(maxsize=16)
def _compiled(law: Callable) -> Callable:
    return jax.jit(jax.vmap(law))


def deviation(law: Callable, target: Rows, draft: Rows, **options) -> float:
    """Returns the largest absolute deviation from the target's joint law."""
    emitted = chain_law(law, target, draft, **options)
    return float(np.abs(emitted - completed_law(target)).max())


TOLERANCE = 1e-12
"""Deviation, in probability, that float64 sums over small tables explain."""

SIZES = ((3, 1), (4, 2), (3, 3))
"""Pairs of vocabulary size and draft length on which `worst_deviation` sums."""


def random_tables(
    seed: int, vocab_size: int, num_draft_tokens: int, *, keep: int | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns policy rows that depend on the context: the target's and the draft's.

    Args:
      seed: Of the tables.
      vocab_size: V.
      num_draft_tokens: K.
      keep: The draft's rows keep that many tokens, as top-k does; None keeps all.
    """
    rng = np.random.default_rng(seed)

    def rows(depth: int) -> np.ndarray:
        logits = 1.5 * rng.standard_normal((vocab_size,) * (depth + 1))
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    target = [rows(depth) for depth in range(num_draft_tokens + 1)]
    draft = [rows(depth) for depth in range(num_draft_tokens)]
    if keep is not None:
        draft = [_cut(row, keep) for row in draft]
    return target, draft


def _cut(rows: np.ndarray, keep: int) -> np.ndarray:
    bar = np.sort(rows, axis=-1)[..., -keep, None]
    kept = np.where(rows >= bar, rows, -np.inf)
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


def worst_deviation(rule: Any, sizes: Sequence[tuple[int, int]] = SIZES) -> float:
    """Returns the largest deviation of a rule's joint law on small random tables.

    Drafts with a law, cut drafts, and drafts without one (deterministic). A lossless
    rule comes to 1e-15 or so.
    """
    worst = 0.0
    with jax.enable_x64(True):
        for seed, (vocab_size, num_draft) in enumerate(sizes):
            for keep in (None, 2):
                target, draft = random_tables(seed, vocab_size, num_draft, keep=keep)
                worst = max(worst, deviation(rule.law, target, draft))
            if not rule.needs_log_probs and num_draft == 2:
                target, draft = random_tables(seed, vocab_size, num_draft, keep=1)
                worst = max(worst, deviation(rule.law, target, draft, one_hot=True))
    return worst

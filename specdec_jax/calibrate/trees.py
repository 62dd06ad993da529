"""Trees of each size, grown for what a draft model and a target do on a load.

A tree of N drafted tokens can be a bush or a chain. One tree is drafted as the user
gave it; how often its children of each rank are accepted, what a level and a wider pass
cost, then say which tree of each size should be the fastest (`tree_choice`). The sweep
measures these side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import trace
from specdec_jax.benchmark.sweep import sweep
from specdec_jax.benchmark.units import batches, check_finite
from specdec_jax.calibrate.prediction import Parts
from specdec_jax.drafters import TreeDrafter
from specdec_jax.text.packing import Plan
from specdec_jax.text.running import Engine
from specdec_jax.tree_choice import rank_acceptance, trees_by_size

DEEPER = 2
"""Trees are tried of up to so many times the depth of the one that was given."""


_traced = jax.jit(
    trace.run, static_argnames=("target", "drafter", "rule", "num_rounds")
)


class Ranks(NamedTuple):
    """How often children were accepted, by their rank among siblings."""

    acceptance: tuple[float, ...]
    """a_r, given that the parent was accepted and the ranks before were not."""
    offered: tuple[int, ...]
    """Times that this was seen."""


@dataclass(frozen=True, kw_only=True)
class Grown(TreeDrafter):
    """A tree drafter that can be had with several numbers of nodes.

    Attributes:
      trees: Parents by the number of nodes.
      ranks: What they were chosen by.
    """

    trees: tuple[tuple[int, tuple[int, ...]], ...]
    ranks: Ranks

    def with_num_draft_tokens(self, num_draft_tokens: int) -> "Grown":
        """Returns the drafter of the tree of that many nodes."""
        return replace(self, parents=dict(self.trees)[num_draft_tokens])


def grow(engine: Engine, plan: Plan, *, sizes: Sequence[int], batch_size: int) -> Grown:
    """Returns trees of the given numbers of nodes, and of one node.

    Where no more nodes would bring anything, a tree has fewer than were asked for.

    Args:
      engine: Its drafter is a `TreeDrafter`; the wider and deeper its tree, the more is
        learned of it.
      plan: The requests.
      sizes: Numbers of nodes.
      batch_size: Rows of a batch.

    Raises:
      ValueError: The drafter's tree has no shape that could be varied.
      FloatingPointError: The target's logits are not finite.
    """
    drafter = engine.drafter
    if not isinstance(drafter, TreeDrafter):
        raise ValueError(
            f"{type(drafter).__name__} drafts trees of its own; calibrate varies the "
            "trees of one draft model, as --branching gives them"
        )
    ranks = _ranks(engine, plan, batch_size)
    num_nodes = drafter.num_nodes
    given = Grown(
        **{one.name: getattr(drafter, one.name) for one in fields(drafter)},
        trees=((num_nodes, drafter.parents),),
        ranks=ranks,
    )
    costs = Parts.of(
        sweep(
            engine._replace(drafter=given),
            plan,
            lengths=(0, num_nodes),
            batch_size=batch_size,
            repeats=1,
        )
    )
    # Two widths are known; between and beyond them a pass is taken to grow evenly.
    slope = max(float(costs.verify_factor(num_nodes)[0]) - 1, 0) / num_nodes
    sized = trees_by_size(
        np.array(ranks.acceptance),
        float(costs.cost_ratio[0]),
        1 + slope * np.arange(max(sizes) + 1),
        DEEPER * drafter.depth,
    )
    grown = {1: (-1,)} | {len(one.parents): one.parents for one in sized}
    wanted = {1, *(max(n for n in grown if n <= size) for size in sizes)}
    return replace(given, trees=tuple((n, grown[n]) for n in sorted(wanted)))


def _ranks(engine: Engine, plan: Plan, batch_size: int) -> Ranks:
    """Decodes with the tree as it was given and counts."""
    most = max(request.max_new_tokens for request in plan.requests)
    seen = []
    for requests, batch in batches(plan, batch_size):
        state, rounds = _traced(
            engine.params,
            engine.start(batch),
            target=engine.target,
            drafter=engine.drafter,
            rule=engine.rule,
            num_rounds=most,
        )
        check_finite(state, [request.index for request in requests])
        happened = np.where(rounds.num_emitted > 0, rounds.num_valid, 0)
        seen.append((rounds.parents, rounds.accepted, happened))
    acceptance, offered = rank_acceptance(
        *(np.concatenate([_flat(one[i]) for one in seen]) for i in range(3))
    )
    return Ranks(tuple(acceptance.tolist()), tuple(offered.tolist()))


def _flat(rounds: Any) -> np.ndarray:
    """Returns the rounds of all rows, one after another."""
    return np.asarray(rounds).reshape(-1, *rounds.shape[2:])

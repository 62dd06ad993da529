"""Recursive rejection in the real loop: sampled trees, ragged rows, several models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode import VOCAB, check_counts, emitted_by_many, law, texts  # noqa: F401
from test_trees import DRAFT_TABLE, ODD, OTHER_TABLE, run, tree

from specdec_jax.acceptance import MultiDraft
from specdec_jax.audit import faults, loop_law
from specdec_jax.audit.planted import trees
from specdec_jax.audit.statistics import goodness_of_fit, joint_counts
from specdec_jax.base import Draft
from specdec_jax.drafters import JoinedTrees, NoDrafter, TreeDrafter

TREES = {
    "distinct": (tree(), DRAFT_TABLE),
    "independent": (tree(ODD, "independent"), DRAFT_TABLE),
    "joined": (
        JoinedTrees((tree((-1, 0, 1), "independent"), tree(ODD, "independent"))),
        (DRAFT_TABLE, OTHER_TABLE),
    ),
}


@pytest.fixture(scope="module")
def plain():
    return texts(run(NoDrafter(), None))


@pytest.mark.parametrize("name", TREES)
def test_greedy_rows_beside_sampled_ones_are_plain_text(name, plain):
    drafter, table = TREES[name]
    state = run(drafter, table, MultiDraft(drafter.siblings))
    found = texts(state)
    greedy = [2, 4]  # of MIXED
    assert [found[row] for row in greedy] == [plain[row] for row in greedy]
    check_counts(state)
    assert (np.asarray(state.counts.histogram).sum(0) > 0).sum() >= 3


SMALL = (tree(ODD), OTHER_TABLE)
"""Fits the buffer of `emitted_by_many`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distinct", "joined"])
def test_joint_law_over_a_round_boundary(name, law):  # noqa: F811
    drafter, table = SMALL if name == "distinct" else TREES[name]
    _, tokens = emitted_by_many(drafter, table, MultiDraft(drafter.siblings))
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) > 1e-6


@pytest.mark.slow
def test_the_joint_law_shows_a_wrong_rule(law):  # noqa: F811
    _, tokens = emitted_by_many(*SMALL, trees.NotRenormalised("distinct"))
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) < 1e-6


class TellsAnotherLaw(TreeDrafter):
    """Draws from the model, and tells the rule a flatter law."""

    def draft(self, state, context):
        draft, state, cache = super().draft(state, context)
        flat = jax.nn.log_softmax(0.9 * draft.log_probs)
        return draft._replace(log_probs=flat), state, cache


def test_the_audit_of_the_loop_looks_at_trees():
    right = faults.right_subject(on_trees=True)
    wrong = TellsAnotherLaw(right.target, right.drafter.parents, "distinct")
    found = loop_law(
        right._replace(drafter=wrong), faults.PROMPTS[:2], faults.SAMPLED,
        num_samples=8192,
    )  # fmt: skip
    assert not found.lossless and found.draft_deviation > 1e-2


def test_independent_siblings_of_one_law_may_be_equal_and_both_are_judged():
    """At the root of a certain draft all siblings are one token: the second is lost."""
    row = jnp.log(jnp.array([0.0, 1.0, 0.0, 0.0]))
    draft = Draft(
        jnp.array([1, 1], jnp.int32), jnp.int32(2), jnp.tile(row, (2, 1)),
        jnp.full((2,), -1, jnp.int32),
    )  # fmt: skip
    target = jnp.log(jnp.full((3, 4), 0.25))
    stop, rows = MultiDraft("independent").law(draft, target)
    np.testing.assert_allclose(stop, [0.75, 0.25, 0], atol=1e-6)
    np.testing.assert_allclose(rows[0], [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-6)

"""Recursive rejection on trees: laws, coins, draws, and what siblings are worth."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode
import toy
from coins import Injected, law_by_coins

from specdec_jax.acceptance import EVERY_RULE, Coupled, MultiDraft, Rejection
from specdec_jax.audit import faults
from specdec_jax.audit.enumeration import (
    TREES,
    completed_law,
    deviation,
    joint_law,
    random_tables,
    tree_deviation,
)
from specdec_jax.audit.planted.trees import NotRenormalised
from specdec_jax.audit.statistics import goodness_of_fit, joint_counts
from specdec_jax.base import Draft
from specdec_jax.drafters import TreeDrafter
from specdec_jax.rng import RoundNoise

KINDS = ("independent", "distinct")
TREE_RULES = {
    f"{name}, {siblings}": (rule, siblings)
    for name, rule in EVERY_RULE.items()
    for siblings in rule.siblings
    if siblings != "none"
}


@pytest.mark.parametrize("name", TREE_RULES)
def test_the_joint_law_on_trees_is_the_targets(name):
    rule, siblings = TREE_RULES[name]
    with jax.enable_x64(True):
        assert tree_deviation(rule, siblings) < 1e-12
        ragged = (-1, -1, -1, 1, 1)
        assert tree_deviation(rule, siblings, vocab_size=4, trees=[ragged]) < 1e-12


def test_a_rule_of_the_other_kind_is_seen():
    """Nor can ranked siblings be judged by a law: this is why they are refused."""
    with jax.enable_x64(True):
        assert tree_deviation(MultiDraft("independent"), "distinct") > 0.05
        for kind in KINDS:
            assert tree_deviation(MultiDraft(kind), "ranked") > 0.05
    with pytest.raises(ValueError, match="use the coupled rule"):
        MultiDraft("ranked")


def chances(kind):
    """Returns min(1, p_j/q_j) of each node, given that its older siblings failed."""

    def find(draft, target):
        found = []
        for node, parent in enumerate(draft.parents):
            p = jnp.exp(target[parent + 1])
            q = jnp.exp(draft.log_probs[node])
            for older in range(node):
                sibling = draft.parents[older] == parent
                x, own = draft.tokens[older], jnp.exp(draft.log_probs[older])
                if kind == "distinct":
                    q = jnp.where(sibling, q.at[x].set(0), q)
                    for before in range(older):
                        same = draft.parents[before] == parent
                        own = jnp.where(same, own.at[draft.tokens[before]].set(0), own)
                    own = own / jnp.where(own.sum() > 0, own.sum(), 1)
                left = jnp.maximum(p - own, 0)
                usable = sibling & (own[x] > 0) & (left.sum() > 0)
                p = jnp.where(usable, left / jnp.where(usable, left.sum(), 1), p)
            q = q / jnp.where(q.sum() > 0, q.sum(), 1)
            x = draft.tokens[node]
            ratio = jnp.where(q[x] > 0, p[x] / jnp.where(q[x] > 0, q[x], 1), 0)
            valid = node < draft.num_valid
            found.append(jnp.where(valid, jnp.minimum(ratio, 1), 0))
        return jnp.stack(found)

    return find


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_what_its_law_says_coin_by_coin(kind, monkeypatch):
    parents = (-1, -1, 0, 0)
    with jax.enable_x64(True):
        law = law_by_coins(MultiDraft(kind), chances(kind), monkeypatch)
        for keep, num_valid in [(None, 4), (2, 4), (1, 4), (None, 3)]:
            target, draft = random_tables(3, 3, 2, keep=keep)
            other = random_tables(4, 3, 2, keep=keep)[1]
            if kind == "distinct":
                other = draft
            emitted = joint_law(
                law, target, [draft, other, draft, other],
                parents=parents, siblings=kind, num_valid=num_valid,
            )  # fmt: skip
            assert np.abs(emitted - completed_law(target)).max() < 1e-12


def random_tree(kind, seed=0, vocab_size=6):
    """Returns a float32 tree draft with three roots and two grandchildren each."""
    parents = jnp.array((-1, -1, -1, 0, 0, 1, 1, 2, 2), jnp.int32)
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(1.5 * rng.standard_normal((19, vocab_size)), jnp.float32)
    rows = jax.nn.log_softmax(rows)
    target, laws = rows[:10], rows[10:]
    if kind == "distinct":  # siblings share their row
        laws = laws[parents + 1]
    tokens = []
    for node, parent in enumerate(parents.tolist()):
        row = np.exp(np.asarray(laws[node], np.float64))
        for older in range(node):
            if kind == "distinct" and parents[older] == parent:
                row[tokens[older]] = 0
        tokens.append(int(rng.choice(vocab_size, p=row / row.sum())))
    return Draft(jnp.array(tokens, jnp.int32), jnp.int32(9), laws, parents), target


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_verdicts_have_the_law(kind):
    draft, target = random_tree(kind)
    rule, size = MultiDraft(kind), 40_000

    def verdict(key):
        found = rule(RoundNoise(key), draft, target)
        end = jnp.append(-1, found.path)[found.num_accepted]
        ancestor = draft.parents[jnp.maximum(end, 0)]
        above = jnp.where(found.num_accepted > 1, found.path[0], ancestor)
        return end + 1, found.next_token, (end < 0) | (above == ancestor)

    end, token, is_path = jax.jit(jax.vmap(verdict))(
        jax.random.split(jax.random.key(7), size)
    )
    assert is_path.all()
    stop, rows = rule.law(draft, target)
    counts = np.zeros(rows.shape)
    np.add.at(counts, (np.asarray(end), np.asarray(token)), 1)
    law = np.asarray(stop, np.float64)[:, None] * np.asarray(rows, np.float64)
    assert goodness_of_fit(counts, law / law.sum()) > 1e-6
    assert goodness_of_fit(counts, np.roll(law, 1, axis=0) / law.sum()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_each_coin_decides_at_its_chance(kind):
    draft, target = random_tree(kind, seed=3)
    stop_at = np.asarray(chances(kind)(draft, target))
    judge = jax.jit(
        lambda coins: MultiDraft(kind)(
            Injected(coins, jnp.zeros((4, 6))), draft, target
        )
    )
    tried = 0
    for root in range(3):
        if not 0.01 < stop_at[root] < 0.99:
            continue
        for factor, kept in [(1 - 1e-4, True), (1 + 1e-4, False)]:
            coins = np.full(9, 1 - 2**-24, np.float32)
            coins[root] = stop_at[root] * factor
            verdict = judge(jnp.asarray(coins))
            took = verdict.num_accepted > 0 and verdict.path[0] == root
            assert bool(took) == kept
            tried += 1
            if any(stop_at[:root] == 1):
                break
    assert tried >= 2


def test_a_chain_is_rejection_draw_for_draw():
    rows = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (7, 9)))
    tokens = jnp.array([2, 5, 5], jnp.int32)
    rules = (Rejection(), MultiDraft("independent"), MultiDraft("distinct"))

    def verdicts(key, valid):
        return [
            [rule(RoundNoise(key), Draft(tokens, valid, laws), rows[:4])
             for rule in rules]
            for laws in (rows[4:], None)
        ]  # fmt: skip

    keys = jax.random.split(jax.random.key(1), 400)
    valid = jnp.tile(jnp.arange(4, dtype=jnp.int32), 100)
    for right, *others in jax.jit(jax.vmap(verdicts))(keys, valid):
        for same in others:
            np.testing.assert_array_equal(right.num_accepted, same.num_accepted)
            np.testing.assert_array_equal(right.next_token, same.next_token)


def test_garbage_siblings_of_a_greedy_draft_are_passed_over():
    """At temperature 0 only the first child was drawn; the others mean nothing."""
    certain = jnp.where(jnp.arange(4)[None] == 2, 0.0, -jnp.inf)
    laws = jnp.tile(certain, (3, 1))
    target = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]] + 3 * [[0.25] * 4]))
    parents = jnp.full((3,), -1, jnp.int32)
    draft = Draft(jnp.array([2, 3, 0], jnp.int32), jnp.int32(3), laws, parents)
    for kind in KINDS:
        stop, rows = MultiDraft(kind).law(draft, target)
        np.testing.assert_allclose(stop, [0.7, 0.3, 0, 0], atol=1e-6)
        np.testing.assert_allclose(rows[0], np.array([1, 2, 0, 4]) / 7, atol=1e-6)
        for coins in (jnp.zeros(3), jnp.array([0.9, 0.0, 0.0])):
            noise = Injected(coins, jnp.zeros((3, 4)))
            verdict = MultiDraft(kind)(noise, draft, target)
            kept = int(coins[0] < 0.3)
            assert verdict.num_accepted == kept
            if not kept:
                assert verdict.next_token == 3
    # Told as certain one by one, as a tree of the likeliest is, they are members.
    each = jnp.where(jnp.arange(4)[None] == draft.tokens[:, None], 0.0, -jnp.inf)
    for told in (each, None):
        stop, _ = MultiDraft().law(draft._replace(log_probs=told), target)
        np.testing.assert_allclose(stop, [0.2, 0.3, 0.4, 0.1], atol=1e-6)


def test_a_greedy_target_follows_its_own_path():
    greedy = [2, 0, 1, 0, 2, 2]  # argmax after the root, then after nodes 0..4
    target = jnp.where(jnp.arange(3)[None] == jnp.array(greedy)[:, None], 0.0, -jnp.inf)
    draft = Draft(
        jnp.array([1, 2, 2, 0, 1], jnp.int32), jnp.int32(5),
        jnp.log(jnp.full((5, 3), 1 / 3)), jnp.array([-1, -1, -1, 1, 1], jnp.int32),
    )  # fmt: skip
    for coin in (0.0, 0.5, 1 - 2**-24):
        noise = Injected(jnp.full(5, coin), jnp.zeros((3, 3)))
        for laws in (draft.log_probs, None):
            verdict = MultiDraft("independent")(
                noise, draft._replace(log_probs=laws), target
            )
            assert verdict.path[: int(verdict.num_accepted)].tolist() == [1, 4]
            assert verdict.next_token == 2


def lost(rule, p, q, kind, num_valid, num_siblings):
    """Returns how likely all children of a root are rejected, drawn from q."""
    tuples = itertools.product(range(len(p)), repeat=num_siblings)
    tuples = np.array(list(tuples), np.int32)
    parents = jnp.full((num_siblings,), -1, jnp.int32)
    rows = jnp.tile(jnp.log(q), (num_siblings, 1))
    target = jnp.tile(jnp.log(p), (num_siblings + 1, 1))

    def one(tokens):
        left, mass = q, jnp.ones(())
        for x in tokens:
            total = left.sum()
            mass *= jnp.where(total > 0, left[x] / jnp.where(total > 0, total, 1), 0)
            if kind == "distinct":
                left = left.at[x].set(0)
        draft = Draft(tokens, num_valid, rows, parents)
        return mass * rule.law(draft, target)[0][0]

    return jax.vmap(one)(tuples).sum()


def many_laws(size, count=60, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(size), (2, count))


def test_recursive_rejection_keeps_more_than_membership_of_the_same_children():
    """SpecInfer, theorem 4.3: in expectation over the children, for every p and q."""
    with jax.enable_x64(True):
        p, q = many_laws(4)

        def gain(p, q):
            args = (p, q, "independent", jnp.int32(2), 2)
            return lost(Coupled(), *args) - lost(MultiDraft("independent"), *args)

        gains = np.asarray(jax.jit(jax.vmap(gain))(p, q))
    assert gains.min() > -1e-12 and (gains > 0.01).mean() > 0.9


def test_more_siblings_keep_more_and_all_distinct_ones_are_never_rejected():
    with jax.enable_x64(True):
        p, q = many_laws(3)
        valid = jnp.arange(1, 4, dtype=jnp.int32)

        def chances(p, q, kind):
            return jax.vmap(lambda n: lost(MultiDraft(kind), p, q, kind, n, 3))(valid)

        kept = {
            kind: 1 - jax.jit(jax.vmap(lambda p, q, k=kind: chances(p, q, k)))(p, q)
            for kind in KINDS
        }
    kept = {kind: np.asarray(one) for kind, one in kept.items()}
    for one in kept.values():
        np.testing.assert_allclose(one[:, 0], np.minimum(p, q).sum(-1), atol=1e-12)
        assert (np.diff(one, axis=1) > 0).all()
    # In each of these laws, not in all: neither kind dominates.
    assert (kept["distinct"] - kept["independent"])[:, 1:].mean() > 0.02
    np.testing.assert_allclose(kept["distinct"][:, 2], 1, atol=1e-12)


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


TREE_FAULTS = [
    n for n, f in faults.FAULTS.items() if f.source == "B.6.2" and f.part == "rule"
]


@pytest.mark.parametrize("name", TREE_FAULTS)
def test_a_planted_fault_is_wrong_on_trees_and_right_on_chains(name):
    """So nothing that decodes chains can see it."""
    rule = faults.FAULTS[name].wrong
    with jax.enable_x64(True):
        assert deviation(rule.law, *random_tables(0, 3, 2)) < 1e-12
        assert tree_deviation(rule, rule.kind, trees=TREES[:1]) > 1e-3


@pytest.mark.parametrize("name", TREE_FAULTS)
def test_a_planted_fault_draws_what_it_says(name):
    rule = faults.FAULTS[name].wrong
    draft, target = random_tree(rule.kind, seed=1)

    def end(key):
        found = rule(RoundNoise(key), draft, target)
        return jnp.append(-1, found.path)[found.num_accepted] + 1

    ends = jax.jit(jax.vmap(end))(jax.random.split(jax.random.key(3), 20_000))
    stop = np.asarray(rule.law(draft, target)[0], np.float64)
    counts = np.bincount(np.asarray(ends), minlength=len(stop))
    assert goodness_of_fit(counts, stop / stop.sum()) > 1e-6


@pytest.mark.slow
def test_the_real_loop_shows_a_wrong_rule():
    """So the law of the loop's text is that of the rule, not of the tests above."""
    law = toy.joint_law(test_decode.TARGET, test_decode.TABLE, (2, 0, 1), 4)
    drafter = TreeDrafter(test_decode.TARGET, (-1, -1, 0, 0, 2))
    for rule, right in [(MultiDraft(), True), (NotRenormalised(), False)]:
        _, tokens = test_decode.emitted_by_many(drafter, test_decode.OTHER_TABLE, rule)
        fit = goodness_of_fit(joint_counts(tokens, test_decode.VOCAB), law)
        assert (fit > 1e-6) == right

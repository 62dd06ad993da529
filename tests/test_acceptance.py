"""Every rule against exact enumeration, injected coins and hand-made blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coins import Injected, law_by_coins, law_by_draws, ratios

from specdec_jax.acceptance import EVERY_RULE, LOSSY, RULES, Coupled, Rejection
from specdec_jax.audit import faults
from specdec_jax.audit.enumeration import chain_law, deviation
from specdec_jax.audit.planted import rules
from specdec_jax.base import Draft
from specdec_jax.rng import NoNoise

SIZES = [(3, 1), (5, 1), (4, 2), (3, 3), (5, 3)]
POLICIES = {
    "same": ({"temperature": 1.0}, {"temperature": 1.0}),
    "draft cooler": ({"temperature": 1.0}, {"temperature": 0.5}),
    "target top-2": ({"temperature": 1.0, "top_k": 2}, {"temperature": 1.0}),
    "draft top-2": ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}),
    "nucleus": ({"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.2}),
    "greedy target": ({"temperature": 0.0}, {"temperature": 1.0}),
    "greedy draft": ({"temperature": 1.0}, {"temperature": 0.0}),
}


def policy_rows(seed, vocab_size, depth, settings):
    """Context-dependent policy rows by depth, (V,) * (d + 1), in float64."""
    rng = np.random.default_rng(seed)
    shapes = [(vocab_size,) * (d + 1) for d in range(depth)]
    return [policy(1.5 * rng.standard_normal(shape), **settings) for shape in shapes]


def policy(logits, temperature=1.0, top_k=None, top_p=1.0):
    """Policy rows by sorting; no ties here."""
    ranks = np.argsort(np.argsort(-logits, axis=-1), axis=-1)
    if temperature == 0:
        return np.where(ranks == 0, 0.0, -np.inf)
    probs = np.exp(logits / temperature)
    probs = np.where(ranks < (top_k or logits.shape[-1]), probs, 0)
    probs /= probs.sum(-1, keepdims=True)
    higher = (probs[..., None, :] > probs[..., None]) * probs[..., None, :]
    probs = np.where(higher.sum(-1) < top_p, probs, 0)
    with np.errstate(divide="ignore"):
        return np.log(probs / probs.sum(-1, keepdims=True))


def tables(seed, vocab_size, num_draft, policies="same"):
    target, draft = POLICIES[policies]
    return (
        policy_rows(seed, vocab_size, num_draft + 1, target),
        policy_rows(seed + 1000, vocab_size, num_draft, draft),
    )


@pytest.mark.parametrize("name", RULES)
def test_the_joint_law_is_the_targets(name):
    with jax.enable_x64(True):
        for (vocab_size, num_draft), policies in itertools.product(SIZES, POLICIES):
            target, draft = tables(vocab_size, vocab_size, num_draft, policies)
            assert deviation(RULES[name].law, target, draft) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_deterministic_draft_without_law_keeps_the_joint_law(name):
    with jax.enable_x64(True):
        for vocab_size, num_draft in SIZES:
            target, draft = tables(7, vocab_size, num_draft, "greedy draft")
            assert deviation(RULES[name].law, target, draft, one_hot=True) < 1e-12
            same = chain_law(RULES[name].law, target, draft)
            one_hot = chain_law(RULES[name].law, target, draft, one_hot=True)
            np.testing.assert_allclose(same, one_hot, atol=1e-12)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("policies", ["same", "target top-2", "draft top-2"])
def test_rejection_draws_what_its_law_says(policies, one_hot, monkeypatch):
    with jax.enable_x64(True):
        law = law_by_coins(Rejection(), ratios, monkeypatch)
        policies = "greedy draft" if one_hot else policies
        for vocab_size, num_draft in [(3, 3), (4, 2), (5, 3)]:
            target, draft = tables(3, vocab_size, num_draft, policies)
            assert deviation(law, target, draft, one_hot=one_hot) < 1e-12


def test_coupled_draws_what_its_law_says():
    with jax.enable_x64(True):
        for vocab_size, num_draft in [(3, 2), (4, 2)]:
            target, draft = tables(3, vocab_size, num_draft)
            assert deviation(law_by_draws(Coupled()), target, draft) < 1e-12


PLANTED = [
    name
    for name, fault in faults.FAULTS.items()
    if isinstance(fault.wrong, rules.Chain)
    and fault.wrong.noise == "round"
    # These are about the coin's last bits, and these are tested by themselves.
    and fault.wrong.coins is not rules.coins_in_bfloat16
    and fault.wrong.flags is not rules.at_most
]


@pytest.mark.parametrize("name", PLANTED)
def test_enumeration_catches_a_planted_fault_coin_by_coin(name, monkeypatch):
    with jax.enable_x64(True):
        law = law_by_coins(faults.FAULTS[name].wrong, ratios, monkeypatch)
        worst = max(deviation(law, *tables(seed, 4, 2)) for seed in range(2))
        assert worst > 1e-9


def test_a_coin_decides_at_the_ratio_and_nowhere_else():
    target = jnp.log(jnp.array([[0.2, 0.8], [0.5, 0.5]]))
    draft_law = jnp.log(jnp.array([[0.8, 0.2]]))
    draft = Draft(jnp.array([0]), jnp.int32(1), draft_law)
    for coin, kept in [(0.2499, 1), (0.2501, 0)]:
        noise = Injected(jnp.array([coin]), jnp.zeros((2, 2)))
        assert Rejection()(noise, draft, target).num_accepted == kept


def test_extreme_coins():
    certain = jnp.log(jnp.array([[1.0, 0.0], [0.5, 0.5]]))
    noise = Injected(jnp.array([1 - 2**-24]), jnp.zeros((2, 2)))
    sure = Draft(jnp.array([0]), jnp.int32(1), certain[:1])
    assert Rejection()(noise, sure, certain).num_accepted == 1
    impossible = Draft(jnp.array([1]), jnp.int32(1), jnp.log(jnp.array([[0.5, 0.5]])))
    for coin in (0.0, 1e-38):
        noise = Injected(jnp.array([coin]), jnp.zeros((2, 2)))
        assert Rejection()(noise, impossible, certain).num_accepted == 0


def test_row_alignment_decides_a_hand_made_block():
    def one_hot(*tokens):
        return jnp.where(
            jnp.arange(10)[None] == jnp.array(tokens)[:, None], 0.0, -jnp.inf
        )

    draft = Draft(jnp.array([5, 6, 9]), jnp.int32(3))
    for rule in RULES.values():
        verdict = rule(NoNoise(), draft, one_hot(5, 6, 7, 8))
        assert (int(verdict.num_accepted), int(verdict.next_token)) == (2, 7)
        verdict = rule(NoNoise(), draft, one_hot(5, 6, 9, 8))
        assert (int(verdict.num_accepted), int(verdict.next_token)) == (3, 8)


def test_matches_after_a_mismatch_do_not_count():
    target = jnp.where(
        jnp.arange(5)[None] == jnp.array([1, 0, 3, 4, 0])[:, None], 0.0, -jnp.inf
    )
    draft = Draft(jnp.array([1, 2, 3, 4]), jnp.int32(4))
    for rule in RULES.values():
        assert rule(NoNoise(), draft, target).num_accepted == 1


@pytest.mark.parametrize("filler", [-1, 0, 10, 3])
def test_slots_past_the_valid_ones_are_never_judged(filler):
    target = jnp.where(jnp.arange(10)[None] == 3, 0.0, -jnp.inf) + jnp.zeros((5, 1))
    for rule in RULES.values():
        for valid in (0, 1, 3, 4):
            tokens = jnp.where(jnp.arange(4) < valid, 3, filler)
            verdict = rule(NoNoise(), Draft(tokens, jnp.int32(valid)), target)
            assert (int(verdict.num_accepted), int(verdict.next_token)) == (valid, 3)


def test_a_draft_whose_law_is_not_a_number_is_rejected():
    target = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    noise = Injected(jnp.array([0.0]), jnp.zeros((2, 2)))
    for law in (jnp.nan, -jnp.inf):
        draft = Draft(jnp.array([1]), jnp.int32(1), jnp.full((1, 2), law))
        verdict = Rejection()(noise, draft, target)
        assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)


@pytest.mark.parametrize("name", {**EVERY_RULE, **LOSSY})
def test_nothing_drafted_is_the_targets_row_bit_for_bit(name):
    rule = {**EVERY_RULE, **LOSSY}[name]
    row = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (1, 50)))
    none = jnp.zeros((0,), jnp.int32)
    gumbels = jax.random.gumbel(jax.random.key(1), (1, 50))
    noise = Injected(jnp.zeros((1,)), gumbels)
    laws = jnp.zeros((0, 50))
    for draft in (Draft(none, jnp.int32(0), laws), Draft(none, jnp.int32(0))):
        verdict = rule(noise, draft, row)
        assert int(verdict.next_token) == int(jnp.argmax(row[0] + gumbels[0]))
        assert verdict.path.shape == (0,)
        stop, rows = rule.law(draft, row)
        np.testing.assert_allclose(stop, [1.0], rtol=1e-6)
        np.testing.assert_allclose(rows, jnp.exp(row), rtol=1e-5)


def test_coupled_walks_a_tree_and_takes_the_first_of_duplicates():
    #        root -> 0:'1'  1:'2'  2:'2'(duplicate);  1 -> 3:'0' 4:'1'
    draft = Draft(
        tokens=jnp.array([1, 2, 2, 0, 1]),
        num_valid=jnp.int32(5),
        parents=jnp.array([-1, -1, -1, 1, 1]),
    )
    greedy = [2, 0, 1, 0, 2, 2]  # argmax after the root, then after nodes 0..4
    target = jnp.where(jnp.arange(3)[None] == jnp.array(greedy)[:, None], 0.0, -jnp.inf)
    verdict = Coupled()(NoNoise(), draft, target)
    assert int(verdict.num_accepted) == 2
    assert verdict.path[:2].tolist() == [1, 4]
    assert int(verdict.next_token) == 2


def test_rejection_refuses_trees():
    draft = Draft(jnp.array([0]), jnp.int32(1), None, jnp.array([-1]))
    with pytest.raises(ValueError, match="coupled"):
        Rejection()(NoNoise(), draft, jnp.zeros((2, 2)))

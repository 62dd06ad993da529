"""Rules that change the law: what they do, and that nobody gets one unasked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coins import law_by_coins, ratios

from specdec_jax.acceptance import (
    EVERY_RULE,
    LOSSY,
    RULES,
    Lenience,
    MultiDraft,
    Typical,
)
from specdec_jax.audit import audit, faults
from specdec_jax.audit.enumeration import (
    chain_law,
    completed_law,
    deviation,
    random_tables,
)
from specdec_jax.base import Draft, Params
from specdec_jax.drafters import ModelDrafter, NgramDrafter
from specdec_jax.rng import NoNoise
from specdec_jax.sampling import Sampling
from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.pairing import find_rule


def test_none_of_them_is_among_the_rules():
    assert not set(LOSSY) & set(RULES)
    assert not any(rule.lossless for rule in LOSSY.values())
    assert all(rule.lossless for rule in EVERY_RULE.values())


# Lenience.


def test_lenience_keeps_no_token_beyond_its_bound_and_part_of_the_law_is_lost():
    with jax.enable_x64(True):
        for factor in (0.9, 0.5, 0.1):
            target, draft = random_tables(0, 4, 1)
            emitted = chain_law(Lenience(factor).law, target, draft).sum(1)
            p, q = np.exp(target[0]), np.exp(draft[0])
            assert (emitted <= p / factor + 1e-12).all()
            kept = np.minimum(q, p / factor)
            rest = np.maximum(p - q, 0)
            expected = kept + (1 - kept.sum()) * rest / rest.sum()
            np.testing.assert_allclose(emitted, expected, atol=1e-12)
            assert np.abs(emitted - p).max() > 1e-3


def test_lenience_draws_what_its_law_says(monkeypatch):
    def chances(draft, target):
        slots = jnp.arange(len(target) - 1, dtype=jnp.int32)
        ratio = target[slots, draft.tokens] - draft.log_probs[slots, draft.tokens]
        return jnp.minimum(jnp.exp(ratio) / 0.7, 1)

    with jax.enable_x64(True):
        law = law_by_coins(Lenience(0.7), chances, monkeypatch)
        target, draft = random_tables(2, 3, 2)
        np.testing.assert_allclose(
            chain_law(law, target, draft),
            chain_law(Lenience(0.7).law, target, draft),
            atol=1e-12,
        )
        strict = law_by_coins(Lenience(1 - 1e-15), ratios, monkeypatch)
        assert deviation(strict, target, draft) < 1e-12


# Typical acceptance.


def test_the_bar_of_typical_acceptance_is_where_medusa_puts_it():
    half = jnp.log(jnp.array([0.5, 0.5, 0.0]))  # exp(-H) = 1/2
    skewed = jnp.log(jnp.array([0.9, 0.099, 0.001]))

    def kept(rule, token, row):
        draft = Draft(jnp.array([token], jnp.int32), jnp.int32(1))
        return int(rule(NoNoise(), draft, jnp.stack([row, row])).num_accepted)

    assert kept(Typical(epsilon=0.9, delta=0.99), 0, half) == 1  # 0.5 > 0.495
    assert kept(Typical(epsilon=0.9, delta=1.01), 0, half) == 0
    assert kept(Typical(epsilon=0.098, delta=9.0), 1, skewed) == 1
    assert kept(Typical(epsilon=0.1, delta=9.0), 1, skewed) == 0
    assert kept(Typical(), 2, half) == 0


def test_typical_acceptance_takes_the_longest_path_and_of_equals_the_first():
    #       root -> 0, 1, 2;  0 -> 3, 4;  2 -> 5;  5 -> 6
    parents = jnp.array([-1, -1, -1, 0, 0, 2, 5], jnp.int32)
    tokens = jnp.array([0, 1, 2, 0, 1, 0, 1], jnp.int32)
    even = jnp.log(jnp.full((8, 3), 1 / 3))
    judge = jax.jit(lambda valid, rows: Typical()(
        NoNoise(), Draft(tokens, valid, None, parents), rows
    ))  # fmt: skip
    for valid, path in [(7, [2, 5, 6]), (6, [0, 3]), (3, [0]), (0, [])]:
        verdict = judge(jnp.int32(valid), even)
        assert verdict.path[: int(verdict.num_accepted)].tolist() == path
        stop, rows = Typical().law(Draft(tokens, jnp.int32(valid), None, parents), even)
        assert stop.tolist() == [float(s == (path or [-1])[-1]) for s in range(-1, 7)]
        np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-6)
    # Node 2 is impossible: so is all that hangs from it.
    blocked = even.at[0].set(jnp.log(jnp.array([0.5, 0.5, 0.0])))
    assert judge(jnp.int32(7), blocked).path[:2].tolist() == [0, 3]


def test_greedy_text_is_greedy_under_both():
    with jax.enable_x64(True):
        for rule in LOSSY.values():
            for keep in (None, 2):
                target, draft = random_tables(1, 3, 2, keep=keep, target_keep=1)
                assert deviation(rule.law, target, draft) < 1e-12
            target, draft = random_tables(1, 3, 2)
            emitted = chain_law(rule.law, target, draft)
            np.testing.assert_allclose(emitted.sum(), 1)
            assert np.abs(emitted - completed_law(target)).max() > 0.01


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lenience(0.0),
        lambda: Lenience(1.0),
        lambda: Lenience(float("nan")),
        lambda: Typical(epsilon=0.0),
        lambda: Typical(delta=-1.0),
        lambda: Typical(epsilon=1.0),
    ],
)
def test_settings_that_make_no_rule_are_refused(make):
    with pytest.raises(ValueError, match="between 0 and 1"):
        make()


# Nobody gets one unasked, and everybody is told.


@pytest.mark.parametrize("rule", [*LOSSY, Lenience(0.9)], ids=str)
def test_they_need_a_permission(rule):
    with pytest.raises(ValueError, match="distribution.*allow_lossy=True"):
        find_rule(rule)
    found = find_rule(rule, allow_lossy=True)
    assert found == LOSSY.get(rule, rule) and not found.lossless
    parts = faults.right_subject()
    with pytest.raises(ValueError, match="lossy"):
        SpeculativeDecoder(parts.target, parts.params, rule=rule)


def test_names_become_rules_that_fit_the_drafter():
    class Forest(NgramDrafter):
        siblings = "independent"

    assert find_rule("multi_draft", Forest(2)) == MultiDraft("independent")
    assert find_rule("multi_draft", NgramDrafter(2)) == MultiDraft("distinct")
    own = MultiDraft("independent")
    assert find_rule(own, Forest(2)) is own
    with pytest.raises(ValueError, match="whose siblings are independent"):
        find_rule(MultiDraft("distinct"), Forest(2))
    with pytest.raises(ValueError, match="did you mean 'typical'"):
        find_rule("typicl")


@pytest.fixture(scope="module")
def decoded():
    parts = faults.right_subject()
    draft = ModelDrafter(parts.target, 2)
    prompts = [[1, 2, 3, 1, 2], [2, 2, 0]]
    return {
        name: SpeculativeDecoder(
            parts.target, Params(*parts.params), drafter=draft, rule=name,
            allow_lossy=True,
        ).generate(prompts, max_new_tokens=6)
        for name in ("block", "multi_draft", "lenience", "typical")
    }  # fmt: skip


def test_results_say_whether_they_are_lossless(decoded):
    for name, results in decoded.items():
        assert all(result.lossless == (name in RULES) for result in results)
        # At temperature 0 there is one text.
        texts = [result.token_ids for result in results]
        assert texts == [result.token_ids for result in decoded["block"]]


@pytest.mark.parametrize("name", LOSSY)
def test_the_audit_fails_them_in_words(name):
    subject = faults.right_subject()._replace(rule=LOSSY[name])
    for sampling, levels in [
        (Sampling(temperature=1.0), ["exact_law", "enumeration"]),
        (Sampling(), ["exact_law"]),
    ]:
        report = audit(subject, faults.PROMPTS, sampling, levels=levels)
        assert report.verdict == "not lossless"
        assert "lossy by design" in report.reasons()[0]
    assert (
        report.exact_law.lossless
    )  # greedy text is right, and the rule is still lossy

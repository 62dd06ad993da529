"""The audit: right parts pass, planted faults are caught, and its words are kept."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_tokenizer, save_checkpoint

from specdec_jax import decode
from specdec_jax.acceptance import EVERY_RULE, RULES, Block
from specdec_jax.audit import (
    Report,
    audit,
    audit_records,
    compare_texts,
    exact_law,
    faults,
    loop_law,
    read_records,
)
from specdec_jax.audit.bookkeeping import bookkeeping_problems
from specdec_jax.audit.coins import coin_problems
from specdec_jax.audit.enumeration import TOLERANCE, worst_deviation
from specdec_jax.audit.planted import rules
from specdec_jax.audit.planted.rules import Chain
from specdec_jax.audit.power import NAMED, SIZE, power
from specdec_jax.audit.scores import NUM_BUCKETS, score_all
from specdec_jax.audit.subject import begin, finish
from specdec_jax.audit.table import TableModel, table
from specdec_jax.base import Draft, Params
from specdec_jax.cli import main
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specdec_jax.rng import RoundNoise
from specdec_jax.sampling import Sampling

FULL = bool(os.environ.get("SPECDEC_FULL"))
SAMPLED = Sampling(temperature=1.0)
RIGHT_RULES = {**EVERY_RULE, "chain": Chain()}


@pytest.fixture(autouse=True)
def _no_cache_on_disk(monkeypatch):
    monkeypatch.setattr(
        "specdec_jax.compilation.enable_compilation_cache", lambda: None
    )


# Exact levels.


class NeedsLaws(Block):
    """A rule that one-hot drafts are nothing for."""

    needs_log_probs = True


@pytest.mark.parametrize("name", RIGHT_RULES)
def test_right_rules_pass_the_exact_levels(name):
    subject = faults.right_subject()._replace(rule=RIGHT_RULES[name])
    for sampling in (SAMPLED, Sampling(temperature=0.7, top_k=3), Sampling()):
        found = exact_law(subject, faults.PROMPTS, sampling, num_contexts=5)
        assert found.lossless and found.num_contexts == 5
    assert worst_deviation(RIGHT_RULES[name], ((3, 2),)) < TOLERANCE
    assert coin_problems(RIGHT_RULES[name]) == []


def test_the_exact_law_of_a_deterministic_draft_and_of_another_vocabulary():
    right = faults.right_subject()
    ngram = right._replace(drafter=NgramDrafter(2))
    assert exact_law(ngram, faults.PROMPTS, SAMPLED, num_contexts=4).lossless
    for size in (4, 7):
        draft = TableModel(size)
        other = right._replace(
            params=Params(right.params.target, table(jax.random.key(3), size)),
            drafter=ModelDrafter(draft, 2, vocab_size=5),
        )
        prompts = [[1, 2, 3, 1, 2]]
        assert exact_law(other, prompts, SAMPLED, num_contexts=4).lossless
    with pytest.raises(ValueError, match="longer"):
        exact_law(right, [[1]], SAMPLED)
    with pytest.raises(ValueError, match="needs the law"):
        exact_law(ngram._replace(rule=NeedsLaws()), faults.PROMPTS, SAMPLED)


RULE_FAULTS = [
    name
    for name, fault in faults.FAULTS.items()
    if fault.part == "rule" and fault.wrong.noise == "round"
]
COUNTED_OR_SHARED = {"matches counted, not the prefix", "one coin for all positions"}


@pytest.mark.parametrize("name", RULE_FAULTS)
def test_exact_levels_catch_wrong_rules(name):
    """All but what is only in how coins are used together; see the loop below."""
    found = faults.first_objection(
        faults.subject_of(faults.FAULTS[name]), ("exact_law", "enumeration")
    )
    assert (found is None) == (name in COUNTED_OR_SHARED)


# Levels that run the loop.


LOOP_FAULTS = [name for name in faults.FAULTS if name not in RULE_FAULTS] + [
    *sorted(COUNTED_OR_SHARED)
]
USUAL = {
    "unlikely drafts dropped",
    "nested: inner draft's law reported",
    "one coin for all positions",
    "bonus token forgotten",
}
"""One a part: a drafter, a rule, a step; the model's fault is in a test of its own."""


@pytest.mark.parametrize("name", LOOP_FAULTS)
def test_the_loop_catches_every_other_fault(name):
    if not FULL and name not in USUAL:
        pytest.skip("make test-full and specdec audit --all-faults run them all")
    outcome = faults.run_fault(name)
    assert outcome.caught and outcome.level in ("statistics", "identity")


def test_there_are_enough_faults_of_each_kind():
    kinds = [fault.kind for fault in faults.FAULTS.values()]
    assert len(kinds) >= 20
    assert {faults.LAW, faults.EFFICIENCY, faults.BOOKKEEPING} == set(kinds)
    sources = {fault.source for fault in faults.FAULTS.values()}
    assert {"B.1.4", "B.2", "B.3", "B.5", "B.6.2", "B.9", "C.3"} <= sources
    with pytest.raises(ValueError, match="'no residual'"):
        faults.run_fault("no such")


@pytest.fixture(scope="module")
def right_report():
    told = []
    report = audit(
        faults.right_subject(), faults.PROMPTS, SAMPLED,
        num_samples=2048, max_new_tokens=7, eos_token_ids=faults.EOS,
        announce=told.append,
    )  # fmt: skip
    return report, told


def test_a_right_subject_is_lossless(right_report):
    report, told = right_report
    assert report.verdict == "lossless" and not report.reasons()
    assert not report.warnings()
    assert told == [report.statistics.power]
    assert "power: first token unconditional 1.000" in str(told[0])
    assert report.statistics.draft_deviation < 1e-6
    document = json.loads(json.dumps(report.document()))
    assert document["exact_law"]["max_deviation"] < 1e-10
    assert document["enumeration"]["max_deviation"] < 1e-12
    assert document["statistics"]["p_value"] > SIZE
    assert 0.9 < document["statistics"]["power"] <= 1
    identity = document["identity"]
    assert identity["identical"] == 24 and identity["agreement"]["lowest"] == 1
    assert (identity["near_ties"], identity["mismatches"]) == (0, 0)


def test_a_small_sample_is_inconclusive(right_report):
    sample = right_report[0].statistics
    few = sample.power._replace(by_fault=dict.fromkeys(sample.power.by_fault, 0.5))
    report = Report(statistics=sample._replace(power=few))
    assert report.verdict == "inconclusive"
    assert "more samples" in report.reasons()[0]
    assert report.document()["identity"] is None


def test_lost_speed_is_a_warning_and_no_loss():
    subject = faults.subject_of(faults.FAULTS["draft forgets the temperature"])
    report = audit(
        subject, faults.PROMPTS, SAMPLED, levels=["statistics"], num_samples=2048
    )
    assert report.verdict == "lossless"
    assert "costs acceptance" in report.warnings()[0]


def test_a_mismatch_is_named():
    subject = faults.subject_of(faults.FAULTS["stale target cache"])
    found = compare_texts(subject, faults.PROMPTS[:4], Sampling(), max_new_tokens=7)
    assert found.mismatches and not found.lossless
    assert found.identical + found.near_ties + found.mismatches == 8
    assert all(one.difference.margin >= found.tie for one in found.found)


def test_levels_refuse_what_they_cannot_test():
    right = faults.right_subject()
    with pytest.raises(ValueError, match="temperature 0 has none"):
        loop_law(right, faults.PROMPTS, Sampling())
    for run in (loop_law, audit):
        with pytest.raises(ValueError, match="nothing is drafted"):
            run(right._replace(drafter=NoDrafter()), faults.PROMPTS, SAMPLED)
    with pytest.raises(ValueError, match="no level 'magic'"):
        audit(right, faults.PROMPTS, SAMPLED, levels=["magic"])
    with pytest.raises(ValueError, match="no prompts"):
        audit(right, [], SAMPLED)
    broken = {"params": {"table": right.params.target["params"]["table"] * jnp.nan}}
    with pytest.raises(FloatingPointError, match="not finite"):
        loop_law(
            right._replace(params=right.params._replace(target=broken)),
            faults.PROMPTS[:1], SAMPLED, num_samples=4,
        )  # fmt: skip


# Scores and power.


def two_laws(seed=0, vocab_size=9):
    logits = np.random.default_rng(seed).standard_normal((2, vocab_size))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def test_scores_have_the_moments_they_claim():
    p, q = two_laws()
    vocab_size = len(p)
    every = np.arange(vocab_size, dtype=np.int32)
    rows = [np.broadcast_to(np.log(x).astype(np.float32), (9, 9)) for x in (p, q)]
    found = score_all(every, np.full(9, 0.5, np.float32), *rows, np.ones(9, bool))
    for name in ("leak", "surprise"):
        values = np.asarray(getattr(found, name))
        assert abs((p * values).sum()) < 1e-6
        variance = np.asarray(getattr(found, name + "_variance"))
        np.testing.assert_allclose((p * values**2).sum(), variance, rtol=1e-4)
    # Buckets: over tokens and coins each holds the same share.
    share = np.zeros(NUM_BUCKETS)
    coins = (np.arange(400) + 0.5) / 400
    for coin in coins:
        coin = np.full(9, coin, np.float32)
        one = score_all(every, coin, *rows, np.ones(9, bool))
        share += np.bincount(np.asarray(one.bucket), p, NUM_BUCKETS) / 400
    np.testing.assert_allclose(share, 1 / NUM_BUCKETS, atol=5e-3)
    none = score_all(every, coin, *rows, np.zeros(9, bool))
    assert not np.asarray(none.leak).any() and not np.asarray(none.leak_variance).any()


def test_power_is_what_a_simulation_finds():
    p, q = two_laws(3)
    known = power(p[None], q[None], 300, 1)
    rng = np.random.default_rng(0)
    weight = np.minimum(q / p, 5.0)
    mean = (p * weight).sum()
    sigma = np.sqrt(300 * (p * (weight - mean) ** 2).sum())
    for name, law_of in NAMED.items():
        law = law_of(p[None], q[None])[0]
        np.testing.assert_allclose(law.sum(), 1)
        drawn = rng.choice(9, (4000, 300), p=law)
        z = np.abs((weight[drawn] - mean).sum(1)) / sigma
        seen = (z > 3.2905).mean()  # two-sided 1e-3
        assert abs(seen - known.by_fault[name]) < 0.05


# Records.


def draw_records(wrong=False, size=4000, seed=1):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((2, size, 12)).astype(np.float32)
    p, q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    law = NAMED["no residual"](p, q) if wrong else p
    cumulative = np.cumsum(law / law.sum(-1, keepdims=True), axis=1)
    token = (rng.random((size, 1)) > cumulative).sum(1)
    return np.minimum(token, 11), p, q


def test_records_are_told_right_from_wrong(tmp_path):
    for wrong in (False, True):
        token, p, q = draw_records(wrong)
        np.savez(tmp_path / "r.npz", token=token, p=p, q=q)
        found = audit_records(read_records(tmp_path / "r.npz"))
        assert found.lossless != wrong and found.conclusive
        assert found.num_tokens == 4000
    impossible = np.zeros_like(p)
    impossible[np.arange(4000), (token + 1) % 12] = 1
    np.savez(tmp_path / "r.npz", token=token, p=impossible, q=q)
    found = audit_records(read_records(tmp_path / "r.npz"))
    assert found.p_value == 0 and found.impossible == 4000


def test_both_formats_of_records_are_the_same(tmp_path):
    token, p, q = draw_records(size=30)
    np.savez(tmp_path / "r.npz", token=token, p=p, q=q)
    lines = [
        json.dumps({"token": int(t), "p": a.tolist(), "q": b.tolist()})
        for t, a, b in zip(token, p, q, strict=True)
    ]
    (tmp_path / "r.jsonl").write_text("\n\n".join(lines))
    for one, other in zip(
        read_records(tmp_path / "r.npz"), read_records(tmp_path / "r.jsonl"),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert audit_records(read_records(tmp_path / "r.npz")).num_tokens == 30


GOOD = '{"token": 1, "p": [0.5, 0.5], "q": [0.1, 0.9]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n{"token": 1, "p": [0.5, 0.5]}', "line 3: 'q' is missing"),
        ('{"token": 1, "p": [0.5, 0.5], "q": null}', "line 2: 'q' is missing"),
        ('{"token": 1.0, "p": [1.0, 0.0], "q": [1, 0]}', "line 2: 'token' is 1.0"),
        ('{"token": 2, "p": [1.0, 0.0], "q": [1, 0]}', "line 2: 'token' is 2"),
        ('{"token": 1, "p": [1.0, 0.4], "q": [1, 0]}', "line 2: 'p' is no law"),
        ('{"token": 1, "p": [0.5, 0.5], "q": [NaN, 0]}', "line 2: 'q' is no law"),
        ('{"token": 1, "p": [1.5, -0.5], "q": [1, 0]}', "line 2: 'p' is no law"),
        ('{"token": 1, "p": [1.0, 0.0], "q": [1]}', "line 2: 'p' has 2 entries"),
        ('{"token": 1, "p": [0.5, 0, 0.5], "q": [1, 0, 0]}', "line 2: p has 3"),
        ('{"token": 1, "p": "half", "q": [1, 0]}', "line 2: 'p' must be a list"),
        ("[1]", "line 2: it must be a JSON object"),
        ("{", "line 2: no JSON"),
    ],
)
def test_a_malformed_record_is_named(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(GOOD + text)
    with pytest.raises(ValueError, match=message):
        read_records(path)


def test_malformed_arrays_are_named(tmp_path):
    path = tmp_path / "r.npz"
    token, p, q = draw_records(size=3)
    for arrays, message in [
        ({"token": token, "p": p}, "no array 'q', only token, p"),
        ({"token": token, "p": p, "q": q[:2]}, r"q \(2, 12\)"),
        ({"token": token / 2, "p": p, "q": q}, "token is float64"),
        ({"token": token[:0], "p": p[:0], "q": q[:0]}, "no records"),
        ({"token": token, "p": p, "q": q * [[1], [2], [1]]}, "row 1: 'q' is no law"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            read_records(path)
    path.write_text("no archive")
    with pytest.raises(ValueError, match="no npz file"):
        read_records(path)
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no records"):
        read_records(tmp_path / "r.jsonl")


# The command.


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat sat"}\n{"prompt": [5, 9, 5, 9, 5]}\n')
    return {
        "target": save_checkpoint(folder / "target", num_layers=1),
        "draft": save_checkpoint(folder / "draft", num_layers=1, seed=1),
        "prompts": str(prompts),
    }


@pytest.fixture
def run(pair, capsys):
    """Runs `specdec audit` on the tiny pair: exit code, stdout, stderr."""

    def run_it(*arguments, **options):
        given = [f"--{k}={v}" for k, v in {**pair, **options}.items() if v is not None]
        code = main(["audit", *given, *arguments])
        return code, *capsys.readouterr()

    return run_it


@pytest.mark.slow
def test_the_command_says_that_a_pair_is_lossless(run):
    levels = [] if FULL else ["--level=exact-law", "--level=identity"]
    code, out, err = run("--num-samples=512", "--num-draft-tokens=2", "--json", *levels)
    found = json.loads(out)
    assert (code, found["verdict"], found["faults"]) == (0, "lossless", [])
    assert found["exact_law"]["max_deviation"] < 1e-10
    assert found["identity"]["identical"] + found["identity"]["near_ties"] == 6
    assert found["config"]["num_prompts"] == 2 and "versions" in found["environment"]
    if FULL:
        assert "512 drafted places; power: " in err
        assert found["enumeration"]["max_deviation"] < 1e-12
        assert found["statistics"]["p_value"] > SIZE


def test_levels_can_be_chosen(run):
    code, out, _ = run("--level", "enumeration", "--level", "exact-law", draft="ngram")
    assert code == 0
    assert "exact law" in out and "enumeration" in out and "statistics" not in out
    assert "lossless: " in out


def test_a_lossy_rule_ends_with_code_1_and_its_reason(run):
    rule = ("--rule=lenience", "--allow-lossy", "--num-draft-tokens=2")
    code, out, _ = run("--level=exact-law", "--temperature=0", *rule)
    assert code == 1
    assert "lossy by design" in out and "rule lenience (lossy" in out


def test_planted_faults_end_with_code_1(capsys):
    assert main(["audit", "--fault", "no residual", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not lossless"
    assert found["faults"] == [
        {"name": "no residual", "class": "law", "caught": True, "level": "exact_law"}
    ]
    assert main(["audit", "--fault", "lenience 0.9"]) == 1
    out = capsys.readouterr().out
    assert "1 of 1 planted faults caught" in out and "not lossless" in out


def test_all_faults_are_listed(capsys, monkeypatch):
    few = ["no residual", "block: token-wise residual"]
    monkeypatch.setattr(faults, "FAULTS", {n: faults.FAULTS[n] for n in few})
    monkeypatch.setattr(faults, "CONTROLS", {"block": Block()})
    monkeypatch.setitem(faults.LEVELS, "rule", ("exact_law", "enumeration"))
    assert main(["audit", "--all-faults", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["level"] for one in found["faults"]] == ["exact_law", "enumeration"]
    assert found["controls"] == [{"name": "block", "passed": True}]
    harmless = faults.Fault(faults.LAW, "rule", Block(), "B.3")
    monkeypatch.setattr(faults, "FAULTS", {"harmless": harmless})
    assert main(["audit", "--all-faults", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "inconclusive" and not found["faults"][0]["caught"]


def test_records_decide_the_exit_code(tmp_path, capsys):
    for wrong, code, verdict in [(False, 0, "lossless"), (True, 1, "not lossless")]:
        token, p, q = draw_records(wrong)
        np.savez(tmp_path / "r.npz", token=token, p=p, q=q)
        path = str(tmp_path / "r.npz")
        assert main(["audit", "--records", path, "--json"]) == code
        out, err = capsys.readouterr()
        assert (
            json.loads(out)["verdict"] == verdict
            and "records: 4000 drafted places" in err
        )
    token, p, q = draw_records(size=5)
    np.savez(path, token=token, p=p, q=q)
    assert main(["audit", "--records", path]) == 1
    assert "inconclusive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["--num-draft-tokens=0"], {}, "num_draft_tokens is 0"),
        (["--num-samples=0"], {}, "num_samples is 0"),
        (["--draft=none"], {"draft": None}, "draft is none"),
        (["--fault=x", "--all-faults"], {}, "give one"),
        (["--fault=x", "--level=identity"], {}, "does not go"),
        (["--fault=x"], {}, "there is no fault 'x'"),
        (["--records=/no/file.npz"], {}, "no records file /no/file.npz"),
        (["--level=magic"], {}, "no level 'magic'"),
        (["--temperature=0", "--level=statistics"], {}, "temperature 0 has none"),
        (["--rule=rejekt"], {}, "did you mean 'rejection'"),
        (["--rule=typical"], {}, "(--allow-lossy)"),
        ([], {"prompts": "/no/file.jsonl"}, "/no/file.jsonl"),
    ],
)
def test_bad_input_ends_with_code_2(run, arguments, options, message):
    code, out, err = run(*arguments, **options)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("specdec: error: ")


def test_bad_prompts_and_pairs_end_with_code_2(run, tmp_path):
    prompts = tmp_path / "p.jsonl"
    for text, message in [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{"pro', "line 2: no JSON"),
        ('{"prompt": [1, true]}', "line 1"),
    ]:
        prompts.write_text(text)
        code, _, err = run(prompts=prompts)
        assert code == 2 and message in err
    other = save_checkpoint(
        tmp_path / "other", num_layers=1, tokenizer=make_tokenizer(swapped=True)
    )
    code, _, err = run(draft=other)
    assert code == 2 and "is not the target's" in err


# Counts.


def test_bookkeeping_names_what_is_broken():
    subject = faults.right_subject()
    keys = jax.random.split(jax.random.key(0), 3)
    state = finish(
        subject,
        begin(subject, faults.PROMPTS[:3], keys, SAMPLED, max_new_tokens=5),
    )
    assert bookkeeping_problems(state) == []
    broken = state._replace(limit=state.limit - 1)
    assert "more tokens than the budget (row 0)" in bookkeeping_problems(broken)
    counts = state.counts._replace(rounds=state.counts.rounds + 1)
    assert "the histogram and the rounds differ (row 0)" in bookkeeping_problems(
        state._replace(counts=counts)
    )
    stopped = state._replace(finish=jnp.full((3,), decode.EOS, jnp.int32))
    assert "for another reason" in bookkeeping_problems(stopped)[0]


def test_planted_parts_are_wrong_in_one_way_only():
    """With the parts as they come, `Chain` is the rejection rule, draw by draw."""
    target = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (3, 6)))
    draft = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (2, 6)))
    over = jnp.argmax(draft - target[:2], axis=1).astype(jnp.int32)
    drafted = Draft(over, jnp.int32(2), draft)

    def verdicts(rule):
        return jax.jit(jax.vmap(lambda key: rule(RoundNoise(key), drafted, target)))(
            jax.random.split(jax.random.key(2), 500)
        )

    right, same = verdicts(RULES["rejection"]), verdicts(Chain())
    np.testing.assert_array_equal(right.num_accepted, same.num_accepted)
    np.testing.assert_array_equal(right.next_token, same.next_token)
    lenient = verdicts(Chain(log_ratio=rules.lenient))
    assert (lenient.num_accepted > right.num_accepted).any()

"""Calibration: alpha covers the truth, and made-up times lead where they should.

Nothing here depends on how long anything takes.
"""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy

from specdec_jax import Sampling, SpeculativeDecoder
from specdec_jax.base import Params
from specdec_jax.benchmark.bootstrap import Estimate, estimate
from specdec_jax.benchmark.sweep import Sweep, Turn, with_length
from specdec_jax.calibrate import calibrate, choose, prediction
from specdec_jax.calibrate.overlap import Overlaps, overlaps
from specdec_jax.calibrate.trees import grow
from specdec_jax.cli import main
from specdec_jax.cli.calibrate import _print, _title
from specdec_jax.drafters import (
    DynamicTreeDrafter,
    ModelDrafter,
    NgramDrafter,
    TreeDrafter,
)

V = 4
MODEL = toy.TableModel(V)
TARGET = toy.table(jax.random.key(0), V)
DRAFT = toy.mix(TARGET, toy.table(jax.random.key(1), V), 0.6)
KEYS = {
    "alpha",
    "cost_ratio",
    "verify_factor",
    "survival",
    "predicted_speedup",
    "measured_speedup",
    "recommended_num_draft_tokens",
    "verdict",
}


def decoder(draft=DRAFT, drafter=None, **options):
    drafter = drafter or ModelDrafter(MODEL, 4)
    return SpeculativeDecoder(MODEL, Params(TARGET, draft), drafter=drafter, **options)


# Alpha.


def exact_alpha(prompt, num_places):
    """Mean over places of E[sum min(p, q)] on the target's text, by enumeration."""
    total = 0.0
    for size in range(num_places):
        law = toy.joint_law(MODEL, TARGET, prompt, size).ravel()
        contexts = [(*prompt, *t) for t in itertools.product(range(V), repeat=size)]
        p, q = (
            toy.softmax(toy.next_logits(MODEL, variables, contexts))
            for variables in (TARGET, DRAFT)
        )
        total += law @ np.minimum(p, q).sum(axis=-1)
    return total / num_places


@pytest.fixture(scope="module")
def table_overlaps():
    """Of 1,024 texts of one prompt. Four tokens are three places and a last one."""
    own = decoder()
    plan = own.plan(
        [[1, 2]] * 1024, max_new_tokens=4, sampling=Sampling(temperature=1.0), seed=3
    )
    return overlaps(own.engine, plan, num_prompts=1024, batch_size=1024)


def test_interval_covers_a_known_alpha(table_overlaps):
    alpha, truth = table_overlaps.alpha(), exact_alpha((1, 2), 3)
    assert table_overlaps.num_places.tolist() == [3] * 1024
    assert alpha.low < truth < alpha.high
    assert alpha.high - alpha.low < 0.02


def test_nine_of_ten_intervals_cover_it(table_overlaps):
    truth = exact_alpha((1, 2), 3)
    parts = [
        Overlaps(*(column[i : i + 32] for column in table_overlaps)).alpha()
        for i in range(0, 1024, 32)
    ]
    covered = sum(part.low < truth < part.high for part in parts)
    assert 24 <= covered <= 32  # of 32; the chance of fewer is 0.6%


def test_alpha_of_a_deterministic_draft_is_its_share_of_hits():
    """The script says 9 5 6 9 5 6 9 5, and the last three but one were seen before."""
    own = SpeculativeDecoder(
        tiny.ScriptModel(),
        Params(tiny.script([9, 5, 6] * 3, 3)),
        drafter=NgramDrafter(2),
    )
    plan = own.plan([[3, 4, 7]] * 3, max_new_tokens=8)
    found = overlaps(own.engine, plan, num_prompts=1, batch_size=3)
    assert found.num_places.tolist() == [3 * 7]
    assert found.alpha().value == pytest.approx(3 / 7)


def test_bootstrap_draws_units():
    heights = np.array([1.0, 3.0])
    found = estimate(lambda weights: weights @ heights / weights.sum(axis=1), 2)
    assert found == Estimate(2.0, 1.0, 3.0)


# The sweep.


@pytest.fixture(scope="module")
def perfect():
    """The target drafts for itself: three prompts in batches of two, so four texts."""
    own = decoder(TARGET)
    return calibrate(
        own,
        [[1, 2, 3], [2], [3, 1]],
        lengths=(1, 3),
        max_new_tokens=[13, 9, 11],
        batch_size=2,
        repeats=2,
    )


def test_laps_are_whole_rounds_of_full_batches(perfect):
    assert perfect.sweep.lengths == [0, 1, 3]
    for unit, budget in zip(perfect.sweep.units, (9, 11), strict=True):
        for k, turns in unit.items():
            for turn in turns:
                # All is accepted: each row has K + 1 tokens a round, until one is full.
                assert turn.rounds == -(-budget // (k + 1))
                assert turn.num_tokens == 2 * turn.rounds * (k + 1)
                assert turn.histogram == (0,) * k + (2 * turn.rounds,)
                assert turn.wide == (turn.rounds if k else 0)


def test_a_perfect_draft_has_alpha_and_survival_one(perfect):
    found = perfect.summary()
    assert found["alpha"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["survival"] == [1.0, 1.0, 1.0]
    assert found["acceptance_rate"] == {"0": 0.0, "1": 1.0, "3": 1.0}
    assert found["num_units"] == 2


def test_summary_is_json_with_the_promised_keys(perfect):
    found = json.loads(json.dumps(perfect.summary(), allow_nan=False))
    assert found.keys() >= KEYS
    for name in ("verify_factor", "predicted_speedup", "measured_speedup"):
        assert found[name].keys() == {"0", "1", "3"}
        assert found[name]["0"] == pytest.approx(1)
    assert found["recommended_num_draft_tokens"] in (0, 1, 3)


# Trees.


def test_trees_are_grown_by_what_was_accepted():
    """The target drafts for itself: first children are accepted, second ones never."""
    own = decoder(TARGET, TreeDrafter(MODEL, (-1, -1)))
    found = calibrate(
        own, [[1, 2, 3], [2]], lengths=(2, 6), max_new_tokens=13, repeats=1
    ).summary()
    assert found["rank_acceptance"] == [1.0, 0.0]
    # Width brings nothing, and neither do more nodes than the two levels tried take.
    assert found["trees"] == {"2": [-1, 0]}
    assert set(found["measured_speedup"]) == {"0", "2"}
    assert found["survival_by_length"]["2"] == [1.0, 1.0]
    assert found["alpha"]["value"] == 1.0
    assert found["recommended_tree"] in (None, [-1, 0])


def test_a_draft_that_misses_gets_a_bush():
    """A second child, accepted half as often as the first, beats a fourth level."""
    draft = toy.mix(TARGET, toy.table(jax.random.key(1), V), 0.2)
    own = decoder(draft, TreeDrafter(MODEL, (-1, -1, 0, 0)))
    plan = own.plan(
        [[i % V, i // V % V] for i in range(16)],
        max_new_tokens=9,
        sampling=Sampling(temperature=1.0),
    )
    found = grow(own.engine, plan, sizes=(4,), batch_size=16)
    first, second = found.ranks.acceptance
    assert 0 < second < first and first + second <= 1
    assert found.ranks.offered[0] == found.ranks.offered[1]
    sizes = dict(found.trees)
    assert sizes.keys() == {1, 4}
    assert sizes[4].count(-1) > 1
    assert found.with_num_draft_tokens(4).parents == sizes[4]


def test_a_draft_that_is_never_right_gets_one_node():
    """Its likeliest tokens are the target's least likely ones."""
    own = decoder(jax.tree.map(jnp.negative, TARGET), TreeDrafter(MODEL, (-1, -1)))
    found = calibrate(own, [[1, 2]], lengths=(3,), max_new_tokens=5, repeats=1)
    assert found.summary()["rank_acceptance"] == [0.0, 0.0]
    assert found.summary()["trees"] == {"1": [-1]}
    assert found.sweep.lengths == [0, 1]


def test_trees_of_another_kind_are_refused():
    own = decoder(drafter=DynamicTreeDrafter(MODEL, 4, depth=2, width=2))
    with pytest.raises(ValueError, match="varies the trees of one draft model"):
        calibrate(own, [[1, 2]])


def test_a_length_is_changed_or_refused():
    assert with_length(NgramDrafter(3, max_ngram=2), 5) == NgramDrafter(5, max_ngram=2)
    assert with_length(ModelDrafter(MODEL, 3), 0).num_nodes == 0
    with pytest.raises(ValueError, match="no num_draft_tokens"):
        with_length(TreeDrafter(MODEL, (-1,)), 2)


# Prediction, choice and verdict from made-up numbers.


def turn(k, *, lap, tokens, histogram, round_, pass_, draft=0.0, wide=1.0):
    rounds = sum(histogram)
    return Turn(
        lap_seconds=lap,
        rounds=rounds,
        wide=round(wide * rounds) if k else 0,
        num_tokens=tokens,
        num_drafted=k * rounds,
        histogram=histogram,
        round_seconds=round_,
        round_wide=1.0 if k else 0.0,
        pass_seconds=pass_,
        draft_seconds=draft,
    )


def made_up(wide=1.0):
    """K = 2 survives to depth 1 in 3 of 4 rounds, and to depth 2 in 1 of 4."""
    plain = turn(0, lap=10.0, tokens=10, histogram=(10,), round_=1.0, pass_=0.8)
    two = turn(
        2, lap=5.6, tokens=8, histogram=(1, 2, 1), round_=1.4, pass_=1.0, draft=0.2,
        wide=wide,
    )  # fmt: skip
    slow = two._replace(lap_seconds=99.0, round_seconds=99.0)
    return Sweep([{0: [plain] * 3, 2: [two, slow, two]}])


def test_prediction_is_the_theory_of_the_parts():
    sweep = made_up()
    parts = prediction.Parts.of(sweep)
    assert parts.cost_ratio == pytest.approx(10)  # 1.0 / (0.2 / 2)
    assert parts.verify_factor(2) == pytest.approx(1.25)
    assert parts.overhead(2) == pytest.approx(1.4 - 0.2 - 1.0)
    assert parts.survival(2)[0] == pytest.approx([0.75, 0.25])
    # 1 + .75 + .25 tokens in 1.4 plain steps; the odd repeat is no median.
    assert prediction.predicted(sweep, 2).value == pytest.approx(2 / 1.4)
    assert prediction.measured(sweep, 2).value == pytest.approx(8 / 5.6)
    assert prediction.predicted(sweep, 0).value == pytest.approx(1)


def test_drafting_a_tree_costs_a_step_a_level():
    """Four nodes in two levels: as `made_up`, with a wider pass."""
    plain = turn(0, lap=10.0, tokens=10, histogram=(10,), round_=1.0, pass_=0.8)
    tree = turn(
        4, lap=5.6, tokens=8, histogram=(1, 2, 1), round_=1.4, pass_=1.0, draft=0.2
    )
    sweep = Sweep([{0: [plain], 4: [tree]}])
    parts = prediction.Parts.of(sweep)
    assert sweep.depth(4) == 2
    assert parts.cost_ratio == pytest.approx(10)
    assert parts.overhead(4) == pytest.approx(1.4 - 0.2 - 1.0)
    assert parts.survival(4)[0] == pytest.approx([0.75, 0.25])
    assert prediction.predicted(sweep, 4).value == pytest.approx(2 / 1.4)


def test_rounds_without_a_draft_are_narrow():
    """Half of the laps' rounds drafted, and all of the held ones did."""
    found = prediction.predicted(made_up(wide=0.5), 2)
    assert found.value == pytest.approx(2 / (1.4 - 0.5 * (1.0 - 0.8)))


def spread(values, width=0.05):
    return {k: Estimate(float(v), v - width, v + width) for k, v in values.items()}


@pytest.mark.parametrize(
    "values, chosen, plateau, words",
    [
        ({0: 1, 1: 1.5, 2: 2, 3: 1.8, 4: 1.5}, 2, (2, 2), ["Draft 2 tokens", "sharp"]),
        ({0: 1, 1: 1.98, 2: 2, 3: 1.95, 4: 1}, 1, (1, 3), ["Draft 1 token a", "1 to"]),
        ({0: 1, 1: 1.1, 2: 1.2, 4: 1.3}, 4, (4, 4), ["sharp", "longest draft tried"]),
        ({0: 1, 1: 1.02, 2: 0.9}, 1, (0, 1), ["do not agree", "0 to 1"]),
        ({0: 1, 1: 1.005, 2: 0.9}, 0, (0, 1), ["Do not use speculation", "1.00 times"]),
        ({0: 1, 1: 0.9, 2: 0.7}, 0, (0, 0), ["Do not use speculation", "tried, 1"]),
    ],
)  # fmt: skip
def test_choice_is_the_shortest_of_the_fastest(values, chosen, plateau, words):
    found = choose(spread(values))
    assert (found.num_draft_tokens, found.plateau) == (chosen, plateau)
    assert [word for word in words if word not in found.verdict] == []


def test_verdict_names_where_parts_and_clock_disagree():
    values = spread({0: 1, 1: 1.5, 2: 2})
    agreed = choose(values, {0: 1.0, 1: 1.4, 2: 2.1})
    assert "predict" not in agreed.verdict
    apart = choose(values, {0: 1.0, 1: 1.4, 2: 2.5})
    assert "predict 25% more at 2" in apart.verdict


# The command line.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return tiny.save_checkpoint(folder / "target", num_layers=1)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "the cat sat"}, {"prompt": "hello", "max_new_tokens": 5}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("specdec_jax.compilation.enable_compilation_cache", lambda: "")
    monkeypatch.setattr("specdec_jax.calibrate.LENGTHS", (0, 2))


def arguments(checkpoint, path, *more):
    given = ["--target", checkpoint, "--prompts", str(path), "--max-new-tokens", "6"]
    return ["calibrate", *given, "--repeats", "1", *more]


def test_command_line_measures_draws_and_prints(
    checkpoint, prompt_file, tmp_path, capsys
):
    figure = tmp_path / "found.png"
    more = ["--json", "--figure", str(figure), "--batch-size", "2"]
    assert main(arguments(checkpoint, prompt_file, *more)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= KEYS | {"config", "environment"}
    assert found["measured_speedup"].keys() == {"0", "2"}
    assert found["config"]["draft"] == "ngram"
    assert found["config"]["num_prompts"] == 2
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert found["config"]["lossless"]
    lossy = {**found["config"], "rule": "lenience", "lossless": False}
    assert "lenience (lossy" in _title(lossy)
    _print(found, found["config"])
    out = capsys.readouterr().out
    for word in ("predicted", "alpha", "cost ratio c", "times"):
        assert word in out


@pytest.mark.parametrize(
    "more, message",
    [
        (["--draft", "none"], "draft is none"),
        (["--max-new-tokens", "1"], "at least 2"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--prompts", "nowhere.jsonl"], "no prompt file nowhere.jsonl"),
        (["--rule", "nonsense"], "unknown rule"),
        (["--branching", "2,x"], "branching is '2,x'"),
        (["--branching=-1,-1,3"], "node 2 has parent 3"),
        (["--branching", "2,1"], "trees are drafted by a model"),
        (["--rule", "lenience"], "(--allow-lossy)"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-k", "0"], "top_k is 0"),
        (["--top-p", "2"], "top_p is 2"),
        (["--figure", "found.nonsense"], "such as .png"),
        (["--figure", "nowhere/found.png"], "no folder nowhere"),
        (["--gamma", "4"], "No such option: --gamma"),
    ],
)
def test_bad_input_is_a_message_and_code_2(
    checkpoint, prompt_file, capsys, more, message
):
    assert main(arguments(checkpoint, prompt_file, *more)) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_figure_is_refused_first(
    checkpoint, prompt_file, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    more = ["--figure", "found.png"]
    assert main(arguments(checkpoint, prompt_file, *more)) == 2
    assert "pip install 'specdec-jax[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": []}, "no prompts"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"repeats": 0}, "repeats 0"),
        ({"lengths": (0,)}, "lengths are"),
        ({"max_new_tokens": 1}, "at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    asked = {"prompts": [[1, 2]], "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        calibrate(decoder(), **asked)


def test_a_decoder_without_a_draft_is_refused():
    plain = SpeculativeDecoder(MODEL, Params(TARGET))
    with pytest.raises(ValueError, match="drafts nothing"):
        calibrate(plain, [[1, 2]])

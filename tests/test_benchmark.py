"""The benchmark's numbers hang together; how large they are is not tested."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax import Sampling, SpeculativeDecoder, benchmark
from specdec_jax.base import Params
from specdec_jax.benchmark import programs, units
from specdec_jax.benchmark.timing import Costs, speedup, speedup_interval
from specdec_jax.cli import main
from specdec_jax.cli.bench import _print, _title
from specdec_jax.drafters import NgramDrafter
from specdec_jax.text.packing import pack
from specdec_jax.text.running import start_batch

_NGRAM = NgramDrafter(2)
PROMPTS = ["the cat sat on the mat and the cat sat on", [5, 9], "hello world"]
SETTINGS = {
    "max_new_tokens": [12, 7, 9],
    "sampling": Sampling(temperature=[0.0, 0.8, 0.0]),
    "eos_token_id": (),
}
KEYS = {
    "plain",
    "speculative",
    "speedup",
    "speedup_low",
    "speedup_high",
    "predicted_speedup",
    "mean_acceptance_length",
    "verify_factor",
    "cost_ratio",
    "cold_compile_seconds",
    "warm_compile_seconds",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return tiny.save_checkpoint(folder / "target", num_layers=1)


@pytest.fixture(scope="module")
def decoder(checkpoint, tmp_path_factory):
    """Of two models under the coupled rule: sampled texts equal plain ones as well."""
    folder = tmp_path_factory.mktemp("draft")
    draft = tiny.save_checkpoint(folder / "draft", num_layers=1, seed=1)
    return SpeculativeDecoder.from_pretrained(
        checkpoint, draft, num_draft_tokens=3, rule="coupled"
    )


@pytest.fixture(scope="module")
def report(decoder):
    """Three prompts in a batch, which has four rows."""
    return benchmark.compare(decoder, PROMPTS, batch_size=3, repeats=2, **SETTINGS)


def test_speedup_is_the_ratio_of_tokens_per_second(report):
    found = report.summary()
    ratio = (
        found["speculative"]["tokens_per_second"]
        / (found["plain"]["tokens_per_second"])
    )
    assert found["speedup"] == pytest.approx(ratio)
    assert found["speedup_low"] <= found["speedup_high"]


def test_prediction_weighs_rounds_by_their_width(report):
    found = report.summary()
    part = found["part_seconds"]
    rounds, share = found["speculative"]["rounds"], found["wide_round_share"]
    seconds = rounds * (
        share * part["verify"] + (1 - share) * part["step"] + part["draft"]
    )
    plain = found["plain"]["rounds"] * part["step"]
    assert found["plain"]["num_tokens"] == found["speculative"]["num_tokens"]
    assert found["predicted_speedup"] == pytest.approx(plain / seconds)
    assert found["verify_factor"] == pytest.approx(part["verify"] / part["step"])
    assert found["cost_ratio"] == pytest.approx(3 * part["step"] / part["draft"])


def test_both_arms_decode_the_same_texts(report):
    [unit] = report.units
    plain, own = unit.runs["plain"][0], unit.runs["speculative"][0]
    assert plain.token_ids == own.token_ids
    assert [len(row) for row in own.token_ids] == [12, 7, 9]
    found = report.summary()
    assert found["same_tokens"] == 3
    assert found["mean_acceptance_length"] == pytest.approx(28 / own.counts[0])
    # The fourth row only fills the batch.
    assert plain.rounds == 12 and plain.counts[0] == 28


def test_batches_cover_all_prompts_once(decoder):
    plan = decoder.plan([[5] * n for n in (1, 200, 3, 4, 5)], max_new_tokens=2)
    cut = list(units.batches(plan, 3))
    indices = [[request.index for request in requests] for requests, _ in cut]
    assert indices == [[0, 1, 2], [3, 4]]
    assert [batch.tokens.shape for _, batch in cut] == [(4, 256), (2, 256)]
    assert cut[1][1].length.tolist() == [4, 5]


def test_held_rounds_stay_where_they_are_and_verify_a_full_draft():
    decoder = SpeculativeDecoder(
        tiny.ScriptModel(), Params(tiny.script([9, 5, 6] * 3, 4)), drafter=_NGRAM
    )
    engine = decoder.engine
    parts = {"target": engine.target, "rule": engine.rule}
    batch = pack(decoder.plan([[3, 4, 5, 6]], max_new_tokens=9), [0])
    state = start_batch(
        engine.params, batch, target=engine.target, drafter=engine.drafter
    )
    free = np.bool_(False)
    tally, state = programs.decode_rounds(
        engine.params, state, np.int32(99), free, drafter=engine.drafter, **parts
    )
    assert int(state.length[0]) == 13
    # 9 5 6 | 9 5 6 | 9 5 6: the first round finds no match, and the second one that of
    # the prompt's 5, which 6 follows, then 9.
    assert int(tally.rounds) > int(tally.wide) > 0
    state = programs.midway(state, 2)
    draft, state = programs.draft_rounds(
        engine.params, state, np.int32(3), drafter=engine.drafter, rule=engine.rule
    )
    assert draft.tokens.tolist() == [[6, 9]]
    tally, state = programs.decode_rounds(
        engine.params,
        state._replace(drafter_state=draft),
        np.int32(5),
        ~free,
        drafter=programs.Replay(2, 2, ()),
        **parts,
    )
    assert (int(tally.rounds), int(tally.wide), int(state.length[0])) == (5, 5, 9)


def test_rows_that_run_together_end_with_the_first_and_in_whole_rounds():
    decoder = SpeculativeDecoder(
        tiny.ScriptModel(), Params(tiny.script([9, 5, 6] * 9, 4)), drafter=_NGRAM
    )
    engine = decoder.engine
    plan = decoder.plan([[3, 4, 5, 6]] * 3, max_new_tokens=[20, 9, 20])
    batch = pack(plan, range(3))  # of four rows; one only fills it
    state = start_batch(
        engine.params, batch, target=engine.target, drafter=engine.drafter
    )
    tally, state = units.run_rounds(engine, state, together=True)
    # Two rounds without a match, two of 3 tokens; another one could be cut.
    assert state.length[:3].tolist() == 3 * [4 + 1 + 1 + 3 + 3]
    assert int(tally.uncut_rounds) == 3 * int(tally.rounds)
    _, state = units.run_rounds(engine, state)
    assert state.length[:3].tolist() == [24, 13, 24]


def test_logits_that_are_not_finite_are_reported():
    decoder = SpeculativeDecoder(
        tiny.ScriptModel(), Params(tiny.script([9, -1], 3)), drafter=_NGRAM
    )
    with pytest.raises(FloatingPointError, match="not finite for prompt 0"):
        benchmark.compare(decoder, [[5, 6, 7]], max_new_tokens=4, repeats=1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"repeats": 0}, "repeats 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        (
            {"batch_size": 2, "rivals": {"other": lambda *_: None}},
            "one prompt at a time",
        ),
        ({"prompts": []}, "no prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(decoder, change, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        benchmark.compare(decoder, **arguments)


def test_a_decoder_without_a_draft_is_refused(checkpoint):
    plain = SpeculativeDecoder.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="drafts nothing"):
        benchmark.compare(plain, PROMPTS)


def test_interval_is_over_units():
    slow = Costs(np.array([2.0, 8.0]), np.array([10, 10]))
    fast = Costs(np.array([1.0, 2.0]), np.array([10, 10]))
    assert speedup(slow, fast) == pytest.approx(10 / 3)
    low, high = speedup_interval(slow, fast)
    assert (low, high) == (2, 4)


def test_compiling_leaves_the_disk_cache_setting_alone(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    program = jax.jit(lambda x: jnp.sin(x) + 1)
    cold, warm = benchmark.compile_seconds(
        lambda: program.lower(jnp.ones((3,))).compile()
    )
    assert cold > 0 and warm > 0
    assert jax.config.values["jax_compilation_cache_dir"] == before


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPTS[0], "max_new_tokens": 5},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "never used"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _arguments(checkpoint, path, *more):
    options = {
        "target": checkpoint,
        "prompts": path,
        "max-new-tokens": 6,
        "num-draft-tokens": 2,
        "repeats": 1,
        "num-prompts": 2,
    }
    pairs = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    return ["bench", *pairs, *more]


@pytest.fixture(autouse=True)
def _no_disk_cache(monkeypatch):
    monkeypatch.setattr("specdec_jax.compilation.enable_compilation_cache", lambda: "")


def test_command_line_against_transformers(checkpoint, prompt_file, capsys):
    pytest.importorskip("torch")
    more = ["--json", "--against", "transformers"]
    assert main(_arguments(checkpoint, prompt_file, *more)) == 0
    found = json.loads(capsys.readouterr().out)
    assert KEYS | {"transformers", "config", "environment"} <= found.keys()
    theirs = found["transformers"]
    assert theirs["plain_tokens_per_second"] > 0
    assert theirs["assisted_tokens_per_second"] > 0
    assert theirs["texts_compared"] == 6
    assert theirs["texts_equal"] + theirs["near_ties"] == 6
    assert found["config"]["draft"] == "ngram"
    assert found["config"]["num_prompts"] == 2
    assert found["units"][0]["num_tokens"][0] <= 5
    assert found["config"]["lossless"]
    lossy = {**found["config"], "rule": "lenience", "lossless": False}
    assert "lenience (lossy" in _title(lossy)
    _print(found, found["config"])
    out = capsys.readouterr().out
    for word in ("speculative", "assisted", "speedup", "predicted", "compiling"):
        assert word in out


@pytest.mark.parametrize(
    "more, message",
    [
        (["--draft", "none"], "draft is none"),
        (["--num-draft-tokens", "0"], "num_draft_tokens is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--against", "vllm"], "offered is transformers"),
        (["--against", "transformers", "--temperature", "1"], "greedy"),
        (["--prompts", "nowhere.jsonl"], "no prompt file nowhere.jsonl"),
        (["--rule", "nonsense"], "unknown rule"),
        (["--rule", "lenience"], "(--allow-lossy)"),
        (["--drafts", "ngram"], "No such option: --drafts"),
    ],
)
def test_bad_input_is_a_message_and_code_2(
    checkpoint, prompt_file, capsys, more, message
):
    assert main(_arguments(checkpoint, prompt_file, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_malformed_line_is_named(checkpoint, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": 5}\n')
    assert main(["bench", "--target", checkpoint, "--prompts", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err

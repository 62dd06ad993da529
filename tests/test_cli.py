"""The command line, run in this process on a tiny checkpoint."""

import json
import re

import jax
import pytest
from tiny import make_tokenizer, save_checkpoint

import specdec_jax
from specdec_jax.checkpoints import locate
from specdec_jax.cli import main
from specdec_jax.cli.prompts import read_prompts

REQUEST_KEYS = {
    "prompt",
    "text",
    "token_ids",
    "num_tokens",
    "finish_reason",
    "rounds",
    "acceptance_histogram",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "logprobs",
}
TIMING_KEYS = {"load_seconds", "compile_seconds", "decode_seconds", "tokens_per_second"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "target")


@pytest.fixture(autouse=True)
def _no_cache_on_disk(monkeypatch):
    monkeypatch.setattr(
        "specdec_jax.compilation.enable_compilation_cache", lambda: None
    )


@pytest.fixture
def run(folder, capsys):
    """Runs `specdec generate` on the tiny checkpoint: exit code, stdout, stderr."""

    def run_it(*arguments):
        code = main(
            ["generate", "--target", folder, "--max-new-tokens", "9", *arguments]
        )
        return code, *capsys.readouterr()

    return run_it


def test_the_text_alone_goes_to_stdout(run, folder):
    decoder = specdec_jax.SpeculativeDecoder.from_pretrained(folder, "ngram")
    [expected] = decoder.generate("the cat", max_new_tokens=9)
    code, out, err = run("the cat")
    assert (code, out) == (0, expected.text + "\n")
    assert re.search(
        rf"{expected.num_tokens} tokens, {expected.rounds} rounds, mean acceptance "
        rf"length {expected.mean_acceptance_length:.2f}, [\d.]+ tokens/s",
        err,
    )


def test_a_terminal_sees_the_text_in_the_colours_of_its_origins(run, monkeypatch):
    _, plain, _ = run("the cat")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, out, err = run("the cat")
    assert code == 0
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == plain
    assert "\x1b[33m" in out or "\x1b[36m" in out
    for origin in ("accepted", "corrected", "bonus"):
        assert origin in err


def test_json_has_requests_timing_config_and_environment(run):
    code, out, err = run("the cat", "the cat", "--json", "--temperature", "0.8")
    document = json.loads(out)
    assert code == 0 and "Traceback" not in err
    assert document.keys() == {"requests", "timing", "config", "environment"}
    assert len(document["requests"]) == 2
    for request in document["requests"]:
        assert request.keys() >= REQUEST_KEYS
        assert request["lossless"]
        assert request["prompt"] == "the cat"
        assert request["num_tokens"] == len(request["token_ids"]) == 9
        assert len(request["logprobs"]) == 9
        assert sum(request["acceptance_histogram"]) == request["rounds"]
    first, second = (request["token_ids"] for request in document["requests"])
    assert first != second  # one seed, two places
    assert document["timing"].keys() == TIMING_KEYS
    assert document["timing"]["compile_seconds"] > 0
    assert document["config"]["sampling"]["temperature"] == 0.8
    assert document["config"]["draft"] == "ngram"
    assert document["environment"]["versions"]["jax"] == jax.__version__


def test_every_flag_reaches_its_use(run, folder):
    """Each changes the document it is given for; greedy K 4 is the base."""

    def ask(*arguments):
        code, out, err = run("the cat sat on the cat sat", "--json", *arguments)
        assert code == 0, err
        document = json.loads(out)
        [request] = document["requests"]
        return request, document["config"]

    base, _ = ask()
    cut, config = ask("--draft-num-layers", "1", "--num-draft-tokens", "2")
    assert cut["token_ids"] == base["token_ids"]
    assert config["draft"] == folder and config["draft_num_layers"] == 1
    assert len(cut["acceptance_histogram"]) == 3
    stopped, _ = ask("--stop", base["text"][2:4])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == base["text"][: base["text"].index(base["text"][2:4])]
    plain, config = ask(
        "--draft", "none", "--dtype", "bfloat16", "--max-new-tokens", "3"
    )
    assert config["dtype"] == "bfloat16"
    assert plain["num_tokens"] == 3 and plain["acceptance_histogram"] == [3]


def test_every_sampling_flag_changes_the_text(run):
    weak = {
        "--temperature": "1.5",
        "--top-k": "300",
        "--top-p": "0.999",
        "--min-p": "0.0001",
        "--repetition-penalty": "1.01",
        "--draft-temperature": "1.0",
        "--seed": "0",
        "--rule": "rejection",
    }
    strong = {
        "--temperature": "0.2",
        "--top-k": "2",
        "--top-p": "0.3",
        "--min-p": "0.4",
        "--repetition-penalty": "0.1",
        "--seed": "1",
    }

    def ask(options):
        flat = [word for pair in options.items() for word in pair]
        code, out, err = run("the cat sat", "--json", "--draft-num-layers", "1", *flat)
        assert code == 0, err
        return json.loads(out)["requests"][0]

    base = ask(weak)
    for flag, value in strong.items():
        assert ask(weak | {flag: value})["token_ids"] != base["token_ids"], flag
    cooler = ask(weak | {"--draft-temperature": "0.1"})
    assert cooler["num_drafted"] > 0
    assert cooler["origins"] != base["origins"]


def test_a_chat_goes_through_the_template(run):
    code, out, _ = run("hi", "--chat", "--json", "--max-new-tokens", "1")
    [request] = json.loads(out)["requests"]
    template = "<s>[user] hi\n[assistant] "
    assert request["prompt"] == "hi"
    assert request["num_prompt_tokens"] == len(make_tokenizer()(template).input_ids)


LINES = [
    '{"prompt": "the cat"}',
    "",
    '{"prompt": "broken',
    '{"prompt": [5, 6, 7], "max_new_tokens": 2, "id": "mine"}',
    '{"messages": [{"role": "user", "content": "hi"}]}',
    '{"text": "no prompt"}',
    '"just text"',
    json.dumps({"prompt": "xyz " * 400}),
]


def test_a_lossy_rule_is_named_lossy_everywhere(run, tmp_path):
    path = tmp_path / "page.html"
    lossy = ("--trace", str(path), "--rule", "lenience", "--allow-lossy")
    code, out, err = run("on the", "--json", *lossy)
    assert code == 0
    found = json.loads(out)
    assert not found["requests"][0]["lossless"]
    assert not found["config"]["lossless"] and found["config"]["rule"] == "lenience"
    assert "lenience (lossy" in path.read_text(encoding="utf-8")
    code, out, err = run("on the", *lossy)
    assert code == 0 and "lossy: the rule" in err


def test_a_trace_goes_to_a_page(run, tmp_path):
    path = tmp_path / "page.html"
    code, out, err = run("on the", "--trace", str(path))
    assert code == 0
    assert str(path) in err
    assert 'class="t ' in path.read_text(encoding="utf-8")

    missing = str(tmp_path / "nowhere" / "page.html")
    code, out, err = run("on the", "--trace", missing)
    assert (code, out) == (2, "")
    assert "there is no folder" in err


def test_a_prompt_file_gives_lines_and_names_what_it_cannot_use(run, tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n".join(LINES))
    options = ("--prompts", str(path), "--batch-size", "2", "--temperature", "0.8")
    code, out, err = run(*options)
    assert code == 2 and "Traceback" not in err
    assert "line 3: no JSON" in err
    assert 'line 6: "prompt" must be' in err
    assert re.search(r"line 8: a prompt of \d+ tokens .* model has 512", err)
    assert "3 of 7 prompts could not be used" in err
    results = [json.loads(line) for line in out.splitlines()]
    assert sorted(result["index"] for result in results) == [0, 2, 3, 5]
    by_index = {result["index"]: result for result in results}
    assert by_index[0]["prompt"] == "the cat"
    assert by_index[2]["num_tokens"] == 2

    code, document, _ = run(*options, "--output", str(output), "--json")
    assert code == 2
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({line.pop("run") for line in written}) == 1
    assert sorted(written, key=lambda r: r["index"]) == json.loads(document)["requests"]
    assert {r["index"]: r["token_ids"] for r in written} == {
        r["index"]: r["token_ids"] for r in results
    }


def test_what_was_done_before_bad_numbers_is_written(run, tmp_path):
    broken = save_checkpoint(tmp_path / "broken", nan=True)
    code, out, err = run("the cat", "--target", broken, "--json")
    assert code == 2 and "not finite for prompt 0 at position" in err
    [request] = json.loads(out)["requests"]
    assert request["finish_reason"] == "error" and request["token_ids"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--temprature", "1"], "--temperature"),
        (["generat"], "generate"),
        (["generate", "x", "--temperature", "warm"], "temperature"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "x", "--num-draft-tokens", "-1"], "num_draft_tokens is -1"),
        (["generate", "x", "--rule", "rejekt"], "did you mean 'rejection'"),
        (["generate", "x", "--rule", "typical"], "(--allow-lossy)"),
        (["generate", "x", "--target", "/no/where"], "/no/where"),
        (["generate", "x", "--prompts", "p.jsonl"], "not both"),
        (["generate", "--prompts", "/no/file.jsonl"], "/no/file.jsonl"),
        (["generate", "x", "--output", "o.jsonl"], "--prompts"),
        (["generate", "x", "--batch-size", "0"], "batch_size is 0"),
        (["generate", "x", "--draft", "ngram", "--draft", "ngram"], "say how they"),
        (["generate", "x", "--num-draft-tokens", "4,x"], "num_draft_tokens is '4,x'"),
        (["generate", "x"], "--target smollm2-135m"),
    ],
)
def test_mistakes_end_with_a_message_and_code_2(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.setattr(locate, "BUNDLED", {})
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("specdec: error: ")
    assert out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "600"], "the model has 512"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "stop has ''"),
        (["--dtype", "float8"], "float8"),
        (["--draft-num-layers", "3"], "has 2 layers"),
    ],
)
def test_what_the_checkpoint_cannot_do_ends_with_code_2(run, options, message):
    code, out, err = run("the cat", *options)
    assert (code, out) == (2, "") and message in err


def test_prompt_files_keep_places_and_line_numbers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n"just text"\n\n[1]\n{"prompt": [1, true]}\n{"messages": []}\n')
    entries, problems = read_prompts(path)
    assert [(e.line, e.index, e.content) for e in entries] == [(2, 0, "just text")]
    assert [problem.line for problem in problems] == [4, 5, 6]


def test_info_says_what_there_is(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {
        "versions",
        "devices",
        "bundled",
        "default_target_path",
        "default_draft_path",
        "compilation_cache",
    } <= facts.keys()
    assert main(["info"]) == 0
    assert "compilation cache: " in capsys.readouterr().out


def test_the_cache_on_disk_keeps_small_programs(tmp_path, monkeypatch):
    monkeypatch.undo()
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    from jax.experimental.compilation_cache import compilation_cache

    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert specdec_jax.enable_compilation_cache() == tmp_path / "cache"
        compilation_cache.reset_cache()
        jax.jit(lambda x: x * 3 + 1)(2.0)
        assert list((tmp_path / "cache").iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

"""Data sets: a full batch, the same tokens, and files that survive a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tiny
import toy

from specdec_jax import Sampling, SpeculativeDecoder
from specdec_jax.base import Params
from specdec_jax.cli import main
from specdec_jax.dataset import decode_dataset
from specdec_jax.drafters import ModelDrafter
from specdec_jax.text import running

PROMPTS = [[i % 5, i % 3, (i * i) % 5][: 1 + i % 3] for i in range(13)]
BUDGETS = [3 + 7 * i % 40 for i in range(13)]


def make_decoder():
    model = toy.TableModel(5)
    target, other = (toy.table(jax.random.key(seed), 5, 2.0) for seed in range(2))
    params = Params(target, toy.mix(target, other, 0.7))
    return SpeculativeDecoder(model, params, drafter=ModelDrafter(model, 3))


def settings():
    return {"max_new_tokens": BUDGETS, "seed": 7, "sampling": Sampling(1.0)}


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


@pytest.fixture(scope="module")
def expected(decoder):
    return [one.token_ids for one in decoder.generate(PROMPTS, **settings())]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("rounds_per_look", [None, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_refilled_rows_have_the_tokens_they_have_alone(
    decoder, expected, batch_size, rounds_per_look
):
    plan = decoder.plan(PROMPTS, **settings())
    results = {}
    for piece in decoder.run(
        plan, batch_size=batch_size, rounds_per_look=rounds_per_look
    ):
        if piece.result is not None:
            assert piece.index not in results
            results[piece.index] = piece.result
    assert [results[i].token_ids for i in range(len(PROMPTS))] == expected
    for i, one in results.items():
        assert len(one.token_ids) == BUDGETS[i]
        assert sum(one.acceptance_histogram) == one.rounds


def test_refilling_keeps_the_batch_full_and_compiles_nothing_anew(decoder, monkeypatch):
    plan = decoder.plan(PROMPTS, **settings())
    decoder.compile(plan, batch_size=4)
    programs = (running.start_batch, running._advance, running._refill)
    live = []
    read_look = running._Pool._read

    def watch(pool, look, follow):
        if pool._queue:
            live.append(sum(row is not None for row in pool._rows))
        return read_look(pool, look, follow)

    monkeypatch.setattr(running._Pool, "_read", watch)
    list(decoder.run(plan, batch_size=4, rounds_per_look=None))
    assert live and set(live) == {4}
    before = [program._cache_size() for program in programs]
    other = decoder.plan(PROMPTS[::-1], **settings() | {"seed": 8})
    list(decoder.run(other, batch_size=4, rounds_per_look=None))
    assert [program._cache_size() for program in programs] == before


def test_a_file_has_every_result_in_order(decoder, expected, tmp_path):
    path, seen = tmp_path / "out.jsonl", []
    summary = decode_dataset(
        decoder, PROMPTS, path, batch_size=4, done=seen.append, **settings()
    )
    assert summary.num_requests == len(seen) == len(PROMPTS)
    assert summary.num_tokens == sum(BUDGETS)
    lines = read(path)
    assert [line["token_ids"] for line in lines] == expected
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [one.index for one in seen] != sorted(one.index for one in seen)
    assert list(tmp_path.iterdir()) == [path]


class Stopped(Exception):
    pass


def test_a_run_that_stopped_goes_on(decoder, expected, tmp_path):
    path, seen = tmp_path / "out.jsonl", []

    def stop(result):
        seen.append(result.index)
        if len(seen) == 5:
            raise Stopped

    run = {"batch_size": 4, **settings()}
    with pytest.raises(Stopped):
        decode_dataset(decoder, PROMPTS, path, done=stop, **run)
    assert [line["index"] for line in read(path)] == seen
    with path.open("a") as file:
        file.write('{"index": 0, "prompt": [0], "token_')
    with pytest.raises(FileExistsError, match="has results already"):
        decode_dataset(decoder, PROMPTS, path, **run)
    with pytest.raises(ValueError, match=r"line 1 is of a run with other settings"):
        decode_dataset(decoder, PROMPTS, path, resume=True, **run | {"seed": 8})
    changed = [[4, 4, 4]] * len(PROMPTS)
    with pytest.raises(ValueError, match=r"has another prompt at index"):
        decode_dataset(decoder, changed, path, resume=True, **run)
    summary = decode_dataset(decoder, PROMPTS, path, resume=True, **run)
    assert summary.num_requests == len(PROMPTS) - 5
    assert [line["token_ids"] for line in read(path)] == expected
    summary = decode_dataset(decoder, PROMPTS, path, resume=True, **run)
    assert summary.num_requests == 0 and len(read(path)) == len(PROMPTS)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1 is no result of a run"):
        decode_dataset(decoder, PROMPTS, path, resume=True, **run)


CHILD = """
import sys, time
from pathlib import Path
import test_dataset as t
from specdec_jax.dataset import decode_dataset
decode_dataset(t.make_decoder(), t.PROMPTS, Path(sys.argv[1]), batch_size=2,
               resume=True, done=lambda result: time.sleep(0.1), **t.settings())
"""


def test_a_killed_run_loses_nothing_and_repeats_nothing(expected, tmp_path):
    path = tmp_path / "out.jsonl"
    environ = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start():
        command = [sys.executable, "-c", CHILD, str(path)]
        return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)

    kept = []
    for target in (3, 8):
        child = start()
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < target:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        whole = path.read_bytes().split(b"\n")[:-1]
        assert target <= len(whole) < len(PROMPTS)
        assert whole[: len(kept)] == kept
        kept = whole
    child = start()
    _, error = child.communicate(timeout=120)
    assert child.returncode == 0, error.decode()
    assert [line["token_ids"] for line in read(path)] == expected
    assert set(kept) <= set(path.read_bytes().split(b"\n"))


def test_the_command_line_goes_on_with_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "specdec_jax.compilation.enable_compilation_cache", lambda: None
    )
    target = tiny.save_checkpoint(tmp_path / "target")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = ["the cat", "a dog", "hello", "the mat", "on the log"]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    command = ["generate", "--target", target, "--prompts", str(prompts)]
    command += ["--draft", "none", "--max-new-tokens", "7", "--batch-size", "2"]
    assert main([*command, "--resume"]) == 2
    assert "--resume goes with --output" in capsys.readouterr().err
    command += ["--output", str(output)]
    assert main(command) == 0
    lines = output.read_text().splitlines(keepends=True)
    assert [json.loads(line)["prompt"] for line in lines] == texts
    assert main(command) == 2
    assert "has results already" in capsys.readouterr().err
    output.write_text("".join([lines[3], lines[1], lines[0][:20]]))
    assert main([*command, "--resume", "--batch-size", "4"]) == 0
    assert "2 of 5 were there" in capsys.readouterr().err
    assert output.read_text().splitlines(keepends=True) == lines
    assert main([*command, "--resume", "--seed", "1"]) == 2
    assert "other settings" in capsys.readouterr().err

"""Two processes of four devices each: one run, one writer, and a roll call."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
import tiny

from specdec_jax import Sampling
from specdec_jax.cli import main
from specdec_jax.sharding import initialize

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "experiments" / "launch"))
import local  # noqa: E402

FULL = bool(os.environ.get("SPECDEC_FULL"))
MESHES = ["data=8", "data=4,model=2", "data=2,model=4", "model=8"]
RULES = ["rejection", "coupled"]


def texts(rule, size, **options):
    """What a table model says to a few prompts."""
    import test_sharding

    decoder = test_sharding.table_decoder(rule, **options)
    sampling = Sampling(temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 0.0, 2.0][:size])
    results = decoder.generate(
        test_sharding.PROMPTS[:size], max_new_tokens=11, sampling=sampling, seed=3
    )
    return [(one.token_ids, one.rounds) for one in results]


JOIN = """
import json, os, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from specdec_jax.sharding import initialize
coordinator, number, argument = sys.argv[1:]
initialize(coordinator, 2, int(number), timeout_seconds=60)
assert len(jax.devices()) == 8 and jax.process_count() == 2
import test_processes as t
"""

SAY = """
cases = json.loads(argument)
found = [t.texts(rule, size, mesh=mesh) for rule, size, mesh in cases]
print(json.dumps(found))
"""

LOAD = """
print(json.dumps(t.memory_of_loading(argument)))
"""


def memory_of_loading(path):
    """Bytes that loading puts on this process's devices, and the most it takes."""
    from specdec_jax import SpeculativeDecoder

    def held():
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

    done, most = threading.Event(), []

    def watch():
        while not done.wait(0.002):
            most.append(held())

    # Imports and threads are there before anything is measured.
    mesh = "data=4,model=2"
    SpeculativeDecoder.from_pretrained(f"{path}-small", "none", mesh=mesh)
    before, watcher = held(), threading.Thread(target=watch)
    watcher.start()
    decoder = SpeculativeDecoder.from_pretrained(path, "none", mesh=mesh)
    done.set()
    watcher.join()
    leaves = jax.tree.leaves(decoder.engine.params)
    placed = sum(
        part.data.nbytes for leaf in leaves for part in leaf.addressable_shards
    )
    return {"placed": placed, "peak": max(most) - before}


def two_processes(program, argument):
    """What each of two joined processes prints last, from JSON."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    coordinator = f"localhost:{local.free_port()}"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + program, coordinator, str(i), argument],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    outputs = [child.communicate(timeout=900) for child in children]
    for child, (_, error) in zip(children, outputs, strict=True):
        assert child.returncode == 0, error.decode()[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_two_processes_say_what_one_says():
    cases = [("rejection", 5, "data=4,model=2"), ("coupled", 8, "model=8")]
    if FULL:
        cases = [(r, n, mesh) for r in RULES for n in (5, 8) for mesh in MESHES]
    alone = json.loads(json.dumps([texts(rule, size) for rule, size, _ in cases]))
    for found in two_processes(SAY, json.dumps(cases)):
        assert found == alone


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_no_process_ever_holds_the_whole_checkpoint(tmp_path):
    path = tiny.save_checkpoint(tmp_path / "large", num_layers=16, width=512)
    tiny.save_checkpoint(tmp_path / "large-small")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    for found in two_processes(LOAD, path):
        # Beside what lies on its four devices a process holds a few tensors.
        assert found["placed"] >= 2 * size * 0.9
        assert found["peak"] - found["placed"] < size / 4, found


def test_the_local_launcher_writes_one_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "specdec_jax.compilation.enable_compilation_cache", lambda: None
    )
    target = tiny.save_checkpoint(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    words = ["the cat", "a dog", "hello", "the mat", "on"]
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in words))
    command = ["generate", "--target", target, "--prompts", str(prompts)]
    command += ["--draft", "none", "--max-new-tokens", "7", "--batch-size", "2"]
    outputs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    assert main([*command, "--output", str(outputs[0])]) == 0
    command += ["--output", str(outputs[1]), "--mesh", "data=4,model=2"]
    assert local.main(["--processes", "2", "--devices", "4", "--", *command]) == 0
    one, two = (
        [json.loads(line) for line in out.read_text().splitlines()] for out in outputs
    )
    assert [line["index"] for line in two] == list(range(5))
    assert [x["token_ids"] for x in one] == [x["token_ids"] for x in two]
    assert {line["run"] for line in one} == {line["run"] for line in two}


def test_whoever_does_not_join_is_named():
    port = local.free_port()
    heard = {}

    def join(number, timeout):
        try:
            initialize(f"localhost:{port}", 4, number, timeout_seconds=timeout)
        except TimeoutError as error:
            heard[number] = str(error)

    others = [threading.Thread(target=join, args=(i, 20)) for i in (1, 3)]
    for thread in others:
        thread.start()
    join(0, 3)
    for thread in others:
        thread.join()
    assert set(heard) == {0, 1, 3}
    for message in heard.values():
        assert "of 4 processes these did not join" in message and ": 2;" in message
    join(1, 1)
    assert ": 0;" in heard[1]


def test_a_roll_ignores_who_only_knocks():
    port = local.free_port()

    def knock():
        socket.create_connection(("localhost", port + 1)).close()

    timer = threading.Timer(0.5, knock)
    timer.start()
    with pytest.raises(TimeoutError, match=": 1;"):
        initialize(f"localhost:{port}", 2, 0, timeout_seconds=2)
    timer.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1234", 2, None), "go together"),
        (("localhost", 2, 0), "write host:port"),
        (("localhost:1234", 2, 2), "goes from 0 to 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)

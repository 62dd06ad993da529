"""Every experiment with a smoke variant runs; what is stored is whole and small."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from specdec_jax.audit import faults

FOLDER = Path(__file__).parent.parent / "experiments"
SCRIPTS = sorted(
    path
    for path in FOLDER.glob("*.py")
    if path.stem != "common" and "--smoke" in path.read_text(encoding="utf-8")
)


@pytest.fixture
def load(monkeypatch):
    """Imports a script as running it would, without a compilation cache on disk."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(
        "specdec_jax.compilation.enable_compilation_cache", lambda: None
    )

    def load_it(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        # A dataclass looks its module up by name.
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return load_it


def strings(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [one for part in value for one in strings(part)]
    return [value] if isinstance(value, str) else []


def check(record):
    assert record["config"] and record["environment"]["versions"]["jax"]
    assert record["environment"]["devices"]
    assert not [one for one in strings(record) if re.search(r"(^|\s)(/|~/|\w:\\)", one)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_smoke_variant_runs_and_draws(path, load, tmp_path, capsys):
    output = tmp_path / f"{path.stem}.json"
    stored = {one: one.stat().st_mtime_ns for one in (FOLDER / "results").iterdir()}
    experiment = load(path)
    experiment.main(["--smoke", "--output", str(output)])
    assert capsys.readouterr().out
    record = json.loads(output.read_text(encoding="utf-8"))
    check(record)
    assert record["config"]["smoke"]
    if hasattr(experiment, "EXPERIMENT"):
        assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert stored == {
        one: one.stat().st_mtime_ns for one in (FOLDER / "results").iterdir()
    }


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_stored_results_are_those_of_a_full_run(path):
    record = FOLDER / "results" / f"{path.stem}.json"
    stored = json.loads(record.read_text(encoding="utf-8"))
    check(stored)
    assert not stored["config"]["smoke"]
    if "import common" in path.read_text(encoding="utf-8"):
        assert record.with_suffix(".png").stat().st_size < 200_000


def results(name):
    path = FOLDER / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def test_tables_say_which_figures_of_the_notes_are_wrong():
    tables = results("theory_tables")
    peaks, sizes = tables["peaks"], tables["sizes"]
    lengths = [row["right"]["num_draft_tokens"] for row in peaks]
    assert lengths == [2, 3, 4, 6, 8, 10, 13, 21]
    assert [row["agrees"] for row in peaks] == [False] + 7 * [True]
    assert "K = 1" in peaks[0]["why"]
    right = [
        (one["right"]["num_draft_tokens"], one["right"]["speedup"]) for one in sizes
    ]
    assert [(k, round(speedup, 2)) for k, speedup in right] == [
        (4, 1.82),
        (5, 2.21),
        (6, 2.47),
        (5, 1.98),
        (2, 1.12),
    ]
    assert [one["draft"] for one in sizes if one["agrees"]] == ["medium"]
    assert sizes[-1]["why"].startswith("no draft length reaches 1.19")
    for row in peaks:
        rule = row["stop_rule"]
        assert rule["right_rule_num_draft_tokens"] == row["right"]["num_draft_tokens"]
    losses = [round(100 * row["stop_rule"]["loss"], 1) for row in peaks]
    assert losses[0::2] == [2.9, 3.5, 6.3, 15.1] and losses[-1] == 26.1


def test_the_rule_traces_the_worked_examples_as_the_notes_do():
    for one in results("worked_example")["examples"]:
        notes = one["notes"]
        assert one["emitted"] == notes["emitted"] == "ABB" and one["num_emitted"] == 3
        assert [step["accepted"] for step in one["steps"]] == [True, True, False]
        assert round(one["expected_tokens"], 3) == notes["expected_tokens"] == 2.952
        assert round(one["speedup"], 2) == notes["speedup"]
        law = one["law"]
        assert law["rule"] == pytest.approx(law["formula"], abs=1e-12)
        off = one["simulated_tokens"] - one["expected_tokens"]
        assert abs(off) < 4 * one["standard_error"]


README = (FOLDER.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_was_measured(load):
    runs = results("headline")["runs"]
    rows = load(FOLDER / "headline.py").rows(runs)
    assert len(rows) == 8
    for row in rows:
        assert row in README
    for run in runs.values():
        assert run["command"] in README.replace(" \\\n    ", " ")
        assert run["transformers"]["texts_different"] == 0
    capacity = json.loads((FOLDER / "results" / "capacity.json").read_text())
    assert f"costs {capacity['ratio']:.2f} times one of 256" in README
    assert f"{len(faults.FAULTS)} planted faults" in README


def test_the_readme_says_which_draft_and_rule_pay(load):
    found = results("methods")
    rows = load(FOLDER / "methods.py").rows(found["methods"]["pystd-5m"])
    assert len(rows) == 14
    for row in rows:
        assert row in README
    for length, one in found["block"].items():
        assert f"{100 * one['by_law_gain']:.1f}%" in README, length
    for target, heats in found["methods"].items():
        for methods in heats.values():
            strong, weak = (
                methods[f"staged, {which} first"] for which in ("strong", "weak")
            )
            assert strong["mean_acceptance_length"] > weak["mean_acceptance_length"]
            if target == "pystd-5m":  # the other one's drafts are about as weak
                assert strong["speedup_low"] > weak["speedup_high"]


def test_right_rules_keep_the_law_and_each_shortcut_is_detected():
    found = results("lossless")
    for one in found["arms"]:
        bias, length = one["bias"], one["length"]
        assert one["rounds"] == 50_000
        assert one["detected"] != one["lossless"]
        off = abs(bias["measured"] - bias["exact"]) / bias["standard_error"]
        assert off < 4
        assert length["p_value"] > 1e-4
        if one["lossless"]:
            off = abs(length["mean"] - length["theory_mean"])
            assert off < 4 * length["standard_error"]
    assert found["greedy"]["different_tokens"] == 0


def test_compiled_rounds_are_lean_on_tpus():
    path = FOLDER / "results" / "tpu_plan.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    check(record)
    lean = [name for name in record["after"] if "70b" not in name]
    assert lean == list(record["before"]) and len(lean) == 4
    for name in lean:
        before, after = (record[kind][name] for kind in ("before", "after"))
        assert after["fits"] and after["round"]["bytes_ratio"] <= 1.5
        assert max(after["temporaries_share"].values()) <= 0.1
        # Nothing of a weight's or a cache's size is only copied.
        assert max(after["round"]["moved"].values()) < 3e6
        assert max(before["round"]["moved"].values()) > 3e7

"""What the experiments share: arguments, the record of a run, saving, drawing.

An experiment is one script with a frozen `Config`, a `measure(config)` that returns
plain values for JSON, and a `draw(record)` that makes the figure from nothing but the
JSON that was written. It ends with

    EXPERIMENT = common.Experiment(question, full, smoke, measure, draw)

    def main(argv=None):
        return common.main(EXPERIMENT, __file__, argv)

and is run as

    python experiments/NAME.py            the full run, to results/NAME.json and .png
    python experiments/NAME.py --smoke    the same in seconds, to nowhere
    python experiments/NAME.py --draw     only the figure, from the stored JSON
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from specdec_jax.calibrate import figure
from specdec_jax.cli.environment import environment

RESULTS = Path(__file__).parent / "results"

BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb2", "#e07b00", "#2a8f4d", "#c5342b", "#8a8a8a"
"""Ours, theirs, kept, dropped, and whatever is only for comparison."""

STYLE = figure.STYLE | {"figure.dpi": 100}


@dataclass(frozen=True)
class Experiment:
    """A question and how to answer it.

    Attributes:
      question: One line; what the numbers are about.
      config: Of the full run; a frozen dataclass of plain values.
      smoke: Of the run that takes seconds.
      measure: Returns the results as plain values; `summary`, a list of lines, is
        printed.
      draw: Makes the figure from the record as it was read back from JSON.
    """

    question: str
    config: Any
    smoke: Any
    measure: Callable[[Any], dict[str, Any]]
    draw: Callable[[dict[str, Any]], Figure]


def main(experiment: Experiment, script: str, argv: list[str] | None = None) -> dict:
    """Runs an experiment as its arguments say, and returns its record."""
    arguments = _parse(experiment, argv)
    stored = RESULTS / f"{Path(script).stem}.json"
    output = arguments.output or (None if arguments.smoke else stored)
    if arguments.draw:
        record = json.loads(stored.read_text(encoding="utf-8"))
    else:
        record = run(experiment, arguments.smoke)
        print(*record["results"].get("summary", ()), sep="\n")
    if output:
        save(experiment.draw, record, output)
    return record


def run(experiment: Experiment, smoke: bool) -> dict[str, Any]:
    """Measures, and records what on."""
    config = experiment.smoke if smoke else experiment.config
    start = time.perf_counter()
    results = experiment.measure(config)
    seconds = time.perf_counter() - start
    record = {
        "question": experiment.question,
        "results": results,
        "config": asdict(config) | {"smoke": smoke},
        "environment": facts(),
        "seconds": round(seconds, 3),
        "date": datetime.now(UTC).date().isoformat(),
    }
    # What is drawn and returned is what a reader of the file will have.
    return json.loads(json.dumps(record, allow_nan=False))


def facts() -> dict[str, Any]:
    """Returns what was measured on; the name of the kernel is the machine's own."""
    return {name: one for name, one in environment().items() if name != "platform"}


def save(
    draw: Callable[[dict[str, Any]], Figure], record: dict[str, Any], output: Path
) -> None:
    """Writes the record, and the figure beside it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    output.write_text(text + "\n", encoding="utf-8")
    with rc_context(STYLE):
        draw(record).savefig(output.with_suffix(".png"))


def _parse(experiment: Experiment, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=experiment.question)
    parser.add_argument("--smoke", action="store_true", help="the same in seconds")
    parser.add_argument("--draw", action="store_true", help="redraw the stored results")
    parser.add_argument(
        "--output", type=Path, help="JSON file; the figure goes beside it as .png"
    )
    return parser.parse_args(argv)

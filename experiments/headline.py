"""How fast is it, on the bundled pair and on a real chat model, and against whom?

Runs `specdec bench --against transformers` on both and prints the rows of the README's
table, which a test holds against the stored results.

    python experiments/headline.py            a quarter of an hour, on a quiet machine
    python experiments/headline.py --smoke    one prompt of the pair
"""

import contextlib
import io
import json
from dataclasses import dataclass

import common
from matplotlib.figure import Figure

from specdec_jax.cli import main as specdec

PAIR = ("--max-new-tokens", "128", "--repeats", "3")
SMOLLM2 = (
    *("--target", "smollm2-135m", "--draft", "ngram", "--num-draft-tokens", "8"),
    *("--chat", "--prompts", "experiments/rewrite_prompts.jsonl"),
    *("--max-new-tokens", "96", "--repeats", "3"),
)


@dataclass(frozen=True)
class Config:
    """Arguments of `specdec bench`, run by run."""

    pair: tuple[str, ...] = PAIR
    smollm2: tuple[str, ...] = SMOLLM2


def measure(config):
    runs = {"pair": _bench(config.pair)}
    if config.smollm2:
        runs["smollm2"] = _bench(config.smollm2)
    return {"runs": runs, "summary": rows(runs)}


def _bench(arguments):
    """Returns what the command prints, and the command."""
    command = ["bench", *arguments, "--against", "transformers"]
    paths = [_here(argument) for argument in command]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = specdec([*paths, "--json"])
    if code:
        raise RuntimeError(f"specdec {' '.join(command)} ended with code {code}")
    found = json.loads(printed.getvalue())
    del found["environment"]
    return {"command": " ".join(["specdec", *command])} | found


def _here(argument):
    """Returns a path that starts at the repository as one that exists from anywhere."""
    prefix = "experiments/"
    if argument.startswith(prefix):
        return str(common.RESULTS.parent / argument.removeprefix(prefix))
    return argument


def rows(runs):
    """Returns the rows of the README's table, without its head."""
    return [line for run in runs.values() for line in _rows(run)]


def _rows(run):
    plain, ours, theirs = run["plain"], run["speculative"], run["transformers"]
    config = run["config"]
    draft = config["draft"]
    best = max(theirs[f"{name}_tokens_per_second"] for name in ("plain", "assisted"))
    return [
        f"| {config['target']}, plain | {plain['tokens_per_second']:,.0f} | "
        f"{theirs['plain_over_plain']:.1f} times transformers' plain |",
        f"| {config['target']}, drafted by {draft} | {ours['tokens_per_second']:,.0f} "
        f"| {run['speedup']:.2f} times plain ({run['speedup_low']:.2f} to "
        f"{run['speedup_high']:.2f} over prompts, predicted "
        f"{run['predicted_speedup']:.2f}); {ours['tokens_per_second'] / best:.1f} "
        "times the better of transformers' two |",
        f"| transformers, plain | {theirs['plain_tokens_per_second']:,.0f} | |",
        f"| transformers, assisted by {draft} | "
        f"{theirs['assisted_tokens_per_second']:,.0f} | |",
    ]


def draw(record):
    runs = record["results"]["runs"]
    figure = Figure(figsize=(4.6 * len(runs), 3.4))
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for axes, run in zip(panels, runs.values(), strict=True):
        theirs = run["transformers"]
        bars = {
            "transformers,\nplain": theirs["plain_tokens_per_second"],
            "transformers,\nassisted": theirs["assisted_tokens_per_second"],
            "plain": run["plain"]["tokens_per_second"],
            "drafted": run["speculative"]["tokens_per_second"],
        }
        colours = [common.GREY, common.GREY, common.BLUE, common.ORANGE]
        drawn = axes.bar(bars.keys(), bars.values(), 0.6, color=colours)
        axes.bar_label(drawn, fmt="{:,.0f}")
        axes.set(title=run["config"]["target"], ylabel="tokens/s")
        axes.grid(axis="x", visible=False)
    return figure


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config(("--num-prompts", "1", "--max-new-tokens", "8", "--repeats", "1"), ()),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

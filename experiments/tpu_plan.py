"""How lean is the compiled round on TPUs, and what does a chip hold?

Compiles the deployed programs for described slices (no TPU is needed, libtpu is) and
counts what a round moves over what it has to. The record keeps the same figures of the
code before the weights' layouts were left to the compiler, under `before`; they come
from running this script on that code with --before.

    python experiments/tpu_plan.py              half an hour on two cores
    python experiments/tpu_plan.py --before     to the stored record's `before`
    python experiments/tpu_plan.py --draw       only the figure
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import common
from matplotlib.figure import Figure

from specdec_jax.plan import plan

CONFIGS = Path(__file__).parent / "configs"
RESULT = common.RESULTS / "tpu_plan.json"


@dataclass(frozen=True)
class Case:
    """A pair on a slice."""

    target: str
    draft: str | None
    topology: str
    mesh: str
    context_length: int
    batch_size: int = 8
    num_draft_tokens: int = 4

    @property
    def name(self):
        """What the figure calls it."""
        return f"{self.target}, {self.topology}, {self.context_length} slots"


SMALL = ("smollm2-135m", None, "v5e:1x1", "data=1,model=1")
PAIR = ("llama-3.1-8b", "llama-3.2-1b", "v5e:2x4", "data=1,model=8")
LARGE = ("llama-3.1-70b", "llama-3.1-8b", "v5p:2x2x1", "data=1,model=4")
CASES = [Case(*pair, slots) for pair in (SMALL, PAIR) for slots in (1024, 4096)]
MORE = [Case(*LARGE, 4096)]


def measure(case):
    """Returns the figures of one case."""
    configs = [name and CONFIGS / f"{name}.json" for name in (case.target, case.draft)]
    found = plan(
        *configs,
        topology=case.topology,
        mesh=case.mesh,
        batch_size=case.batch_size,
        context_length=case.context_length,
        num_draft_tokens=case.num_draft_tokens,
    )
    held = found["hbm_bytes"]["weights"] + found["hbm_bytes"]["cache"]
    programs = found["programs"]
    return {
        "fits": found["fits"],
        "hbm_bytes": found["hbm_bytes"],
        "temporaries_share": {
            name: one["temporaries"] / held for name, one in programs.items()
        },
        "round": found["round"],
        "predicted": found["predicted"],
    }


def line(case, one):
    """Returns a line of the table."""
    shares = one["temporaries_share"]
    copies = sum(one["round"]["moved"].values()) / 1e6
    return (
        f"{case.name}: {one['round']['bytes_ratio']:.2f} times the ideal, moves "
        f"{copies:.1f} MB by copies, temporaries {shares['rounds']:.1%} (rounds) "
        f"{shares['prefill']:.1%} (prefill); v "
        f"{one['predicted']['verify_factor']:.2f}"
    )


def draw(record):
    """Returns the figure: traffic and temporaries, before and after."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    traffic, memory = figure.subplots(1, 2)
    names = [case.name.replace(", ", "\n") for case in CASES]
    kinds = (("before", common.GREY), ("after", common.BLUE))
    for offset, (kind, color) in zip((-0.2, 0.2), kinds, strict=True):
        found = [record[kind].get(case.name) for case in CASES]
        places = [place + offset for place in range(len(CASES))]
        ratios = [one["round"]["bytes_ratio"] if one else 0 for one in found]
        shares = [
            100 * max(one["temporaries_share"].values()) if one else 0 for one in found
        ]
        for axis, values, form in (
            (traffic, ratios, "%.2f"),
            (memory, shares, "%.0f"),
        ):
            bars = axis.bar(places, values, 0.38, color=color, label=kind)
            axis.bar_label(bars, fmt=form, padding=2)
    traffic.axhline(1.5, color=common.RED, linewidth=1)
    memory.axhline(10, color=common.RED, linewidth=1)
    traffic.set_ylim(0, 1.7)
    traffic.set_title("traffic of a round over the ideal")
    memory.set_title("temporaries, % of weights and caches")
    for axis in (traffic, memory):
        axis.set_xticks(range(len(CASES)), names, fontsize=7)
    traffic.legend()
    return figure


def main(argv=None):
    """Compiles all cases, or draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="store as `before`")
    parser.add_argument("--draw", action="store_true", help="redraw what is stored")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args(argv)
    record = {"question": __doc__.splitlines()[0], "before": {}, "after": {}}
    if arguments.output.exists():
        record = json.loads(arguments.output.read_text(encoding="utf-8"))
    if not arguments.draw:
        kind = "before" if arguments.before else "after"
        for case in CASES + ([] if arguments.before else MORE):
            one = measure(case)
            print(line(case, one), flush=True)
            record[kind][case.name] = one
        record |= {
            "config": {"cases": [asdict(case) for case in CASES + MORE]},
            "environment": common.facts(),
        }
    common.save(draw, record, arguments.output)
    return record


if __name__ == "__main__":
    main()

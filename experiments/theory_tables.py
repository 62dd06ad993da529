"""How do the notes' tables of draft lengths and speedups compare with the right values?

The notes are sections 7.2, 7.3 and 8.2 of the text that this project started from. Each
figure of theirs stands beside what their own formula gives.

    python experiments/theory_tables.py            to results/theory_tables.{json,png}
    python experiments/theory_tables.py --smoke    fewer draft lengths
"""

from dataclasses import dataclass

import common
import jax
from matplotlib.figure import Figure

from specdec_jax import theory

PEAKS = (  # 7.3: alpha, c, K*, speedup at K*, at K* - 2 and at K* + 2
    (0.6, 5.0, 2, 1.40, 1.33, 1.28),
    (0.6, 10.0, 3, 1.67, 1.45, 1.59),
    (0.7, 10.0, 4, 1.98, 1.82, 1.91),
    (0.8, 10.0, 6, 2.47, 2.40, 2.40),
    (0.8, 20.0, 8, 3.09, 3.04, 3.05),
    (0.9, 10.0, 10, 3.43, 3.40, 3.39),
    (0.9, 20.0, 13, 4.67, 4.63, 4.66),
    (0.95, 20.0, 21, 6.60, 6.58, 6.59),
)
SIZES = (  # 8.2: draft, alpha, c, K*, speedup
    ("tiny", 0.55, 25.0, 4, 1.41),
    ("small", 0.70, 15.0, 5, 2.07),
    ("medium", 0.80, 10.0, 6, 2.47),
    ("large", 0.88, 4.0, 5, 1.91),
    ("near-target", 0.95, 1.3, 3, 1.19),
)
ROUNDING = 0.0051
"""The notes round to two decimals, now and then downwards."""


@dataclass(frozen=True)
class Config:
    """Draft lengths 0 to `max_num_draft_tokens` are searched."""

    max_num_draft_tokens: int = theory.MAX_NUM_DRAFT_TOKENS


class Curve:
    """The speedup of every draft length at one alpha and c, in float64."""

    def __init__(self, alpha: float, cost_ratio: float, config: Config):
        with jax.enable_x64(True):
            survival = theory.constant_survival(alpha, config.max_num_draft_tokens)
            speedup = theory.speedup(survival, cost_ratio)
            self.best = int(theory.best_num_draft_tokens(speedup))
            self.real = float(theory.continuous_num_draft_tokens(alpha, cost_ratio))
            self.values = speedup.tolist()
            self.pays = theory.one_more_pays(survival, cost_ratio).tolist()
            self.survival = survival.tolist()


def measure(config):
    peaks = [_peak(*row, config) for row in PEAKS]
    sizes = [_size(*row, config) for row in SIZES]
    wrong = [size["draft"] for size in sizes if not size["agrees"]]
    worst = max(peaks, key=lambda row: row["stop_rule"]["loss"])
    return {
        "peaks": peaks,
        "sizes": sizes,
        "summary": [
            f"7.3: {sum(row['agrees'] for row in peaks)} of {len(peaks)} rows agree; "
            + "; ".join(row["why"] for row in peaks if row["why"]),
            f"8.2: {len(sizes) - len(wrong)} of {len(sizes)} rows agree; wrong: "
            + ", ".join(wrong),
            f"7.2: the stop rule costs up to {worst['stop_rule']['loss']:.1%}, at "
            f"alpha {worst['alpha']}, c {worst['cost_ratio']:g}",
        ],
    }


def _peak(alpha, cost_ratio, best, peak, less, more, config):
    """Returns a row of 7.3, and what the stop rule of 7.2 makes of the same draft."""
    curve = Curve(alpha, cost_ratio, config)
    lengths = [best, best - 2, best + 2]
    notes = {"num_draft_tokens": lengths, "speedup": [peak, less, more]}
    right = [curve.values[length] for length in lengths]
    agrees = [
        abs(a - b) < ROUNDING for a, b in zip(notes["speedup"], right, strict=True)
    ]
    why = ""
    if not agrees[1]:
        why = (
            f"K* - 2 is {lengths[1]} at alpha {alpha}, c {cost_ratio:g}, where the "
            f"speedup is {right[1]:.2f} by definition; their {less} is that of K = 1"
        )
    rule = sum(chance * cost_ratio >= 1 for chance in curve.survival)
    return {
        "alpha": alpha,
        "cost_ratio": cost_ratio,
        "notes": notes,
        "right": {
            "num_draft_tokens": curve.best,
            "continuous_num_draft_tokens": curve.real,
            "speedup": right,
        },
        "agrees": all(agrees) and curve.best == best,
        "why": why,
        "stop_rule": {
            "num_draft_tokens": rule,
            "speedup": curve.values[rule],
            "loss": 1 - curve.values[rule] / curve.values[curve.best],
            "right_rule_num_draft_tokens": sum(curve.pays),
        },
        "curve": curve.values,
    }


def _size(draft, alpha, cost_ratio, best, peak, config):
    """Returns a row of 8.2."""
    curve = Curve(alpha, cost_ratio, config)
    right, theirs = curve.values[curve.best], curve.values[best]
    agrees = curve.best == best and abs(right - peak) < ROUNDING
    why = ""
    if peak > right + ROUNDING:
        why = f"no draft length reaches {peak}; K = {best} gives {theirs:.3f}"
    elif not agrees:
        why = f"their own formula gives {theirs:.2f} at K = {best}"
    return {
        "draft": draft,
        "alpha": alpha,
        "cost_ratio": cost_ratio,
        "notes": {"num_draft_tokens": best, "speedup": peak},
        "right": {"num_draft_tokens": curve.best, "speedup": right},
        "formula_at_notes_num_draft_tokens": theirs,
        "agrees": agrees,
        "why": why,
    }


def draw(record):
    figure = Figure(figsize=(13, 4.6))
    peaks, rule, sizes = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _draw_peaks(peaks, record["results"]["peaks"])
    _draw_rule(rule, record["results"]["peaks"])
    _draw_sizes(sizes, record["results"]["sizes"])
    return figure


def _draw_peaks(axes, rows):
    longest = max(row["right"]["num_draft_tokens"] for row in rows) + 6
    for row in rows:
        curve, best = row["curve"][: longest + 1], row["right"]["num_draft_tokens"]
        axes.plot(curve, color=common.BLUE, lw=1.2)
        axes.plot(best, curve[best], "o", color=common.BLUE, ms=5)
        axes.plot(*row["notes"].values(), "o", mfc="none", mec=common.ORANGE, ms=9)
        axes.annotate(
            f"{row['alpha']}, {row['cost_ratio']:g}",
            (longest, curve[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        if row["why"]:
            axes.annotate(
                f"K = 0 is 1.00,\nnot {row['notes']['speedup'][1]}",
                (0, row["notes"]["speedup"][1]),
                xytext=(2.4, 0.42),
                arrowprops={"arrowstyle": "-", "color": common.GREY, "shrinkB": 5},
                fontsize=8,
            )
    axes.plot([], [], "-o", color=common.BLUE, ms=5, label="formula, and its best K")
    axes.plot([], [], "o", mfc="none", mec=common.ORANGE, ms=9, label="the notes")
    axes.legend(loc="upper left")
    axes.set(
        title="7.3  Speedup of a draft length (right: alpha, c)",
        xlabel="draft length K, tokens",
        ylabel="speedup over plain decoding",
        xlim=(-1, longest + 4.5),
        ylim=(0, None),
    )


def _draw_rule(axes, rows):
    names = [f"{row['alpha']}, {row['cost_ratio']:g}" for row in rows]
    losses = [100 * row["stop_rule"]["loss"] for row in rows]
    bars = axes.barh(names, losses, color=common.ORANGE, height=0.6)
    axes.bar_label(
        bars,
        [
            f"K {row['stop_rule']['num_draft_tokens']}, best "
            f"{row['right']['num_draft_tokens']}"
            for row in rows
        ],
        padding=4,
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(
        title="7.2  Cost of drafting while alpha^(K+1) c > 1",
        xlabel="speedup lost against the best K, %",
        ylabel="alpha, c",
        xlim=(0, 1.35 * max(losses)),
    )


def _draw_sizes(axes, rows):
    for shift, who, colour in (
        (-0.2, "notes", common.ORANGE),
        (0.2, "right", common.BLUE),
    ):
        heights = [row[who]["speedup"] for row in rows]
        places = [place + shift for place in range(len(rows))]
        label = {"notes": "the notes", "right": "their formula at its best K"}[who]
        bars = axes.bar(places, heights, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{h:.2f}" for h in heights], padding=1, fontsize=7)
    axes.axhline(1, color=common.GREY, lw=0.8)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right")
    axes.set_xticks(
        range(len(rows)),
        [
            f"{row['draft']}\n{row['alpha']}, {row['cost_ratio']:g}\n"
            f"K {row['notes']['num_draft_tokens']} / {row['right']['num_draft_tokens']}"
            for row in rows
        ],
        fontsize=8,
    )
    axes.set(
        title="8.2  Size of the draft",
        xlabel="draft; alpha, c; K of the notes / right",
        ylabel="speedup over plain decoding",
        ylim=(0, 3.1),
    )


EXPERIMENT = common.Experiment(
    "the notes' tables 7.2, 7.3 and 8.2 beside what their own formula gives",
    Config(),
    Config(max_num_draft_tokens=60),
    measure,
    draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

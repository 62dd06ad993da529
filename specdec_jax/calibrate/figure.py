"""The picture of a calibration, from nothing but its JSON."""

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#1f6fb2", "#e07b00", "#8a8a8a"

STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def check_figure(path: Path) -> None:
    """Refuses a figure that could not be written, before anything is measured.

    Raises:
      ValueError: matplotlib is missing, or cannot write a file of that name.
      FileNotFoundError: The folder is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError(
            "a figure needs matplotlib, which is not installed; run "
            "pip install 'specdec-jax[plot]'"
        ) from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(
            f"figure is {str(path)!r}; its name must end in the kind of picture, "
            "such as .png or .svg"
        )
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the figure")


def save_figure(summary: dict[str, Any], path: Path, title: str = "") -> None:
    """Draws a calibration and writes it.

    Args:
      summary: `Calibration.summary()`, or the same read back from JSON.
      path: Its suffix says which kind of picture.
      title: One line above all.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), dpi=130)
        speedup, survival = figure.subplots(1, 2, width_ratios=(1.5, 1))
        draw_speedup(speedup, summary)
        draw_survival(survival, summary)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, color="#555555")
        figure.savefig(path)


def draw_speedup(axes: Any, summary: dict[str, Any]) -> None:
    """Draws the predicted band, the measured points and the chosen length."""
    lengths = [int(k) for k in summary["measured_speedup"]]
    predicted, measured = (
        list(summary[f"{kind}_speedup"].values()) for kind in ("predicted", "measured")
    )
    low, high = zip(*summary["predicted_interval"].values(), strict=True)
    ends = zip(summary["measured_interval"].values(), measured, strict=True)
    bars = zip(
        *((value - ends[0], ends[1] - value) for ends, value in ends), strict=True
    )
    chosen = summary["recommended_num_draft_tokens"]
    best = measured[lengths.index(chosen)]
    axes.axhline(1, color=GREY, lw=1, ls="--")
    axes.fill_between(lengths, low, high, color=BLUE, alpha=0.15, lw=0)
    axes.plot(lengths, predicted, color=BLUE, lw=1.6, label="predicted from the parts")
    axes.errorbar(
        lengths,
        measured,
        [[max(bar, 0) for bar in side] for side in bars],
        fmt="o",
        color=ORANGE,
        ms=5,
        lw=1.2,
        capsize=2.5,
        label="measured",
    )
    name = f"K* = {chosen}: {best:.2f} times" if chosen else "K* = 0: do not speculate"
    axes.plot(chosen, best, "o", ms=13, mfc="none", mec=ORANGE, mew=1.6, label=name)
    axes.legend(loc="best")
    axes.set(
        title="Speedup (bands and bars: 90% over prompts)",
        xlabel="draft length K, tokens",
        ylabel="times as fast as plain decoding",
        xticks=lengths,
        ylim=(0, None),
    )


def draw_survival(axes: Any, summary: dict[str, Any]) -> None:
    """Draws how far drafts survive, beside what a constant alpha would say."""
    survival, alpha = summary["survival"], summary["alpha"]["value"]
    depths = range(1, len(survival) + 1)
    axes.bar(depths, survival, color=BLUE, width=0.7, label="measured, longest draft")
    axes.plot(
        depths,
        [alpha**k for k in depths],
        "o-",
        color=ORANGE,
        ms=3.5,
        lw=1.2,
        label=f"constant alpha = {alpha:.2f}",
    )
    axes.legend(loc="upper right")
    axes.grid(axis="x", visible=False)
    axes.set(
        title="Survival",
        xlabel="depth k, tokens",
        ylabel="chance that k drafts are accepted",
        ylim=(0, 1),
    )
    axes.xaxis.get_major_locator().set_params(integer=True)

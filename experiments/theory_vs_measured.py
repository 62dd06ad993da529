"""How much must a formula know before it predicts the clock?

Five predictions of each draft length's speedup, each knowing one thing more:

    alpha      E[N] of a constant alpha over 1 + K / c (Leviathan et al.)
    verify     the same, with the measured verify factor v(K) in place of 1
    overhead   the same, with the rest of a round's time
    profile    the same, with the survival profile of the longest draft for alpha^k
    own        the same, with each length's own survival

    python experiments/theory_vs_measured.py            the bundled pair, minutes
    python experiments/theory_vs_measured.py --smoke    two tiny models, seconds
"""

from dataclasses import dataclass

import calibrated
import common
import jax.numpy as jnp
from matplotlib.figure import Figure

from specdec_jax import theory
from specdec_jax.calibrate import LENGTHS
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET

MODELS = {
    "alpha": ("constant alpha", common.GREY, ":"),
    "verify": ("and v(K)", common.GREEN, "--"),
    "overhead": ("and overhead", common.GREEN, "-"),
    "profile": ("and the longest draft's survival", common.RED, "-"),
    "own": ("and each length's own survival", common.BLUE, "-"),
}


@dataclass(frozen=True)
class Config:
    """The same prompts at each of the temperatures."""

    target: str = DEFAULT_TARGET
    draft: str = DEFAULT_DRAFT
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 1
    lengths: tuple[int, ...] = LENGTHS
    num_prompts: int = 24
    max_new_tokens: int = 64
    repeats: int = 3


def measure(config):
    cases = [case(config, temperature) for temperature in config.temperatures]
    return {"cases": cases, "summary": [line(one) for one in cases]}


def case(config, temperature):
    found = calibrated.calibration(config, config.batch_size, temperature)
    measured = found["measured_speedup"]
    lengths = [int(k) for k in measured if k != "0"]
    models = {
        name: {str(k): predict(name, found, k) for k in lengths} for name in MODELS
    }
    errors = {
        name: max(abs(value / measured[k] - 1) for k, value in model.items())
        for name, model in models.items()
    }
    return {
        "temperature": temperature,
        "models": models,
        "largest_error": errors,
        **found,
    }


def predict(name, found, k):
    """Returns the speedup of K = `k` as one of the models has it."""
    known = list(MODELS).index(name)
    key, step = str(k), found["step_seconds"]
    survival = theory.constant_survival(found["alpha"]["value"], k)
    if known >= 3:
        survival = jnp.array(found["survival"][:k])
    if known >= 4:
        survival = jnp.array(found["survival_by_length"][key])
    factor = found["verify_factor"][key] if known >= 1 else 1.0
    if known >= 2:
        # v(K) is in passes of the target, the formula's unit is the whole plain step.
        one_pass = step - found["overhead_seconds"]["0"]
        factor = (factor * one_pass + found["overhead_seconds"][key]) / step
    factors = jnp.full((k + 1,), factor)
    return float(theory.speedup(survival, found["cost_ratio"], factors)[k])


def line(one):
    errors = ", ".join(f"{name} {e:.0%}" for name, e in one["largest_error"].items())
    return f"temperature {one['temperature']:g}: largest error by model: {errors}"


def draw(record):
    cases = record["results"]["cases"]
    figure = Figure(figsize=(5.6 * len(cases), 4.4))
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, one in zip(panels, cases, strict=True):
        _draw_case(axes, one)
    return figure


def _draw_case(axes, one):
    measured = {int(k): value for k, value in one["measured_speedup"].items()}
    axes.axhline(1, color=common.GREY, lw=0.8)
    for name, (label, colour, style) in MODELS.items():
        model = one["models"][name]
        axes.plot(
            [0, *map(int, model)],
            [1, *model.values()],
            style,
            color=colour,
            lw=1.5,
            label=f"{label}: off by up to {one['largest_error'][name]:.0%}",
        )
    axes.plot(
        list(measured), list(measured.values()), "o", color=common.ORANGE, label="clock"
    )
    # On white: it may have to lie over the worst of the curves.
    axes.legend(
        loc="best", fontsize=8, frameon=True, facecolor="white", edgecolor="none"
    )
    axes.set(
        title=f"T = {one['temperature']:g}, alpha = {one['alpha']['value']:.2f}, "
        f"c = {one['cost_ratio']:.1f}",
        xlabel="draft length K, tokens",
        ylabel="speedup over plain decoding",
        xticks=list(measured),
        ylim=(0, None),
    )


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config("random", "random", (0.0,), 1, (2,), 2, 8, 1),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

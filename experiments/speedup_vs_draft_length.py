"""How does the speedup depend on the draft length, at what batch and temperature?

Every length is predicted from its parts and measured, by `calibrate`.

    python experiments/speedup_vs_draft_length.py            the bundled pair, minutes
    python experiments/speedup_vs_draft_length.py --smoke    two tiny models, seconds
"""

from dataclasses import dataclass

import calibrated
import common
from matplotlib.figure import Figure

from specdec_jax.calibrate import LENGTHS
from specdec_jax.calibrate.figure import draw_speedup
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET


@dataclass(frozen=True)
class Config:
    """Cases are pairs of batch size and temperature."""

    target: str = DEFAULT_TARGET
    draft: str = DEFAULT_DRAFT
    cases: tuple[tuple[int, float], ...] = ((1, 0.0), (4, 0.0), (1, 1.0))
    lengths: tuple[int, ...] = LENGTHS
    num_prompts: int = 24
    max_new_tokens: int = 64
    repeats: int = 3


def measure(config):
    cases = [
        {
            "batch_size": batch_size,
            "temperature": temperature,
            **calibrated.calibration(config, batch_size, temperature),
        }
        for batch_size, temperature in config.cases
    ]
    return {"cases": cases, "summary": [line(case) for case in cases]}


def line(case):
    measured = case["measured_speedup"]
    gaps = [abs(case["predicted_speedup"][k] / measured[k] - 1) for k in measured]
    return (
        f"batch {case['batch_size']}, temperature {case['temperature']:g}: "
        f"{case['verdict']} Prediction off by at most {max(gaps):.1%}."
    )


def draw(record):
    cases = record["results"]["cases"]
    figure = Figure(figsize=(4.4 * len(cases), 4.2))
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=True):
        draw_speedup(axes, case)
        axes.set(title=f"batch {case['batch_size']}, T = {case['temperature']:g}")
    for axes in panels[1:]:
        axes.set(ylabel="")
    return figure


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config("random", "random", ((1, 0.0),), (2,), 2, 8, 1),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

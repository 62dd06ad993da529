"""How does what is accepted depend on the target's temperature, and on the draft's?

Exactness holds for any draft, so the draft may have a temperature of its own: the
target's, zero, or one. For each the tokens a round are counted on the loop; alpha, the
mean of sum min(p, q) over the target's own text, is measured where both share one.

    python experiments/acceptance_vs_temperature.py            the bundled pair
    python experiments/acceptance_vs_temperature.py --smoke    two tiny models
"""

import dataclasses
from dataclasses import dataclass

import calibrated
import common
import numpy as np
from matplotlib.figure import Figure

from specdec_jax import Sampling
from specdec_jax.benchmark.bootstrap import estimate
from specdec_jax.calibrate.overlap import overlaps
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET

DRAFTS = {
    "same": ("the target's", common.BLUE),
    "greedy": ("0", common.ORANGE),
    "one": ("1", common.GREY),
}
"""Temperatures of the draft: how they are called, and drawn."""


@dataclass(frozen=True)
class Config:
    """The same prompts at each of the temperatures."""

    target: str = DEFAULT_TARGET
    draft: str = DEFAULT_DRAFT
    temperatures: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
    num_draft_tokens: int = 4
    num_prompts: int = 24
    repeats: int = 4
    max_new_tokens: int = 64


def measure(config):
    decoder, prompts = calibrated.pair(config, num_draft_tokens=config.num_draft_tokens)
    prompts = prompts * config.repeats
    points = [_point(config, decoder, prompts, t) for t in config.temperatures]
    return {"points": points, "summary": [_line(one) for one in points]}


def _point(config, decoder, prompts, temperature):
    sampling = Sampling(temperature=temperature)
    plan = decoder.plan(
        prompts, max_new_tokens=config.max_new_tokens, sampling=sampling
    )
    number = len(prompts) // config.repeats
    alpha = overlaps(
        decoder.engine, plan, num_prompts=number, batch_size=len(prompts)
    ).alpha()
    lengths = {}
    for name, other in (("same", temperature), ("greedy", 0.0), ("one", 1.0)):
        results = decoder.generate(
            prompts,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            draft_sampling=dataclasses.replace(sampling, temperature=other),
        )
        lengths[name] = _tokens_a_round(results, number)
    return {
        "temperature": temperature,
        "alpha": alpha._asdict(),
        "mean_acceptance_length": lengths,
    }


def _tokens_a_round(results, number):
    """Returns the mean over all rounds, and its bootstrap interval over prompts."""
    tokens, rounds = np.zeros(number), np.zeros(number)
    for result in results:
        tokens[result.index % number] += result.num_tokens
        rounds[result.index % number] += result.rounds
    mean = estimate(lambda weights: weights @ tokens / (weights @ rounds), number)
    return mean._asdict()


def _line(one):
    lengths = ", ".join(
        f"draft at {label} {one['mean_acceptance_length'][name]['value']:.2f}"
        for name, (label, _) in DRAFTS.items()
    )
    return (
        f"T = {one['temperature']:g}: alpha {one['alpha']['value']:.3f}; "
        f"tokens a round: {lengths}"
    )


def draw(record):
    points = record["results"]["points"]
    figure = Figure(figsize=(9.6, 3.9))
    left, right = figure.subplots(1, 2)
    temperatures = [one["temperature"] for one in points]
    alphas = [one["alpha"] for one in points]
    _band(left, temperatures, alphas, common.BLUE, None)
    left.set(
        title="alpha: mean of sum min(p, q), one temperature for both",
        xlabel="temperature",
        ylabel="alpha",
        ylim=(0, 1),
    )
    for name, (label, colour) in DRAFTS.items():
        lengths = [one["mean_acceptance_length"][name] for one in points]
        _band(right, temperatures, lengths, colour, f"draft at {label}")
    right.axhline(1, color=common.GREY, lw=0.8)
    right.set(
        title=f"tokens a round, K = {record['config']['num_draft_tokens']}",
        xlabel="the target's temperature",
        ylabel="mean acceptance length",
        ylim=(0.9, None),
    )
    right.legend()
    return figure


def _band(axes, x, estimates, colour, label):
    low, value, high = (
        [one[name] for one in estimates] for name in ("low", "value", "high")
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    axes.plot(x, value, "o-", color=colour, ms=4, label=label)


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config("random", "random", (1.0,), 2, 2, 1, 8),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

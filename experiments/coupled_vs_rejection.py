"""What does coupling cost against rejection sampling?

Rejection sampling accepts a draft with probability 1 - D, where D is the total
variation of p and q: no lossless rule accepts a single draft more often. Coupled
decoding draws both tokens with the same Gumbel noise, so that its text does not depend
on the draft; it accepts with probability

    sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x))

which lies between (1 - D) / (1 + D) and 1 - D (Daliri, Musco and Suresh,
arXiv:2408.07978). Both are worked out at contexts of the target's own text, and counted
on the loop.

    python experiments/coupled_vs_rejection.py            the bundled pair
    python experiments/coupled_vs_rejection.py --smoke    two tiny models
"""

from dataclasses import dataclass

import calibrated
import common
import numpy as np
from matplotlib.figure import Figure

from specdec_jax import Sampling
from specdec_jax.acceptance import RULES
from specdec_jax.audit import Subject
from specdec_jax.audit.rounds import first_laws
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET

NAMES = {"rejection": common.BLUE, "coupled": common.ORANGE}


@dataclass(frozen=True)
class Config:
    """Prompts, and how many contexts of each text are looked at."""

    target: str = DEFAULT_TARGET
    draft: str = DEFAULT_DRAFT
    temperatures: tuple[float, ...] = (0.5, 1.0)
    num_draft_tokens: int = 4
    num_prompts: int = 24
    repeats: int = 2
    max_new_tokens: int = 64
    contexts_each: int = 8


def measure(config):
    decoder, prompts = calibrated.pair(config, num_draft_tokens=config.num_draft_tokens)
    cases = [_case(config, decoder, prompts, t) for t in config.temperatures]
    return {"cases": cases, "summary": [_line(one) for one in cases]}


def _case(config, decoder, prompts, temperature):
    sampling = Sampling(temperature=temperature)
    loops, texts = {}, []
    engine = decoder.engine
    for name in NAMES:
        decoder.engine = engine._replace(rule=RULES[name])
        texts = decoder.generate(
            prompts * config.repeats,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            trace=True,
        )
        loops[name] = _counted(texts)
    contexts = _contexts(config, texts[: len(prompts)])
    distance, coupled = _laws(decoder, sampling, contexts)
    bound = (1 - distance) / (1 + distance)
    return {
        "temperature": temperature,
        "distance": distance.tolist(),
        "coupled": coupled.tolist(),
        "mean": {
            "rejection": float((1 - distance).mean()),
            "coupled": float(coupled.mean()),
            "bound": float(bound.mean()),
        },
        "outside": int(
            ((coupled < bound - 1e-5) | (coupled > 1 - distance + 1e-5)).sum()
        ),
        "loop": loops,
    }


def _counted(results):
    """Returns the share of rounds whose first draft was kept, and tokens a round.

    Its standard error treats texts, not rounds, as independent.
    """
    kept = np.array([int(one.trace.accepted[:, 0].sum()) for one in results])
    tried = np.array([int(one.trace.judged[:, 0].sum()) for one in results])
    rate = kept.sum() / tried.sum()
    spread = np.sqrt(((kept - rate * tried) ** 2).sum()) / tried.sum()
    tokens = sum(one.num_tokens for one in results)
    return {
        "first_draft_kept": float(rate),
        "standard_error": float(spread),
        "mean_acceptance_length": tokens / sum(one.rounds for one in results),
        "rounds": int(tried.sum()),
    }


def _contexts(config, results):
    """Returns beginnings of the texts, evenly spaced."""
    contexts = []
    for one in results:
        ends = np.linspace(0, max(one.num_tokens - 1, 0), config.contexts_each)
        tokens = one.prompt_token_ids + one.token_ids
        start = len(one.prompt_token_ids)
        contexts += [tokens[: start + int(end)] for end in ends]
    return contexts


def _laws(decoder, sampling, contexts):
    """Returns the distance and the coupled acceptance at each context."""
    found = []
    for laws in zip(*first_laws(Subject.of(decoder), contexts, sampling), strict=True):
        p, q = (np.asarray(law, np.float64) for law in laws)
        p, q = p / p.sum(), q / q.sum()
        found.append((np.abs(p - q).sum() / 2, coupled_acceptance(p, q)))
    distance, coupled = np.array(found).T
    return distance, coupled


def coupled_acceptance(p, q):
    """Returns the probability that both laws draw the same token from shared Gumbels.

    `argmax(log p + G) = argmax(log q + G) = x` where G_x beats both competitors, which
    has probability 1 / sum_y max(p(y) / p(x), q(y) / q(x)). With tokens in order of
    p / q the sum falls into a part of p's and a part of q's.
    """
    shared = (p > 0) & (q > 0)
    ratio = np.where(q > 0, p / np.where(q > 0, q, 1), np.inf)
    order = np.argsort(ratio)
    # q(y) / q(x) is the larger one where y's ratio is at most x's.
    q_below = np.cumsum(q[order])
    p_above = 1 - np.cumsum(p[order])
    p, q, shared = p[order], q[order], shared[order]
    share = q_below[shared] / q[shared] + np.maximum(p_above[shared], 0) / p[shared]
    return float((1 / share).sum())


def _line(one):
    mean, loop = one["mean"], one["loop"]
    counted = "; ".join(
        f"{name} {mean[name]:.3f}, counted {loop[name]['first_draft_kept']:.3f} +- "
        f"{loop[name]['standard_error']:.3f}, "
        f"{loop[name]['mean_acceptance_length']:.2f} tokens a round"
        for name in NAMES
    )
    return (
        f"T = {one['temperature']:g}: {counted}; bound {mean['bound']:.3f}, "
        f"{one['outside']} contexts outside"
    )


def draw(record):
    cases = record["results"]["cases"]
    figure = Figure(figsize=(4.3 * len(cases), 4.1))
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    grid = np.linspace(0, 1, 101)
    for axes, one in zip(panels, cases, strict=True):
        axes.plot(grid, 1 - grid, color=common.BLUE, label="rejection: 1 - D")
        axes.plot(
            grid, (1 - grid) / (1 + grid), "--", color=common.GREY,
            label="bound: (1 - D) / (1 + D)",
        )  # fmt: skip
        axes.plot(
            one["distance"], one["coupled"], ".", ms=4, color=common.ORANGE,
            label="coupled, exact",
        )  # fmt: skip
        loop = one["loop"]
        lengths = [f"{loop[name]['mean_acceptance_length']:.2f}" for name in NAMES]
        axes.set(
            title=f"T = {one['temperature']:g}: {lengths[0]} tokens a round by "
            f"rejection,\n{lengths[1]} coupled",
            xlabel="total variation D of p and q",
        )
    panels[0].set_ylabel("probability that a draft is accepted")
    panels[0].legend(loc="lower left", fontsize=8)
    return figure


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config("random", "random", (1.0,), 2, 2, 1, 8, 2),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

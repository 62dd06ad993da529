"""Does the library's own rule do what the notes' worked examples say it does?

Section 9 and exercise 2 of the notes: one round of three drafts with given coins,
judged by `acceptance.Rejection`. The law of N of that very rule, exact and over many
rounds with coins of its own, stands beside the formula.

    python experiments/worked_example.py            to results/worked_example.{json,png}
    python experiments/worked_example.py --smoke    few rounds
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from specdec_jax import theory
from specdec_jax.acceptance import Rejection
from specdec_jax.acceptance.rejection import log_accept, residual
from specdec_jax.base import Draft
from specdec_jax.rng import ACCEPT, RoundNoise, request_keys


@dataclass(frozen=True)
class Example:
    """One round of the notes: laws, drafted tokens, coins; and what they find.

    Attributes:
      coins: The notes give no second coin, whose token is accepted whatever it is (.99
        shows it), and exercise 2 says of the third only that it is above .667.
    """

    name: str
    tokens: str
    target: tuple[float, ...]
    draft: tuple[float, ...]
    drafted: str
    coins: tuple[float, ...]
    cost_ratio: float
    emitted: str
    expected_tokens: float
    speedup: float


SECTION_9 = Example(
    name="section 9",
    tokens="ABCDE",
    target=(0.30, 0.35, 0.20, 0.10, 0.05),
    draft=(0.50, 0.20, 0.15, 0.10, 0.05),
    drafted="ABA",
    coins=(0.35, 0.99, 0.80),
    cost_ratio=10.0,
    emitted="ABB",
    expected_tokens=2.952,
    speedup=2.27,
)
EXERCISE_2 = Example(
    name="exercise 2",
    tokens="ABC",
    target=(0.4, 0.5, 0.1),
    draft=(0.6, 0.3, 0.1),
    drafted="ABA",
    coins=(0.30, 0.99, 0.80),
    cost_ratio=8.0,
    emitted="ABB",
    expected_tokens=2.952,
    speedup=2.15,
)


@dataclass(frozen=True)
class Config:
    """The examples, and how many rounds are drawn of each."""

    examples: tuple[Example, ...] = (SECTION_9, EXERCISE_2)
    rounds: int = 200_000
    seed: int = 0


class GivenCoins(NamedTuple):
    """Noise of the rule that was decided beforehand."""

    coins: Any

    def uniform(self, offset):
        """Returns the given coin of that draft."""
        return self.coins[offset]

    def gumbel(self, offset, vocab_size):
        """Returns 0, so that the likeliest token is drawn."""
        return jnp.zeros(vocab_size)

    def child(self, index, shift=0):
        """Returns itself; nothing is nested here."""
        return self


def measure(config):
    with jax.enable_x64(True):
        examples = [_example(example, config) for example in config.examples]
    return {"examples": examples, "summary": [_line(one) for one in examples]}


def _example(example, config):
    target, draft = jnp.log(jnp.array([example.target, example.draft]))
    num_draft_tokens = len(example.drafted)
    alpha = float(jnp.exp(jnp.minimum(target, draft)).sum())
    survival = theory.constant_survival(alpha, num_draft_tokens)
    left = jnp.exp(residual(target, draft))
    simulated = _simulated_law(target, draft, num_draft_tokens, config)
    tokens = np.arange(1, num_draft_tokens + 2)
    spread = np.sqrt(simulated @ tokens**2 - (simulated @ tokens) ** 2)
    return {
        "name": example.name,
        "alpha": alpha,
        "residual": dict(
            zip(example.tokens, (left / left.sum()).tolist(), strict=True)
        ),
        **_trace(example, target, draft),
        "expected_tokens": float(theory.expected_tokens(survival)[-1]),
        "speedup": float(theory.speedup(survival, example.cost_ratio)[-1]),
        "law": {
            "formula": theory.law(survival).tolist(),
            "rule": _exact_law(target, draft, num_draft_tokens).tolist(),
            "simulated": simulated.tolist(),
        },
        "simulated_tokens": float(simulated @ tokens),
        "standard_error": float(spread / np.sqrt(config.rounds)),
        "notes": {
            "emitted": example.emitted,
            "expected_tokens": example.expected_tokens,
            "speedup": example.speedup,
        },
    }


def _trace(example, target, draft):
    """Returns what the rule decides with the given coins, position by position."""
    tokens = jnp.array([example.tokens.index(token) for token in example.drafted])
    coins = jnp.array(example.coins)
    drafted, rows = _rows(tokens, target, draft)
    verdict = jax.jit(Rejection())(GivenCoins(coins), drafted, rows)
    ratio = jnp.exp(log_accept(drafted, rows)).tolist()
    num_accepted = int(verdict.num_accepted)
    steps = [
        {"token": token, "ratio": ratio[i], "coin": example.coins[i]}
        | {"accepted": i < num_accepted}
        for i, token in enumerate(example.drafted[: num_accepted + 1])
    ]
    following = example.tokens[int(verdict.next_token)]
    return {
        "steps": steps,
        "emitted": example.drafted[:num_accepted] + following,
        "num_emitted": num_accepted + 1,
    }


def _rows(tokens, target, draft):
    """Returns the draft and the target's rows, the same law at every position."""
    length = len(tokens)
    return (
        Draft(
            tokens, jnp.array(length), jnp.broadcast_to(draft, (length, *draft.shape))
        ),
        jnp.broadcast_to(target, (length + 1, *target.shape)),
    )


def _exact_law(target, draft, num_draft_tokens):
    """Returns the law of N of the rule, summed over every possible draft."""
    axes = [jnp.arange(len(target))] * num_draft_tokens
    drafts = jnp.stack(jnp.meshgrid(*axes), axis=-1).reshape(-1, num_draft_tokens)

    @jax.jit
    @jax.vmap
    def stop(tokens):
        return Rejection().law(*_rows(tokens, target, draft))[0]

    return jnp.exp(draft[drafts].sum(axis=1)) @ stop(drafts)


def _simulated_law(target, draft, num_draft_tokens, config):
    """Returns how often rounds with their own coins emitted each number of tokens."""
    key_draft, key_rounds = jax.random.split(jax.random.key(config.seed))
    shape = (config.rounds, num_draft_tokens)
    tokens = jax.random.categorical(key_draft, draft, shape=shape)
    keys = request_keys(key_rounds, config.rounds)
    noise = RoundNoise.at(keys, jnp.zeros(config.rounds, jnp.int32), ACCEPT)

    @jax.jit
    @jax.vmap
    def accepted(noise, tokens):
        return Rejection()(noise, *_rows(tokens, target, draft)).num_accepted

    counts = np.bincount(accepted(noise, tokens), minlength=num_draft_tokens + 1)
    return counts / config.rounds


def _line(one):
    return (
        f"{one['name']}: emits {', '.join(one['emitted'])} (N = {one['num_emitted']}); "
        f"E[N] {one['expected_tokens']:.3f}, speedup {one['speedup']:.2f}; "
        f"{one['simulated_tokens']:.3f} tokens a round measured "
        f"(standard error {one['standard_error']:.4f})"
    )


def draw(record):
    examples = record["results"]["examples"]
    figure = Figure(figsize=(13, 4.2))
    *traces, law = figure.subplots(1, len(examples) + 1)
    for axes, one in zip(traces, examples, strict=True):
        _draw_trace(axes, one)
    _draw_law(law, examples, record["config"]["rounds"])
    return figure


def _draw_trace(axes, one):
    for i, step in enumerate(one["steps"]):
        chance = min(step["ratio"], 1)
        accepted = step["accepted"]
        colour = common.GREEN if accepted else common.RED
        axes.bar(i, chance, 0.55, color=colour, alpha=0.25)
        axes.plot([i - 0.275, i + 0.275], [chance] * 2, color=colour, lw=2)
        axes.plot(i, step["coin"], "D", color=colour, ms=6)
        axes.text(i, step["coin"] - 0.09, f"coin {step['coin']:.2f}", ha="center")
        what = "accepted" if accepted else f"rejected,\n{one['emitted'][i]} instead"
        axes.text(
            i, 1.04, f"p/q = {step['ratio']:.3f}\n{what}", ha="center", color=colour
        )
    axes.grid(axis="x", visible=False)
    axes.set_xticks(
        range(len(one["steps"])),
        [f"draft {i + 1}: {step['token']}" for i, step in enumerate(one["steps"])],
    )
    axes.set(
        title=f"{one['name']}: {' '.join(one['emitted'])};  E[N] "
        f"{one['expected_tokens']:.3f}, speedup {one['speedup']:.2f}",
        ylabel="chance of acceptance, min(1, p/q)",
        ylim=(0, 1.32),
        yticks=(0, 0.25, 0.5, 0.75, 1),
        xlim=(-0.6, len(one["steps"]) - 0.4),
    )


def _draw_law(axes, examples, rounds):
    formula = examples[0]["law"]["formula"]
    tokens = range(1, len(formula) + 1)
    axes.bar(tokens, formula, 0.6, color=common.BLUE, alpha=0.3, label="formula")
    for shift, marker, one in zip((-0.12, 0.12), "os", examples, strict=True):
        axes.plot(
            [n + shift for n in tokens],
            one["law"]["simulated"],
            marker,
            color=common.ORANGE,
            mfc="none",
            ms=7,
            label=f"{one['name']}, {rounds:,} rounds",
        )
    mean = examples[0]["expected_tokens"]
    axes.vlines(mean, 0, 1.02 * max(formula), color=common.GREY, ls="--", lw=1)
    axes.text(mean - 0.06, max(formula), f"E[N] = {mean:.3f}", ha="right")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")
    axes.set(
        title=f"Law of N at alpha {examples[0]['alpha']:.1f}, in both examples",
        xlabel="tokens a round, N",
        ylabel="probability",
        xticks=list(tokens),
        ylim=(0, 1.45 * max(formula)),
    )


EXPERIMENT = common.Experiment(
    "the notes' worked examples, traced by the library's own rejection rule",
    Config(),
    Config(rounds=500),
    measure,
    draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

"""Does the text keep the target's law, and which shortcuts lose it, by how much?

Exercise 6 of the notes: V = 10, K = 3, 50,000 rounds of the compiled loop, each with
the same two laws p and q. The law of the first token of a round is held against p, the
number of tokens N of a round against theory. Then the shortcuts of the notes' section
11.1, planted one at a time: what each does to that law by the sum over all drafts, and
what 50,000 rounds showed. Greedy decoding is compared token by token.

    python experiments/lossless.py            to results/lossless.{json,png}
    python experiments/lossless.py --smoke    few rounds
"""

from dataclasses import dataclass
from functools import partial

import common
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import chisquare

from specdec_jax import decode, theory, trace
from specdec_jax.acceptance import Rejection
from specdec_jax.audit.planted import rules
from specdec_jax.audit.planted.rules import Chain
from specdec_jax.audit.table import TableModel, table
from specdec_jax.base import Draft, Params
from specdec_jax.drafters import ModelDrafter, NoDrafter
from specdec_jax.sampling import Sampling

DETECTED = 1e-3
"""Level of a test, over the six arms together."""


@dataclass(frozen=True)
class Config:
    """A round's size, and how many rounds are run in how many rows.

    Attributes:
      nearness: Weight of the target's logits in the draft's.
    """

    vocab_size: int = 10
    num_draft_tokens: int = 3
    rows: int = 500
    rounds: int = 100
    nearness: float = 0.45
    seed: int = 0


def discarded(draft, target, slot):
    """What follows a rejection if nothing is drawn there: the next accepted draft.

    With the same laws in every round, that has the law min(p, q) / alpha.
    """
    return jnp.minimum(target[slot], draft.log_probs[slot])


ARMS = {
    "exact": (Rejection(), "the rule as it is"),
    "first token unconditional": (
        Chain(hear=rules.first_is_right),
        "the first draft is kept without a test",
    ),
    "policy told truly": (
        Rejection(),
        "the draft is drawn at temperature 0.5, and the rule told so",
    ),
    "policy told falsely": (
        Chain(hear=rules.draft_softer),
        "the rule believes the draft to be softer than it is",
    ),
    "argmax verification": (
        Chain(log_ratio=rules.argmax_only),
        "a draft is kept if it is the target's likeliest token",
    ),
    "no resampling": (
        Chain(corrected=discarded),
        "a rejected token is dropped and the next round drafts again",
    ),
}
LOSSLESS = ("exact", "policy told truly")


def measure(config):
    target, params = _models(config)
    arms = [_arm(name, config, target, params) for name in ARMS]
    greedy = _greedy(config)
    return {
        "arms": arms,
        "greedy": greedy,
        "summary": [*map(_line, arms), _greedy_line(greedy)],
    }


def _models(config):
    """Returns a table model, and two tables that say the same in every context."""
    keys = jax.random.split(jax.random.key(config.seed))
    p, other = (jax.random.normal(key, (config.vocab_size,)) for key in keys)
    q = config.nearness * p + (1 - config.nearness) * other
    target = TableModel(config.vocab_size)
    like = table(keys[0], config.vocab_size)
    return target, Params(
        *(
            jax.tree.map(lambda leaf, r=row: jnp.broadcast_to(r, leaf.shape), like)
            for row in (p, q)
        )
    )


def _arm(name, config, target, params):
    """Returns what the rounds of one arm showed, beside what was to be expected."""
    rule, meaning = ARMS[name]
    cold = name == "policy told truly"
    p, q = (
        np.asarray(
            jax.nn.softmax(leaf["params"]["table"][0, 0] / temperature), np.float64
        )
        for leaf, temperature in zip(params, (1.0, 0.5 if cold else 1.0), strict=True)
    )
    tokens, lengths = _rounds(config, rule, target, params, cold)
    counts = np.bincount(tokens, minlength=config.vocab_size)
    law = counts / counts.sum()
    exact, exact_lengths = _exact(rule, p, q, config.num_draft_tokens)
    # Where a fault gives too much; where the draft would, if nothing is wrong.
    too_many = (q if name in LOSSLESS else exact) > p
    share = p[too_many].sum()
    lengths = np.bincount(lengths, minlength=config.num_draft_tokens + 2)[1:]
    expected = theory.law(
        theory.constant_survival(np.minimum(p, q).sum(), config.num_draft_tokens)
    )
    sizes = np.arange(1, config.num_draft_tokens + 2)
    mean, p_value = sizes @ lengths / lengths.sum(), _p_value(counts, p)
    return {
        "name": name,
        "meaning": meaning,
        "lossless": name in LOSSLESS,
        "alpha": float(np.minimum(p, q).sum()),
        "target": p.tolist(),
        "draft": q.tolist(),
        "law": law.tolist(),
        "exact_law": exact.tolist(),
        "bias": {
            "exact": float(np.abs(exact - p).sum() / 2),
            "measured": float(law[too_many].sum() - share),
            "standard_error": float(np.sqrt(share * (1 - share) / counts.sum())),
        },
        "divergence": float((law * np.log(np.maximum(law, 1e-12) / p)).sum()),
        "p_value": p_value,
        "detected": bool(p_value < DETECTED / len(ARMS)),
        "rounds": int(counts.sum()),
        "length": {
            "law": (lengths / lengths.sum()).tolist(),
            "rule": exact_lengths.tolist(),
            "theory": expected.tolist(),
            "mean": float(mean),
            "theory_mean": float(sizes @ np.asarray(expected)),
            "standard_error": float(
                np.sqrt((sizes**2 @ lengths / lengths.sum() - mean**2) / lengths.sum())
            ),
            "p_value": _p_value(lengths, np.asarray(exact_lengths)),
        },
    }


def _rounds(config, rule, target, params, cold):
    """Returns the first token and the number of tokens of each round of the loop."""
    drafter = ModelDrafter(target, config.num_draft_tokens)
    parts = {"target": target, "drafter": drafter}
    state = decode.init(
        params,
        jax.random.key(config.seed + 1),
        jnp.zeros((config.rows, 1), jnp.int32),
        jnp.ones(config.rows, jnp.int32),
        # Room for the longest rounds: none is cut short.
        max_new_tokens=config.rounds * (drafter.depth + 1) + drafter.depth,
        sampling=Sampling(temperature=1.0),
        draft_sampling=Sampling(temperature=0.5) if cold else None,
        **parts,
    )
    run = jax.jit(partial(trace.run, rule=rule, num_rounds=config.rounds, **parts))
    state, rounds = run(params, state)
    tokens = np.asarray(state.tokens)
    first = np.take_along_axis(tokens, np.asarray(rounds.start), axis=1)
    return first.ravel(), np.asarray(rounds.num_emitted).ravel()


def _exact(rule, p, q, num_draft_tokens):
    """Returns the laws of the first token and of N, summed over every draft."""
    with jax.enable_x64(True):
        log_p, log_q = jnp.log(p), jnp.log(q)
        axes = [jnp.arange(len(p), dtype=jnp.int32)] * num_draft_tokens
        drafts = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
        drafts = drafts.reshape(-1, num_draft_tokens)
        rows = jnp.broadcast_to(log_p, (num_draft_tokens + 1, len(p)))
        laws = jnp.broadcast_to(log_q, (num_draft_tokens, len(p)))
        size = jnp.array(num_draft_tokens, jnp.int32)
        stop, following = jax.vmap(
            lambda tokens: rule.law(Draft(tokens, size, laws), rows)
        )(drafts)
        weight = jnp.exp(log_q[drafts].sum(axis=1))
        kept = weight * (1 - stop[:, 0])
        first = jnp.zeros(len(p)).at[drafts[:, 0]].add(kept)
        first += (weight * stop[:, 0]) @ following[:, 0]
        return np.asarray(first), np.asarray(weight @ stop)


def _p_value(counts, law):
    """Returns the p-value of a chi-squared test; cells are large enough here."""
    possible = law > 1e-12
    if counts[~possible].any():
        return 0.0
    if possible.sum() < 2:
        return 1.0
    expected = law[possible] / law[possible].sum() * counts.sum()
    return float(chisquare(counts[possible], expected).pvalue)


def _greedy(config):
    """Decodes greedily on a table whose rows depend on the context, both ways."""
    target = TableModel(config.vocab_size)
    keys = jax.random.split(jax.random.key(config.seed + 2))
    tables = [table(key, config.vocab_size) for key in keys]
    near = jax.tree.map(
        lambda a, b: config.nearness * a + (1 - config.nearness) * b, *tables
    )
    params = Params(tables[0], near)
    texts, rounds = [], 0
    for drafter in (NoDrafter(), ModelDrafter(target, config.num_draft_tokens)):
        generate = jax.jit(
            partial(
                decode.generate,
                target=target,
                drafter=drafter,
                rule=Rejection(),
                max_new_tokens=2 * config.rounds,
            )
        )
        prompts = jnp.arange(config.rows, dtype=jnp.int32)[:, None]
        prompts = prompts // jnp.array([[1, 10, 100]], jnp.int32) % config.vocab_size
        lengths = jnp.full(config.rows, 3, jnp.int32)
        state = generate(params, jax.random.key(0), prompts, lengths)
        texts.append(np.asarray(state.tokens)[:, : 3 + 2 * config.rounds])
        rounds = int(state.counts.rounds.sum())
    return {
        "rows": config.rows,
        "tokens": int(texts[0][:, 3:].size),
        "different_tokens": int((texts[0] != texts[1]).sum()),
        "rounds": rounds,
        "mean_tokens": float(texts[0][:, 3:].size / rounds),
    }


def _line(one):
    bias, length = one["bias"], one["length"]
    verdict = "not p" if one["detected"] else "p"
    return (
        f"{one['name']}: bias {bias['measured']:.4f} +- {bias['standard_error']:.4f} "
        f"(exact {bias['exact']:.4f}), p-value {one['p_value']:.2g}: {verdict}; "
        f"tokens a round {length['mean']:.3f}, theory {length['theory_mean']:.3f}"
    )


def _greedy_line(one):
    return (
        f"greedy: {one['different_tokens']} of {one['tokens']} tokens differ from "
        f"plain decoding, {one['mean_tokens']:.2f} tokens a round"
    )


def draw(record):
    arms = record["results"]["arms"]
    figure = Figure(figsize=(12, 6.4))
    panels = figure.subplots(2, len(arms) // 2)
    for axes, one in zip(panels.T.ravel(), _in_order(arms), strict=True):
        _draw_arm(axes, one)
    panels[0, 0].legend(loc="upper center", fontsize=8)
    return figure


def _in_order(arms):
    """Returns the right arms first, so that they share the first column."""
    return sorted(arms, key=lambda one: not one["lossless"])


def _draw_arm(axes, one):
    places = np.arange(len(one["target"]))
    colour = common.BLUE if one["lossless"] else common.RED
    axes.bar(places, one["law"], 0.7, color=colour, alpha=0.75, label="measured")
    axes.plot(places, one["target"], "_", ms=17, mew=2, color="black", label="target p")
    axes.plot(places, one["exact_law"], "o", ms=4, color=common.ORANGE, label="exact")
    bias = one["bias"]
    axes.set(
        title=f"{one['name']}\nbias {bias['measured']:.4f}, exact {bias['exact']:.4f}",
        xticks=places,
        xlabel="first token of a round",
    )


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config(vocab_size=4, num_draft_tokens=2, rows=50, rounds=10),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

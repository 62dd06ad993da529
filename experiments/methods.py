"""Which draft and which rule pays, on the same target, prompts and machine?

Each method is measured against plain decoding in turns: tokens a round, what a round
costs in plain steps, speedup; greedy and at temperature 1. Where a method has several
lengths, the fastest is taken, and trees are grown by `calibrate`: both at the
temperature in question, on prompts that nothing is measured on. Beside them:

*   what block verification gains over token-wise, as measured, and as the exact laws of
    both rules say on the very same drafts (Sun et al., arXiv:2403.10444);
*   two drafts that share a round's tokens, in both orders: the cost is the same, and
    the stronger one should go first (arXiv:2312.11462).

    python experiments/methods.py            both targets, about fifty minutes
    python experiments/methods.py --smoke    one method of the bundled target
"""

import sysconfig
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from specdec_jax import Sampling, SpeculativeDecoder, compilation, decode
from specdec_jax.acceptance import RULES, MultiDraft
from specdec_jax.benchmark import alternate, timed
from specdec_jax.benchmark.timing import Costs, speedup, speedup_interval
from specdec_jax.benchmark.units import batches, run_rounds
from specdec_jax.calibrate import calibrate
from specdec_jax.cli.prompts import bundled_prompts, contents, read_all
from specdec_jax.drafters import NoDrafter

FOLDER = common.RESULTS.parent


@dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
      targets: Names in `METHODS`.
      only: Methods that are measured; none means all.
      temperatures: 0 is greedy.
      num_prompts: Prompts measured on, at the most.
      num_choosing: Others, on which a method's length or tree is chosen.
      tree_sizes: Numbers of nodes that trees are tried with.
      max_new_tokens: Budget of a prompt.
      repeats: Timed turns of each arm.
      lengths: Draft lengths at which block verification is compared by law.
      law_rounds: Rounds of it.
    """

    targets: tuple[str, ...] = ("pystd-5m", "smollm2-135m")
    only: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 12
    num_choosing: int = 8
    tree_sizes: tuple[int, ...] = (3, 4, 6, 8)
    max_new_tokens: int = 48
    repeats: int = 2
    lengths: tuple[int, ...] = (4, 8)
    law_rounds: int = 40


def chain(draft: Any, lengths: Any, rule: str = "rejection", **options: Any) -> Any:
    """Returns the variants of one method, a dict of options each."""
    return [
        {"draft": draft, "num_draft_tokens": length, "rule": rule, **options}
        for length in lengths
    ]


def tree(draft: Any, rule: Any) -> Any:
    """Returns the tree from which those to try are grown; see `calibrate.trees`."""
    return [{"draft": draft, "branching": (3, 2, 1), "rule": rule}]


CORPUS = ("argparse.py", "inspect.py", "subprocess.py", "tarfile.py", "typing.py")
"""Modules of the standard library that tables are counted on."""

LENGTHS = (2, 4, 6)
"""Draft lengths that a trained draft is tried with."""

SMALL = "pystd-draft"
LOWER = "smollm2-135m:layers=8"
METHODS: dict[str, dict[str, Any]] = {
    "pystd-5m": {
        "chain": chain(SMALL, LENGTHS),
        "block": chain(SMALL, LENGTHS, "block"),
        "coupled": chain(SMALL, (4,), "coupled"),
        "staged, strong first": chain((SMALL, "bigram"), ([2, 2],), compose="staged"),
        "staged, weak first": chain(("bigram", SMALL), ([2, 2],), compose="staged"),
        "nested over n-grams": chain((SMALL, "ngram"), LENGTHS, compose="nested"),
        "nested over bigrams": chain((SMALL, "bigram"), LENGTHS, compose="nested"),
        "tree": tree(SMALL, "multi_draft"),
        "multi-draft": tree(SMALL, MultiDraft("independent")),
        "early exit": chain("early_exit:layers=5", (2, 4)),
        "n-grams": chain("ngram", (4, 8)),
        "n-gram counts": chain("ngram_counts", (2, 4)),
        "bigram": chain("bigram", (2, 4)),
        "unigram": chain("unigram", (1,)),
    },
    "smollm2-135m": {
        "chain": chain(LOWER, (2,)),
        "block": chain(LOWER, (2,), "block"),
        # On texts that repeat their prompt the n-grams are the stronger draft.
        "staged, strong first": chain(("ngram", LOWER), ([4, 1],), compose="staged"),
        "staged, weak first": chain((LOWER, "ngram"), ([1, 4],), compose="staged"),
        "nested over n-grams": chain((LOWER, "ngram"), (4,), compose="nested"),
        "tree": tree(LOWER, "multi_draft"),
        "early exit": chain("early_exit:layers=8", (2,)),
        "n-grams": chain("ngram", (4, 8)),
        "n-gram counts": chain("ngram_counts", (2, 4)),
    },
}
"""Methods of each target by name: variants, of which one is chosen."""


def measure(config):
    """Returns what was found, by target and temperature."""
    compilation.enable_compilation_cache()
    found: dict[str, Any] = {}
    for target in config.targets:
        methods = METHODS[target]
        names = config.only or tuple(methods)
        found[target] = {
            f"T = {temperature:g}": {
                name: _method(config, target, name, methods[name], temperature)
                for name in names
            }
            for temperature in config.temperatures
        }
    laws = {f"K = {length}": _law_gain(config, length) for length in config.lengths}
    return {"methods": found, "block": laws, "summary": _summary(found, laws)}


def _entries(config, target):
    """Returns prompts to choose by and prompts to measure on."""
    if target == "pystd-5m":
        entries = read_all(bundled_prompts(), None)
        choosing, measuring, chat = entries[1::2], entries[::2], False
    else:
        choosing = read_all(FOLDER / "choosing_prompts.jsonl", None)
        measuring, chat = read_all(FOLDER / "rewrite_prompts.jsonl", None), True
    return choosing[: config.num_choosing], measuring[: config.num_prompts], chat


def _decoder(target, variant):
    """Loads a target and a variant; tables are counted on the corpus."""
    jax.clear_caches()  # programs of all methods would fill the process's memory map
    drafts = variant["draft"]
    several = isinstance(drafts, tuple)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        library = Path(sysconfig.get_path("stdlib"))
        texts = [(library / name).read_text("utf-8") for name in CORPUS]
        corpus.write_text("\n".join(texts), encoding="utf-8")
        named = [
            f"{one}:corpus={corpus}" if one in ("bigram", "unigram") else one
            for one in (drafts if several else [drafts])
        ]
        return SpeculativeDecoder.from_pretrained(
            target, **variant | {"draft": named if several else named[0]}
        )


def _choose(config, target, variants, temperature):
    """Returns the fastest variant, and the speedups of all that were tried."""
    entries, _, chat = _entries(config, target)
    if "branching" in variants[0]:
        tried = _trees(config, target, variants[0], entries, chat, temperature)
    elif len(variants) > 1 and not config.only:
        runs = [
            _timed(config, target, variant, entries, chat, temperature, 1)
            for variant in variants
        ]
        tried = [(v, run["speedup"]) for v, run in zip(variants, runs, strict=True)]
    else:
        tried = []
    best = max(tried, key=lambda one: one[1])[0] if tried else variants[0]
    return best, [
        {"variant": told(variant), "speedup": speedup} for variant, speedup in tried
    ]


def _trees(config, target, variant, entries, chat, temperature):
    """Returns the trees of each size that `calibrate` grows, and their speedups.

    What turned out to be a chain is left out: there are other methods for that.
    """
    decoder = _decoder(target, variant)
    found = calibrate(
        decoder,
        contents(decoder, entries, chat=chat),
        lengths=config.tree_sizes,
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(temperature=temperature),
        repeats=1,
    ).summary()
    return [
        (variant | {"branching": tuple(parents)}, found["measured_speedup"][size])
        for size, parents in found["trees"].items()
        if len(set(parents)) < len(parents)
    ]


def _method(config, target, name, variants, temperature):
    """Chooses a method's variant and measures it."""
    variant, tried = _choose(config, target, variants, temperature)
    _, entries, chat = _entries(config, target)
    one = _timed(config, target, variant, entries, chat, temperature, config.repeats)
    one = {"variant": told(variant), "tried": tried, **one}
    print(_line(f"{target}, T = {temperature:g}, {name}", one), flush=True)
    return one


def _timed(config, target, variant, entries, chat, temperature, repeats):
    """Decodes plainly and with a variant, in turns, prompt after prompt."""
    decoder = _decoder(target, variant)
    plan = decoder.plan(
        contents(decoder, entries, chat=chat),
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(temperature=temperature),
    )
    own = decoder.engine
    engines = {"plain": own._replace(drafter=NoDrafter()), "own": own}
    units = [
        alternate(
            {
                name: partial(_decode, engine, engine.start(batch))
                for name, engine in engines.items()
            },
            repeats,
        )
        for _, batch in batches(plan, 1)
    ]

    def total(name, field):
        return np.array([np.median([x[field] for x in unit[name]]) for unit in units])

    costs = {
        name: Costs(total(name, "seconds"), total(name, "tokens")) for name in engines
    }
    rounds, tokens = total("own", "rounds").sum(), total("own", "tokens").sum()
    step = 1 / costs["plain"].tokens_per_second()
    low, high = speedup_interval(costs["plain"], costs["own"])
    return {
        "mean_acceptance_length": float(tokens / rounds),
        "round_cost": float(total("own", "seconds").sum() / rounds / step),
        "speedup": speedup(costs["plain"], costs["own"]),
        "speedup_low": low,
        "speedup_high": high,
        "plain_tokens_per_second": 1 / step,
        "num_tokens": int(tokens),
    }


def _decode(engine, prefilled):
    """Decodes a prefilled batch to its end; returns seconds, rounds and tokens."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, prefilled))
    seconds, (tally, state) = timed(lambda: run_rounds(engine, state))
    tokens = int((state.length - state.prompt_length).sum())
    return {"seconds": seconds, "rounds": int(tally.rounds), "tokens": tokens}


def _law_gain(config, length):
    """Returns tokens a round of both rules: by their laws on the same drafts, and run.

    Both are weighed on rounds that drafted in full, at temperature 1.
    """
    variant = {"draft": SMALL, "num_draft_tokens": length, "rule": "rejection"}
    expected, run = {}, {}
    for name in ("rejection", "block"):
        decoder = _decoder("pystd-5m", variant | {"rule": name})
        entries = read_all(bundled_prompts(), None)
        expected[name], run[name] = _rounds(
            decoder, contents(decoder, entries, chat=False), config.law_rounds
        )
    tokens = {
        name: 1 + np.mean([found[name] for found in expected.values()])
        for name in ("rejection", "block")
    }
    return {
        "by_law": {name: float(value) for name, value in tokens.items()},
        "by_law_gain": float(tokens["block"] / tokens["rejection"] - 1),
        "run": run,
        "run_gain": run["block"]["tokens"] / run["rejection"]["tokens"] - 1,
        "standard_error": float(
            np.hypot(*(one["standard_error"] / one["tokens"] for one in run.values()))
        ),
    }


def _rounds(decoder, prompts, num_rounds):
    """Runs rounds; returns the mean E[accepted] of both rules, and what was run."""
    engine = decoder.engine
    budget = num_rounds * (engine.drafter.depth + 1) + engine.drafter.depth
    plan = decoder.plan(
        prompts,
        max_new_tokens=budget,
        sampling=Sampling(temperature=1.0),
        eos_token_id=(),
    )
    ((_, batch),) = batches(plan, len(prompts))
    state = engine.start(batch)

    @jax.jit
    def advance(params, state):
        static = {name: engine.static[name] for name in ("target", "drafter", "rule")}
        state, info = decode.step(params, state, **static)
        means = {
            name: jax.vmap(lambda d, p, rule=RULES[name]: _mean(rule, d, p))(
                info.draft, info.log_probs
            )
            for name in ("rejection", "block")
        }
        return state, means, info.verdict.num_accepted

    by_law, accepted = [], []
    for _ in range(num_rounds):
        state, means, count = jax.device_get(advance(engine.params, state))
        by_law.append(means)
        accepted.append(count)
    rows = 1 + np.mean(accepted, axis=0)
    error = rows.std(ddof=1) / np.sqrt(len(rows))
    own = {name: float(np.mean([one[name] for one in by_law])) for name in by_law[0]}
    return own, {"tokens": float(rows.mean()), "standard_error": float(error)}


def _mean(rule, draft, target_log_probs):
    """Returns the expected number of accepted tokens, by the rule's law."""
    stop, _ = rule.law(draft, target_log_probs)
    return (stop * jnp.arange(len(stop), dtype=stop.dtype)).sum()


def _line(name, one):
    return (
        f"{name}: {one['mean_acceptance_length']:.2f} tokens a round of "
        f"{one['round_cost']:.2f} plain steps, speedup {one['speedup']:.2f} "
        f"({one['speedup_low']:.2f} to {one['speedup_high']:.2f}), "
        f"{one['variant']}"
    )


def told(variant):
    """Returns a variant in words."""
    shape = variant.get("branching") or variant.get("num_draft_tokens")
    drafts = variant["draft"]
    drafts = drafts if isinstance(drafts, str) else " + ".join(drafts)
    if isinstance(shape, tuple):
        shape = f"parents {','.join(map(str, shape))}"
    return f"{drafts}, {shape}, {variant['rule']}"


def _summary(found, laws):
    lines = [
        _line(f"{target}, {heat}, {name}", one)
        for target, heats in found.items()
        for heat, methods in heats.items()
        for name, one in methods.items()
    ]
    lines += [
        f"block over token-wise, {length}: {one['by_law_gain']:+.1%} by their laws, "
        f"{one['run_gain']:+.1%} +- {one['standard_error']:.1%} run"
        for length, one in laws.items()
    ]
    return lines


def rows(heats):
    """Returns the rows of the README's table of one target, without its head."""
    return [
        f"| {name} | "
        + " | ".join(
            f"{one['speedup']:.2f} ({one['mean_acceptance_length']:.1f})"
            for one in (methods[name] for methods in heats.values())
        )
        + " |"
        for name in next(iter(heats.values()))
    ]


def draw(record):
    found = record["results"]["methods"]
    figure = Figure(figsize=(10, 0.6 + 3.2 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (target, heats) in zip(panels, found.items(), strict=True):
        names = list(next(iter(heats.values())))
        for offset, (heat, methods), color in zip(
            (-0.2, 0.2), heats.items(), (common.BLUE, common.ORANGE), strict=False
        ):
            places = np.arange(len(names)) + offset
            values = [methods[name]["speedup"] for name in names]
            spread = [
                [value - methods[name]["speedup_low"], methods[name]["speedup_high"]
                 - value]
                for name, value in zip(names, values, strict=True)
            ]  # fmt: skip
            bars = axes.bar(
                places, values, 0.38, yerr=np.maximum(np.transpose(spread), 0),
                color=color, label=heat, error_kw={"lw": 0.8},
            )  # fmt: skip
            lengths = [methods[name]["mean_acceptance_length"] for name in names]
            axes.bar_label(
                bars, [f"{one:.1f}" for one in lengths], label_type="center",
                fontsize=7, color="white",
            )  # fmt: skip
        axes.axhline(1, color=common.GREY, lw=0.8)
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
        axes.set(ylabel="speedup", title=f"{target} (in the bars: tokens a round)")
    panels[0].legend(fontsize=8)
    return figure


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config(
        targets=("pystd-5m",),
        only=("n-grams",),
        temperatures=(1.0,),
        num_prompts=1,
        max_new_tokens=8,
        repeats=1,
        lengths=(2,),
        law_rounds=2,
    ),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

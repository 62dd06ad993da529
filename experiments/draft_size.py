"""How large should a draft be? The inverted U of the notes' section 8, on real models.

One target, drafts from nothing to most of the target itself: uniform guesses, random
weights, three sizes that are distilled here for equally many steps on the same data,
the bundled draft, and the target's own first layers. A draft that is too small is
seldom right, one that is too large costs what it saves. `calibrate` chooses each
draft's K.

    python experiments/draft_size.py            about an hour, most of it training
    python experiments/draft_size.py --smoke    tiny models, few steps

What was trained is kept in the system's folder for temporary files: a run that was
stopped goes on, and a second run only measures.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import calibrated
import common
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from specdec_jax.base import Draft, Params
from specdec_jax.calibrate import calibrate
from specdec_jax.checkpoints import load
from specdec_jax.drafters import ModelDrafter
from specdec_jax.networks import Decoder, DecoderConfig, Rotary
from specdec_jax.rng import draw as draw_token
from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec_jax.training.data import batch, encode, standard_library
from specdec_jax.training.distill import distillation_loss, teach
from specdec_jax.training.export import export
from specdec_jax.training.train import adamw, fit, init_params, schedule

FOLDER = Path(tempfile.gettempdir()) / "specdec_jax_draft_size"


@dataclass(frozen=True)
class Config:
    """What is trained, and what is measured.

    Attributes:
      sizes: Name, width, layers and MLP width of what is distilled here.
      cuts: Layers of the target that are kept.
    """

    target: str = DEFAULT_TARGET
    draft: str = DEFAULT_DRAFT
    sizes: tuple[tuple[str, int, int, int], ...] = (
        ("small", 48, 1, 96),
        ("medium", 112, 2, 192),
        ("large", 192, 4, 512),
    )
    cuts: tuple[int, ...] = (5, 8)
    steps: int = 1000
    rows: int = 4
    length: int = 256
    lengths: tuple[int, ...] = (0, 1, 2, 4, 8)
    num_prompts: int = 8
    max_new_tokens: int = 64
    repeats: int = 2


@dataclass(frozen=True)
class Uniform:
    """Guesses every token with the same probability."""

    vocab_size: int
    num_draft_tokens: int
    siblings = "none"
    hidden_layers = ()

    @property
    def num_nodes(self):
        """The draft's length."""
        return self.num_draft_tokens

    @property
    def depth(self):
        """The draft's length."""
        return self.num_draft_tokens

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns nothing to remember."""
        return ()

    def prefill(self, params, state, *chunk):
        """Reads nothing."""
        return state

    def draft(self, state, context):
        """Draws each token; greedy, it is the first of equals."""
        rows = (len(context.length), self.num_draft_tokens, self.vocab_size)
        laws = jnp.full(rows, -jnp.log(float(self.vocab_size)), jnp.float32)
        tokens = [
            draw_token(laws[:, i], context.noise, i)
            for i in range(self.num_draft_tokens)
        ]
        draft = Draft(jnp.stack(tokens, 1), context.max_draft, laws)
        return draft, state, context.target_cache

    def update(self, params, state, *round_):
        """Learns nothing."""
        return state


def measure(config):
    loaded, prompts = calibrated.pair(config)
    drafts = [
        _measured(config, loaded, prompts, *one) for one in _drafts(config, loaded)
    ]
    return {"drafts": drafts, "summary": [_line(one) for one in drafts]}


def _drafts(config, decoder):
    """Yields each draft: name, drafter, variables, parameters that are its own."""
    target, vocab_size = decoder.engine.target, decoder.engine.target.vocab_size
    yield "uniform", Uniform(vocab_size, 1), None, 0
    if config.target != "random":
        shape = _shape(target.config, *config.sizes[len(config.sizes) // 2][1:])
        params = init_params(shape, seed=1)
        yield "random weights", *_drafter("random", shape, params, decoder.tokenizer)
    for name, *size in config.sizes:
        shape = _shape(target.config, *size)
        params = _distilled(config, name, shape)
        yield name, *_drafter(name, shape, params, decoder.tokenizer)
    if config.target != "random":
        bundled = load(config.draft)
        number = sum(leaf.size for leaf in jax.tree.leaves(bundled.params))
        yield "bundled", ModelDrafter(bundled.model, 1), bundled.params, number
    for layers in config.cuts:
        shape = replace(target.config, num_layers=layers)
        model = Decoder(shape, target.dtype, target.tiled)
        variables = decoder.engine.params.target
        number = sum(leaf.size for leaf in jax.tree.leaves(init_params(shape, seed=0)))
        yield f"{layers} layers", ModelDrafter(model, 1), variables, number


def _shape(config, width, layers, mlp_width):
    """Returns the shape of a draft with the target's vocabulary."""
    size = width // 8
    return DecoderConfig(
        vocab_size=config.vocab_size,
        width=width,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=size,
        mlp_width=mlp_width,
        max_positions=config.max_positions,
        norm_eps=1e-5,
        rotary=Rotary(tuple(1e4 ** (-i / size) for i in range(0, size, 2))),
        tied=True,
    )


def _drafter(name, shape, params, tokenizer):
    """Returns a drafter, its variables and its size, by way of a checkpoint."""
    number = sum(leaf.size for leaf in jax.tree.leaves(params))
    if tokenizer is None:
        return ModelDrafter(Decoder(shape), 1), {"params": params}, number
    folder = FOLDER / name
    export(folder, shape, params, tokenizer.backend_tokenizer, rope_theta=1e4)
    loaded = load(folder)
    return ModelDrafter(loaded.model, 1), loaded.params, number


def _distilled(config, name, shape):
    """Trains a draft on data, the target's law at each place being the lesson."""
    FOLDER.mkdir(exist_ok=True)
    checkpoint = FOLDER / f"{config.target}-{name}-{config.steps}.npz"
    if config.target == "random":
        teacher, checkpoint = _random_teacher(), None
        tokens = jax.random.randint(jax.random.key(0), (5000,), 0, shape.vocab_size)
    else:
        loaded = load(config.target, tiled=False)
        teacher = loaded.model.config, loaded.params["params"]
        data = standard_library(held_out=False)
        tokens = encode(loaded.tokenizer.backend_tokenizer, data, eos=1)
    rows = partial(
        batch,
        jax.device_get(tokens),
        batch_size=config.rows,
        length=config.length,
        bos=0,
        seed=1,
    )
    rate = schedule(
        4e-3, steps=config.steps, warmup=config.steps // 10, decay=config.steps // 3
    )
    return fit(
        partial(distillation_loss, shape, 0.0, 0.2),
        init_params(shape, seed=0),
        lambda step: teach(*teacher, jnp.asarray(rows(step))),
        optimiser=adamw(rate),
        steps=config.steps,
        checkpoint=checkpoint,
        report=lambda line: print(f"{name}: {line}", flush=True),
        report_every=max(config.steps // 5, 1),
    )


def _random_teacher():
    engine = calibrated.random_pair().engine
    return engine.target.config, engine.params.target["params"]


def _measured(config, target, prompts, name, drafter, variables, number):
    """Calibrates a draft and returns what it found."""
    # Programs of all drafts together would fill the process's memory map.
    jax.clear_caches()
    engine: Any = target.engine
    decoder = SpeculativeDecoder(
        engine.target,
        Params(engine.params.target, variables),
        engine.tokenizer,
        drafter,
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
        max_positions=target.max_positions,
    )
    found = calibrate(
        decoder,
        prompts,
        lengths=config.lengths,
        max_new_tokens=config.max_new_tokens,
        repeats=config.repeats,
    ).summary()
    speedups = found["measured_speedup"]
    best = max((k for k in speedups if k != "0"), key=lambda k: speedups[k])
    return {
        "name": name,
        "parameters": number,
        "alpha": found["alpha"],
        "cost_ratio": found["cost_ratio"],
        "speedup": speedups[best],
        "num_draft_tokens": int(best),
        "recommended": found["recommended_num_draft_tokens"],
        "measured_speedup": speedups,
        "predicted_speedup": found["predicted_speedup"],
    }


def _line(one):
    return (
        f"{one['name']}: {one['parameters']:,} parameters, alpha "
        f"{one['alpha']['value']:.3f}, c {one['cost_ratio']:.1f}, speedup "
        f"{one['speedup']:.2f} at K = {one['num_draft_tokens']}, recommended "
        f"{one['recommended']}"
    )


def _kind(name):
    """Returns the colour of a kind of draft: untrained, distilled, cut."""
    if name in ("uniform", "random weights"):
        return common.GREY
    return common.GREEN if name.endswith("layers") else common.BLUE


def draw(record):
    drafts = record["results"]["drafts"]
    figure = Figure(figsize=(9.6, 4.2))
    left, right = figure.subplots(1, 2, sharex=True)
    right.axhline(1, color=common.GREY, lw=0.8)
    for one, marker in zip(drafts, "xXosD*<>", strict=False):
        cost, alpha = 1 / one["cost_ratio"], one["alpha"]
        kind = _kind(one["name"])
        low, high = (abs(alpha[end] - alpha["value"]) for end in ("low", "high"))
        left.errorbar(
            cost, alpha["value"], yerr=[[low], [high]], marker=marker, color=kind
        )
        label = f"{one['name']}, K = {one['num_draft_tokens']}"
        right.plot(cost, one["speedup"], marker, color=kind, label=label)
    right.legend(fontsize=8)
    left.set(ylabel="alpha", ylim=(-0.04, 1.04), title="how often a draft is right")
    right.set(
        ylabel="speedup at the best K of at least 1",
        ylim=(0, max(1.0, *(one["speedup"] for one in drafts)) * 1.1),
        title="what it is worth",
    )
    for axes in (left, right):
        axes.set(xscale="log", xlabel="cost of a drafted token, plain steps")
        axes.margins(x=0.1)
    return figure


EXPERIMENT = common.Experiment(
    question=__doc__.splitlines()[0],
    config=Config(),
    smoke=Config(
        "random", "random", (("small", 16, 1, 16),), (), 3, 2, 16, (0, 1), 2, 8, 1
    ),
    measure=measure,
    draw=draw,
)


def main(argv=None):
    return common.main(EXPERIMENT, __file__, argv)


if __name__ == "__main__":
    main()

"""Language-model training: loss, schedule, loop, checkpoints.

The schedule is warm-up, stable, decay: a run can be cut at any step and finished by a
short decay from its last checkpoint, and a longer run shares its first steps. A resumed
run gives bitwise the parameters of an uninterrupted one.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.decoder import Decoder
from specdec_jax.training.forward import check, forward


class TrainState(NamedTuple):
    """All that a run needs to go on."""

    step: Int[Array, ""]
    """Optimiser steps done."""
    params: Any
    opt_state: Any


Loss = Callable[[Any, Any], Float[Array, ""]]
"""`loss(params, batch)`, a mean over tokens, in nats."""


def language_model_loss(
    config: DecoderConfig, params: Any, tokens: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Returns the mean negative log-likelihood of `tokens[:, 1:]`, in nats a token."""
    logits = forward(config, params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def init_params(config: DecoderConfig, seed: int) -> Any:
    """Returns fresh parameters; what writes to the residual stream starts at zero.

    Each layer then starts as the identity, which trains faster from the first step.
    """
    check(config)
    params = _init(Decoder(config), jax.random.key(seed))
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"]
        for part, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            kernel = layer[part][name]["kernel"]
            layer[part][name]["kernel"] = jnp.zeros_like(kernel)
    return params


@partial(jax.jit, static_argnums=0)
def _init(model: Decoder, key: Array) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, tokens, model.init_cache(1, 1))["params"]


def stack(params: Any, times: int) -> Any:
    """Returns the parameters of a decoder with the same layers `times` over.

    A shallow model that has learnt the easy part is a better start for a deep one than
    noise, and costs a fraction a step (Gong et al. 2019).
    """
    layers = [name for name in params if name.startswith("layers_")]
    grown = {name: leaf for name, leaf in params.items() if name not in layers}
    for i in range(times * len(layers)):
        grown[f"layers_{i}"] = jax.tree.map(
            jnp.copy, params[f"layers_{i % len(layers)}"]
        )
    return grown


def schedule(peak: float, *, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """Returns warm-up, stable, decay: linear up, constant, linear down to zero.

    Example:
      >>> rate = schedule(1.0, steps=100, warmup=10, decay=20)
      >>> [float(rate(step)) for step in (0, 5, 50, 90, 100)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [warmup, steps - decay],
    )


def adamw(rate: Any, *, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """Returns AdamW behind gradient clipping; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate,
            b1=0.9,
            b2=0.98,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(
    loss: Loss, optimiser: optax.GradientTransformation, state: TrainState, batch: Any
) -> tuple[TrainState, Float[Array, ""]]:
    """Does one optimiser step; returns the loss before it."""
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    # optax mixes integer counts with floats, which strict callers forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), value


def save(path: Path, state: Any) -> None:
    """Writes a pytree of arrays, atomically: a killed run never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, *leaves)
    os.replace(part, path)


def restore(path: Path, like: Any) -> Any:
    """Reads what `save` wrote into the structure of `like`.

    Raises:
      ValueError: If the file holds other shapes than `like`.
    """
    with np.load(path) as file:
        leaves = [file[name] for name in file.files]
    shapes = [leaf.shape for leaf in jax.tree.leaves(like)]
    if [leaf.shape for leaf in leaves] != shapes:
        raise ValueError(
            f"{path} holds another model than asked for; move it away to start anew"
        )
    return jax.tree.unflatten(
        jax.tree.structure(like), [jnp.asarray(x) for x in leaves]
    )


def fit(
    loss: Loss,
    params: Any,
    batches: Callable[[int], Any],
    *,
    optimiser: optax.GradientTransformation,
    steps: int,
    checkpoint: Path | None = None,
    save_every: int = 100,
    report: Callable[[str], None] = print,
    report_every: int = 20,
) -> Any:
    """Trains and returns the parameters; goes on from `checkpoint` where it exists.

    Args:
      loss: Hashed by identity: a new function compiles anew.
      params: Where to start if there is no checkpoint. Not changed.
      batches: Batch of each step; a function of the step, so that a run can resume.
      optimiser: Its schedule counts steps from 0.
      steps: Steps in all, those before a resume included.
      checkpoint: File for `TrainState`, or None to keep nothing.
      save_every: Steps between checkpoints; the last step is always kept.
      report: Takes one line of progress.
      report_every: Steps between lines.
    """
    params = jax.tree.map(jnp.copy, params)  # the step donates its state
    state = TrainState(jnp.zeros((), jnp.int32), params, optimiser.init(params))
    if checkpoint and checkpoint.exists():
        state = restore(checkpoint, state)
        report(f"resumed at step {int(state.step)}")
    started, first, losses = time.perf_counter(), int(state.step), []
    for step in range(first, steps):
        state, value = train_step(loss, optimiser, state, batches(step))
        losses.append(value)
        if (step + 1) % report_every == 0 or step + 1 == steps:
            mean = float(np.mean([float(x) for x in losses]))
            rate = (time.perf_counter() - started) / (step + 1 - first)
            report(f"step {step + 1}/{steps} loss {mean:.4f} {rate:.2f} s/step")
            losses = []
        if checkpoint and ((step + 1) % save_every == 0 or step + 1 == steps):
            save(checkpoint, state)
    return state.params

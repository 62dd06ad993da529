"""Whole trainings as a list of stages, which is what a recipe is.

Each stage has its own optimiser state and its own checkpoint in the work folder, so a
run that was stopped anywhere goes on from there when it is started again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.decoder import Decoder
from specdec_jax.training.data import batch
from specdec_jax.training.distill import (
    distillation_loss,
    mixed,
    target_samples,
    teach,
)
from specdec_jax.training.train import (
    adamw,
    fit,
    init_params,
    language_model_loss,
    schedule,
    stack,
)

WARMUP = 100
SAMPLE_SHARE = 0.75
"""Share of a distillation batch that the target wrote; the rest is data."""


class Stage(NamedTuple):
    """One stretch of training with one kind of batch and one schedule."""

    steps: int
    num_layers: int | None = None
    """Depth in this stage; None is the full one. A deeper stage than the one before
    starts from its layers, repeated (see `train.stack`)."""
    length: int = 128
    """Tokens of a row."""
    batch_size: int = 8
    peak: float = 2e-3
    """Learning rate between warm-up and decay."""
    decay: int = 0
    """Last steps, over which the rate falls to zero."""
    variation: float = 0.0
    """Weight of the total variation; distillation only."""
    greedy: float = 0.0
    """Weight of the cross entropy of the target's argmax; distillation only."""


def train_target(
    work: Path,
    config: DecoderConfig,
    tokens: Int[np.ndarray, " N"],
    stages: Sequence[Stage],
    *,
    bos: int = 0,
    report: Callable[[str], None] = print,
) -> Any:
    """Trains on data and returns the parameters.

    Args:
      work: Folder of the checkpoints; seed and data of stage i are those of seed i.
      config: Shape of the result.
      tokens: The training stream.
      stages: In order; the last one has the full depth.
      bos: Opens every row.
      report: Takes one line of progress.
    """
    depths = [stage.num_layers or config.num_layers for stage in stages]
    params = init_params(replace(config, num_layers=depths[0]), seed=0)
    for i, stage in enumerate(stages):
        shape = replace(config, num_layers=depths[i])
        if i and depths[i] > depths[i - 1]:
            params = stack(params, depths[i] // depths[i - 1])
        params = _fit(
            partial(language_model_loss, shape),
            params,
            _rows(tokens, stage, bos, seed=i),
            stage,
            work / f"target-{i}.npz",
            report,
        )
    return params


def train_draft(
    work: Path,
    config: DecoderConfig,
    target: Decoder,
    target_params: Any,
    tokens: Int[np.ndarray, " N"],
    pretrain: Stage,
    stages: Sequence[Stage],
    *,
    rounds: int,
    bos: int = 0,
    report: Callable[[str], None] = print,
) -> Any:
    """Trains on data, then distils on data mixed with the target's own samples.

    Args:
      work: Folder of the checkpoints and of the samples.
      config: Shape of the draft.
      target: The teacher.
      target_params: Its `"params"`.
      tokens: The training stream.
      pretrain: Stage on data alone, without the teacher.
      stages: Stages of distillation.
      rounds: Batches of 64 samples; half greedy, half at temperature 1.
      bos: Opens every row.
      report: Takes one line of progress.
    """
    params = _fit(
        partial(language_model_loss, config),
        init_params(config, seed=0),
        _rows(tokens, pretrain, bos, seed=0),
        pretrain,
        work / "draft-data.npz",
        report,
    )
    samples = _samples(work, target, target_params, tokens, rounds, bos, report)
    for i, stage in enumerate(stages):
        data = _rows(tokens, stage, bos, seed=i + 1)
        rows = mixed(data, samples, share=SAMPLE_SHARE, seed=i)

        def lessons(step: int, rows: Any = rows) -> Any:
            return teach(target.config, target_params, jnp.asarray(rows(step)))

        loss = partial(distillation_loss, config, stage.variation, stage.greedy)
        checkpoint = work / f"draft-{i}.npz"
        params = _fit(loss, params, lessons, stage, checkpoint, report)
    return params


def _samples(
    work: Path,
    target: Decoder,
    target_params: Any,
    tokens: Int[np.ndarray, " N"],
    rounds: int,
    bos: int,
    report: Callable[[str], None],
) -> Int[np.ndarray, "R T"]:
    """Makes the target's samples, or reads those made before."""
    path = work / "samples.npy"
    if not path.exists():
        prompts = partial(batch, tokens, batch_size=64, length=32, bos=bos, seed=99)
        variables = {"params": target_params}
        samples = target_samples(
            target, variables, prompts, rounds=rounds, num_tokens=224, report=report
        )
        np.save(path, samples)
    return np.load(path)


def _rows(
    tokens: Int[np.ndarray, " N"], stage: Stage, bos: int, seed: int
) -> Callable[[int], Int[np.ndarray, "B S"]]:
    return partial(
        batch,
        tokens,
        batch_size=stage.batch_size,
        length=stage.length,
        bos=bos,
        seed=seed,
    )


def _fit(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Callable[[int], Any],
    stage: Stage,
    checkpoint: Path,
    report: Callable[[str], None],
) -> Any:
    warmup = min(WARMUP, stage.steps - stage.decay)
    rate = schedule(stage.peak, steps=stage.steps, warmup=warmup, decay=stage.decay)
    return fit(
        loss,
        params,
        batches,
        optimiser=adamw(rate),
        steps=stage.steps,
        checkpoint=checkpoint,
        report=report,
    )

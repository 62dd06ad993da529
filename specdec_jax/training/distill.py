"""Distilling a draft: losses between two policies, samples to train on, and scores.

What decides the speed is the overlap of the two laws, `sum min(p, q)`, which is one
minus their total variation, and at temperature 0 the share of equal argmaxes. The
forward divergence covers the target's modes and is stable from scratch; the total
variation is what is wanted but its gradient is sparse, so it finishes (DistillSpec,
Zhou et al. 2024). At run time a draft continues text that the target wrote: the rows
to train on are the target's own samples mixed with data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.decoder import Decoder
from specdec_jax.training.forward import forward


class Lesson(NamedTuple):
    """One batch: what the student reads, and what the teacher says about it."""

    tokens: Int[Array, "B S"]
    log_probs: Float[Array, "B S V"]
    """The teacher's rows at temperature 1; row s scores the successor of token s."""


class Scores(NamedTuple):
    """How well a draft follows its target, means over positions."""

    greedy_agreement: float
    """Share of positions whose argmaxes are equal."""
    overlap: float
    """Mean of `sum min(p, q)` at temperature 1."""
    target_loss: float
    """Nats a token of the target on these rows."""
    draft_loss: float
    """Nats a token of the draft on these rows."""


@partial(jax.jit, static_argnums=0)
def teach(config: DecoderConfig, params: Any, tokens: Int[Array, "B S"]) -> Lesson:
    """Returns the teacher's rows for all but the last token of each row."""
    logits = forward(config, params, tokens[:, :-1])
    return Lesson(tokens[:, :-1], jax.nn.log_softmax(logits))


def distillation_loss(
    config: DecoderConfig,
    variation: float,
    greedy: float,
    params: Any,
    lesson: Lesson,
) -> Float[Array, ""]:
    """Returns the mean loss of a student, in nats a token.

    With p the teacher, q the student, v = `variation` and g = `greedy` it is
    `(1 - v - g) KL(p, q) + v TV(p, q) - g log q(argmax p)`. Bind the first three
    arguments with `functools.partial`.

    Args:
      config: Shape of the student.
      variation: Weight of the total variation.
      greedy: Weight of the cross entropy of the teacher's argmax.
      params: The student's.
      lesson: Rows and the teacher's word on them.
    """
    p = lesson.log_probs
    q = jax.nn.log_softmax(forward(config, params, lesson.tokens))
    probs = jnp.exp(p)
    loss = (1 - variation - greedy) * (probs * (p - q)).sum(axis=-1)
    if variation:
        loss = loss + variation * 0.5 * jnp.abs(probs - jnp.exp(q)).sum(axis=-1)
    if greedy:
        best = p.argmax(axis=-1)[..., None]
        loss = loss - greedy * jnp.take_along_axis(q, best, axis=-1)[..., 0]
    return loss.mean()


@partial(jax.jit, static_argnums=(0, 4))
def continue_rows(
    model: Decoder,
    variables: Any,
    prompts: Int[Array, "B S"],
    key: Array,
    num_tokens: int,
    temperature: Float[Array, " B"],
) -> Int[Array, "B T"]:
    """Returns the prompts with `num_tokens` of the model's own samples after them.

    Args:
      model: The target.
      variables: Its linen dict.
      prompts: Rows of equal length.
      key: Consumed.
      num_tokens: Tokens to add to each row.
      temperature: Of each row; 0 is greedy.
    """
    batch, size = prompts.shape

    def draw(logits: Array, key: Array) -> Array:
        # argmax(logits + T * Gumbel) has the law of softmax(logits / T), also at T = 0.
        noise = jax.random.gumbel(key, logits.shape) * temperature[:, None]
        return (logits + noise).argmax(axis=-1).astype(jnp.int32)

    def step(carry: Any, key: Array) -> tuple[Any, Array]:
        token, cache = carry
        output, cache = model.apply(variables, token[:, None], cache)
        following = draw(output.logits[:, 0], key)
        return (following, cache), token

    cache: Any = model.init_cache(batch, size + num_tokens)
    output, cache = model.apply(variables, prompts, cache)
    keys = jax.random.split(key, num_tokens + 1)
    first = draw(output.logits[:, -1], keys[0])
    _, tokens = jax.lax.scan(step, (first, cache), keys[1:])
    return jnp.concatenate([prompts, tokens.T], axis=1)


def target_samples(
    model: Decoder,
    variables: Any,
    prompts: Callable[[int], Int[np.ndarray, "B S"]],
    *,
    rounds: int,
    num_tokens: int,
    greedy_share: float = 0.5,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Int[np.ndarray, "R T"]:
    """Returns rows that the target wrote: prompts and their continuations.

    Args:
      model: The target.
      variables: Its linen dict.
      prompts: The prompts of each round; equal shapes.
      rounds: Batches to make.
      num_tokens: Tokens to add to each prompt.
      greedy_share: Share of the rows continued at temperature 0, the rest at 1.
      seed: Of all samples.
      report: Takes one line of progress.
    """
    rows = []
    for i in range(rounds):
        start = jnp.asarray(prompts(i))
        greedy = jnp.arange(len(start)) < round(greedy_share * len(start))
        key = jax.random.fold_in(jax.random.key(seed), i)
        temperature = jnp.where(greedy, 0.0, 1.0)
        rows.append(
            np.asarray(
                continue_rows(model, variables, start, key, num_tokens, temperature)
            )
        )
        report(f"samples {i + 1}/{rounds}")
    return np.concatenate(rows)


def mixed(
    data: Callable[[int], Int[np.ndarray, "B S"]],
    samples: Int[np.ndarray, "R T"],
    *,
    share: float = 0.5,
    seed: int = 0,
) -> Callable[[int], Int[np.ndarray, "B S"]]:
    """Returns batches whose last rows are replaced by rows of `samples`.

    Args:
      data: Batch of each step, rows no longer than those of `samples`.
      samples: Rows to draw from, cut to the length of the batch.
      share: Share of each batch that is replaced.
      seed: Of the choice of rows.
    """

    def batches(step: int) -> Int[np.ndarray, "B S"]:
        rows = data(step).copy()
        count = round(share * len(rows))
        chosen = np.random.default_rng((seed, step)).integers(len(samples), size=count)
        rows[len(rows) - count :] = samples[chosen, : rows.shape[1]]
        return rows

    return batches


@partial(jax.jit, static_argnums=(0, 1))
def _score(
    target: DecoderConfig, draft: DecoderConfig, params: Any, tokens: Array
) -> Float[Array, " 4 B S"]:
    rows = [
        jax.nn.log_softmax(forward(config, variables, tokens[:, :-1]))
        for config, variables in zip((target, draft), params, strict=True)
    ]
    p, q = rows
    losses = [
        -jnp.take_along_axis(row, tokens[:, 1:, None], axis=-1)[..., 0] for row in rows
    ]
    agree = (p.argmax(axis=-1) == q.argmax(axis=-1)).astype(jnp.float32)
    return jnp.stack([agree, jnp.exp(jnp.minimum(p, q)).sum(axis=-1), *losses])


def score(
    target: DecoderConfig,
    target_params: Any,
    draft: DecoderConfig,
    draft_params: Any,
    rows: Int[np.ndarray, "R S"],
    *,
    skip: int = 0,
    batch_size: int = 8,
) -> Scores:
    """Compares a draft with its target, teacher forced on `rows`.

    Args:
      target: Shape of the target.
      target_params: Its parameters.
      draft: Shape of the draft.
      draft_params: Its parameters.
      rows: Text of equal lengths; a remainder of less than a batch is left out.
      skip: Leading positions that do not count, such as the prompts of samples.
      batch_size: Rows at a time.
    """
    total, params = [], (target_params, draft_params)
    for start in range(0, len(rows) - batch_size + 1, batch_size):
        chunk = jnp.asarray(rows[start : start + batch_size])
        sums = _score(target, draft, params, chunk)[:, :, skip:]
        total.append(np.asarray(sums, np.float64).mean(axis=(1, 2)))
    return Scores(*(float(x) for x in np.mean(total, axis=0)))

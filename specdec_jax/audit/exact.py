"""The exact law of one round on real logits, through the rule's own `law`.

Proposal times acceptance plus rejected mass times residual must give the target's
policy, token by token. It is summed in float64 over the whole vocabulary, from the
logits that the two models give at contexts of the user's own prompts: no randomness,
and no threshold but rounding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.audit.subject import Subject, settings
from specdec_jax.base import Draft
from specdec_jax.decode import bucket
from specdec_jax.drafters.model import fit_vocabulary
from specdec_jax.sampling import History, Sampling, policy

TOLERANCE = 1e-10
"""Deviation, in probability, that float64 sums over a vocabulary explain."""

_CELLS = 2**22
"""Entries of the largest array in the sum: drafted tokens at once times V."""


class ExactLaw(NamedTuple):
    """What the exact laws came to."""

    max_deviation: float
    """Largest deviation of a token's probability from the target's policy."""
    num_contexts: int

    @property
    def lossless(self) -> bool:
        """Whether rounding explains the deviation; a NaN is no law."""
        return self.max_deviation <= TOLERANCE


def exact_law(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_contexts: int | None = None,
) -> ExactLaw:
    """Compares the law of a round's tokens with the target's policy at real contexts.

    A drafter without a model is deterministic: its proposal is then the token that
    follows in the text, told to the rule as a one-hot draft. Of a composed drafter the
    law of the first token counts.

    Args:
      subject: Target, drafter and rule.
      prompts: Token ids; contexts are their beginnings, spread evenly.
      sampling: The policy, of target and draft.
      num_contexts: How many; None takes 32, fewer for very large vocabularies.

    Raises:
      ValueError: No prompt has two tokens, or the rule needs a law that is not there.
    """
    vocab_size = subject.target.vocab_size
    if num_contexts is None:
        num_contexts = min(32, max(8, 2**30 // vocab_size**2))
    proposes = subject.draft_laws[0]
    if proposes.model is None and subject.rule.needs_log_probs:
        raise ValueError(
            f"{subject.rule} needs the law of every drafted token and "
            f"{subject.drafter} gives none; use the rejection or the coupled rule"
        )
    worst, seen, places = 0.0, 0, _places(prompts, num_contexts)
    with jax.enable_x64(True):
        for index, ends in places.items():
            prompt = prompts[index]
            target = np.asarray(
                _rows(subject.reference, subject.params.target, prompt, sampling)
            )
            draft = None
            if proposes.model is not None:
                rows = _rows(proposes.model, proposes.variables, prompt, sampling)
                draft = np.asarray(_fit(rows, vocab_size))
            for end in ends:
                if draft is not None and np.isnan(draft[end - 1, 0]):
                    continue  # the draft has no law here and proposes nothing
                seen += 1
                found = _deviation(
                    target[end - 1 : end + 1],
                    None if draft is None else draft[end - 1],
                    np.int32(prompt[end]),
                    rule=subject.rule,
                )
                worst = max(worst, float(found)) if found == found else float("nan")
    return ExactLaw(worst, seen)


def _places(
    prompts: Sequence[Sequence[int]], num_contexts: int
) -> dict[int, list[int]]:
    """Returns lengths of contexts by prompt; another token follows each of them."""
    every = [(i, end) for i, p in enumerate(prompts) for end in range(1, len(p))]
    if not every:
        raise ValueError(
            "the exact law needs contexts, and no prompt has two tokens; give longer "
            "prompts"
        )
    chosen = np.linspace(0, len(every) - 1, min(num_contexts, len(every))).astype(int)
    places: dict[int, list[int]] = {}
    for index, end in (every[i] for i in chosen):
        places.setdefault(index, []).append(end)
    return places


def _rows(
    model: Any, variables: Any, prompt: Sequence[int], sampling: Sampling
) -> Float[Array, "S V"]:
    """Returns the float64 policy row after each token of a prompt, and garbage."""
    tokens = np.zeros((1, bucket(len(prompt))), np.int32)
    tokens[0, : len(prompt)] = prompt
    with jax.enable_x64(False):
        logits = np.asarray(_logits(variables, tokens, model=model))[0]
    return _policy(logits.astype(np.float64), tokens, sampling=sampling)


@partial(jax.jit, static_argnames="sampling")
def _policy(logits, tokens, *, sampling):
    size, vocab_size = logits.shape
    rows = settings(sampling, size, vocab_size, jnp.int32(size))
    length = jnp.arange(1, size + 1, dtype=jnp.int32)
    history = History.plain(jnp.tile(tokens, (size, 1)), length)
    return policy(logits[:, None], rows, history)[:, 0]


@partial(jax.jit, static_argnames="model")
def _logits(variables, tokens, *, model):
    output, _ = model.apply(variables, tokens, model.init_cache(1, tokens.shape[1]))
    return output.logits.astype(jnp.float32)


@partial(jax.jit, static_argnames="vocab_size")
def _fit(rows: Float[Array, "S U"], vocab_size: int) -> Float[Array, "S V"]:
    """Returns the draft's laws over the target's ids."""
    return jax.nn.log_softmax(fit_vocabulary(rows, vocab_size), axis=-1)


@partial(jax.jit, static_argnames="rule")
def _deviation(
    target: Float[Array, "2 V"],
    draft: Float[Array, " V"] | None,
    proposed: Int[Array, ""],
    *,
    rule: Any,
) -> Float[Array, ""]:
    """Returns how far the first token, or the one after it, is from the target."""
    vocab_size = target.shape[1]
    one = jnp.ones((), jnp.int32)
    law = None if draft is None else draft[None]

    def emitted(token):
        return rule.law(Draft(token[None], one, law), target)

    def add(carry, tokens):
        total, worst = carry
        weight = jnp.ones(tokens.shape, target.dtype)
        if draft is not None:
            # Fillers past the vocabulary are drawn with probability 0.
            known = tokens < vocab_size
            weight = jnp.where(known, jnp.exp(draft[tokens % vocab_size]), 0)
        stop, rows = jax.vmap(emitted)(tokens % vocab_size)
        drawn = weight[:, None] > 0
        mass = jnp.where(drawn, weight[:, None] * stop, 0)
        total = total + (mass[:, :1] * rows[:, 0]).sum(0)
        total = total.at[tokens % vocab_size].add(mass[:, 1])
        follows = jnp.abs(rows[:, 1] - jnp.exp(target[1])[None])
        follows = jnp.where(drawn & (stop[:, 1:] > 0), follows, 0)
        return (total, jnp.maximum(worst, follows.max())), None

    tokens = proposed[None, None]
    if draft is not None:
        size = max(min(vocab_size, _CELLS // vocab_size), 1)
        chunks = -(-vocab_size // size)
        tokens = jnp.arange(chunks * size, dtype=jnp.int32).reshape(chunks, size)
    zero = jnp.zeros((), target.dtype)
    start = (jnp.zeros((vocab_size,), target.dtype), zero)
    (total, worst), _ = jax.lax.scan(add, start, tokens)
    return jnp.maximum(jnp.abs(total - jnp.exp(target[0])).max(), worst)

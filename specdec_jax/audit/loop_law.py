"""Statistics on the real loop: is what it emits distributed as the target says?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import rng
from specdec_jax.audit.evidence import Evidence, Gatherer
from specdec_jax.audit.power import Power, power, telling
from specdec_jax.audit.rounds import Prompt, chunk_rows, first_laws, sample
from specdec_jax.audit.subject import Subject
from specdec_jax.sampling import Sampling

NUM_PROMPTS = 4
"""Contexts that share the sample; tests are pooled over them."""

NUM_LOOKED_AT = 16
"""Prompts from which they are chosen."""

DRAFT_TOLERANCE = 1e-3
"""Deviation, in probability, that float32 rounding of a draft law explains."""


def _everywhere(place: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    return place >= 0


def _first(place: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    return place == 0


def _undrafted(place: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    return ~drafted


TESTS: dict[str, tuple[str, Callable]] = {
    "leak at round starts": ("leak", _first),
    "leak everywhere": ("leak", _everywhere),
    "surprise of bonus tokens": ("surprise", _undrafted),
    "surprise everywhere": ("surprise", _everywhere),
}
"""Tests besides that of the joint law: a score, and the places it is summed over."""


def loop_law(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_samples: int = 1024,
    seed: int = 0,
    announce: Callable[[Power], Any] = lambda power: None,
) -> Evidence:
    """Draws rounds from the compiled loop and tests them against the target's law.

    Args:
      subject: What is audited.
      prompts: Token ids; `NUM_PROMPTS` contexts are chosen from them.
      sampling: The policy of target and draft; the temperature must not be 0.
      num_samples: Rows, over all prompts; each runs three rounds.
      seed: Of the rows.
      announce: Is told the sample's size and power before anything is drawn.

    Raises:
      ValueError: The policy is greedy, which has no law to test, or nothing is drafted.
      FloatingPointError: The target's logits are not finite.
    """
    if sampling.temperature == 0:
        raise ValueError(
            "statistics need a law, and temperature 0 has none; use a temperature "
            "above 0, or the level identity"
        )
    if subject.drafter.num_nodes == 0:
        raise ValueError("nothing is drafted; give a draft and num_draft_tokens >= 1")
    gatherer = Gatherer(TESTS)
    read, target, draft = _telling_prompts(subject, prompts, sampling)
    each = -(-num_samples // len(read))
    size = chunk_rows(subject, each)
    known = power(target, draft, each, gatherer.num_tests)
    announce(known)
    for index, prompt in enumerate(read):
        key = jax.random.fold_in(jax.random.key(seed), index)
        keys = rng.request_keys(key, -(-each // size) * size)
        for found, draft_deviation in sample(subject, prompt, keys, sampling, size):
            width = found.emitted.shape[2]
            place = np.broadcast_to(np.arange(width), found.emitted.shape)
            gatherer.add(
                found.scores,
                found.emitted,
                found.joint,
                draft_deviation,
                place=place,
                drafted=found.drafted,
            )
    return gatherer.evidence(known)


def _telling_prompts(
    subject: Subject, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[Prompt], np.ndarray, np.ndarray]:
    """Returns the contexts that show most, with the laws [C, V] that hold there.

    A prompt often ends where the next token is certain, or where a lookup proposes
    nothing, so its first two thirds are a context too. They are chosen by the laws
    alone, before anything is drawn.
    """
    whole = list(prompts[:NUM_LOOKED_AT])
    contexts = whole + [tokens[: -(-2 * len(tokens) // 3)] for tokens in whole]
    target, draft = first_laws(subject, contexts, sampling)
    found = telling(target, draft)
    # Where nothing would show, rows are wasted; one context there must be.
    num_chosen = int(np.clip((found > 0).sum(), 1, NUM_PROMPTS))
    best = np.argsort(-found, kind="stable")[:num_chosen]
    read = [Prompt.read(subject, contexts[i], sampling) for i in best]
    return read, target[best], draft[best]

"""Statistics on the real loop: is what it emits distributed as the target says?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import rng
from specdec_jax.audit.evidence import Evidence, Gatherer
from specdec_jax.audit.power import Power, power
from specdec_jax.audit.rounds import Prompt, chunk_rows, first_laws, sample
from specdec_jax.audit.subject import Subject
from specdec_jax.sampling import Sampling

NUM_PROMPTS = 4
"""Prompts that share the sample; tests are pooled over them."""

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
      prompts: Token ids; the first `NUM_PROMPTS` are used.
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
    read = [Prompt.read(subject, tokens, sampling) for tokens in prompts[:NUM_PROMPTS]]
    each = -(-num_samples // len(read))
    size = chunk_rows(subject, each)
    laws = [first_laws(subject, prompt, sampling) for prompt in read]
    known = power(
        np.stack([target for target, _ in laws]),
        np.stack([draft for _, draft in laws]),
        each,
        gatherer.num_tests,
    )
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

"""The levels of an audit, cheapest first, on one target, draft and rule."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp

from specdec_jax.acceptance import EVERY_RULE
from specdec_jax.audit.coins import coin_problems
from specdec_jax.audit.enumeration import worst_deviation
from specdec_jax.audit.exact import exact_law
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE, loop_law
from specdec_jax.audit.power import Power
from specdec_jax.audit.report import Enumerated, Report
from specdec_jax.audit.subject import Subject
from specdec_jax.audit.texts import compare_texts
from specdec_jax.sampling import Sampling

LEVELS = ("exact_law", "enumeration", "statistics", "identity")

NUM_TEXTS = 8
"""Prompts whose whole texts are compared."""


def audit(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    levels: Sequence[str] | None = None,
    num_samples: int = 1024,
    max_new_tokens: int = 32,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    dtype: Any = jnp.float32,
    announce: Callable[[Power], Any] = lambda power: None,
) -> Report:
    """Runs levels of the audit and gathers what they found.

    Args:
      subject: Target, drafter and rule; `Subject.of(decoder)` has a decoder's.
      prompts: Token ids.
      sampling: The policy of target and draft.
      levels: Some of `LEVELS`; None runs all, without statistics at temperature 0.
      num_samples: Rows that statistics draw.
      max_new_tokens: Length of the texts that identity compares.
      eos_token_ids: What ends those texts.
      seed: Of everything drawn.
      dtype: Of the models' arithmetic.
      announce: Is told the power of the statistics before they run.

    Raises:
      ValueError: There are no prompts, no such level, nothing is drafted, or the policy
        has no law to test.
      FloatingPointError: The target's logits are not finite.
    """
    if levels is None:
        greedy = sampling.temperature == 0
        levels = [name for name in LEVELS if name != "statistics" or not greedy]
    check_levels(levels)
    if not prompts:
        raise ValueError("there are no prompts; give at least one")
    if subject.drafter.num_nodes == 0:
        raise ValueError("nothing is drafted; give a draft and num_draft_tokens >= 1")
    runs: dict[str, Callable[[], Any]] = {
        "exact_law": lambda: exact_law(subject, prompts, sampling),
        "enumeration": lambda: enumerate_rules(subject.rule),
        "statistics": lambda: loop_law(
            subject, prompts, sampling,
            num_samples=num_samples, seed=seed, announce=announce,
        ),
        "identity": lambda: compare_texts(
            subject, prompts[:NUM_TEXTS], sampling, max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids, seed=seed, dtype=dtype,
        ),
    }  # fmt: skip
    # Most of the time goes into tracing and compiling, which leave cores free.
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = [(name, pool.submit(runs[name])) for name in LEVELS if name in levels]
        found = {name: level.result() for name, level in started}
    small = jnp.finfo(dtype).bits < 32
    lossy = None if subject.rule.lossless else repr(subject.rule)
    return Report(
        **found, lossy_rule=lossy, draft_tolerance=0.1 if small else DRAFT_TOLERANCE
    )


def check_levels(levels: Sequence[str] | None) -> None:
    """Raises a ValueError for a level that is none of `LEVELS`; None names none."""
    for name in levels or ():
        if name not in LEVELS:
            raise ValueError(
                f"there is no level {name!r}; offered are {', '.join(LEVELS)}"
            )


def enumerate_rules(rule: Any) -> Enumerated:
    """Enumerates the joint law of a rule and of all named ones, and tests its coins."""
    rules = dict(EVERY_RULE)
    if rule not in rules.values():
        rules[repr(rule)] = rule
    by_rule = {name: worst_deviation(each) for name, each in rules.items()}
    return Enumerated(by_rule, coin_problems(rule))

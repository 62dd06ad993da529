"""Whole texts: greedy and coupled decoding with the draft against plain decoding.

Both must give plain decoding's text token by token, so one comparison covers caches,
positions, masks, rollback and ragged rows. On real models rounding decides near-ties;
`identity.explain_difference` tells them from faults.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import rng
from specdec_jax.acceptance import Coupled
from specdec_jax.audit.bookkeeping import bookkeeping_problems
from specdec_jax.audit.identity import NEAR_TIE, Difference, explain_difference
from specdec_jax.audit.subject import Subject, begin, check_finite, finish
from specdec_jax.decode import DecodeState, take
from specdec_jax.drafters import NoDrafter
from specdec_jax.sampling import Sampling, SamplingRows

LARGEST_TIE = 0.5
"""Gap in nats above which no rounding, not even bfloat16's, explains a difference."""


class Found(NamedTuple):
    """One text that is not plain decoding's."""

    way: str
    """"greedy" or "coupled": how it was decoded with the draft."""
    row: int
    """The prompt's place."""
    difference: Difference


class Texts(NamedTuple):
    """What the comparison came to."""

    identical: int
    near_ties: int
    mismatches: int
    found: list[Found]
    """Texts that differ, near-ties included."""
    tie: float
    """Gap of scores, in nats, that counted as a near-tie."""
    agreement: tuple[float, float, float]
    """Lowest, mean and highest share of a text's tokens before it parts."""
    rounding: float
    """Largest difference of a token's log-probability between plain and speculative
    decoding, over the tokens that agree; in nats."""
    problems: list[str]
    """Broken identities of counts and budgets."""

    @property
    def lossless(self) -> bool:
        """Whether rounding explains every difference, and the counts hang together."""
        return not self.mismatches and not self.problems


def compare_texts(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int = 32,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> Texts:
    """Decodes the prompts plainly and with the draft, and explains what differs.

    Greedy rows run beside rows sampled at the temperature asked for, in one batch. The
    coupled rule must give plain decoding's text in all of them; the subject's own rule
    in the greedy ones.

    Args:
      subject: What is audited.
      prompts: Token ids.
      sampling: The policy of the sampled rows; at temperature 0 there are none.
      max_new_tokens: Length of each text.
      eos_token_ids: What ends a text.
      seed: Of the sampled rows.
      dtype: Of the arithmetic. In float32 a gap under `NEAR_TIE` is a tie. In a
        smaller dtype it is four times the rounding seen in this very run, up to
        `LARGEST_TIE`.

    Raises:
      FloatingPointError: The target's logits are not finite.
    """
    size = len(prompts)
    greedy = Sampling()
    both = size if sampling.temperature == 0 else 2 * size
    prompts = [*prompts, *prompts][:both]
    keys = rng.request_keys(jax.random.key(seed), both)
    mixed = _mixed(sampling, size, both)

    def ready(subject: Subject) -> DecodeState:
        return begin(
            subject, prompts, keys, mixed,
            max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids,
        )  # fmt: skip

    def decode(subject: Subject, state: DecodeState) -> DecodeState:
        state = finish(subject, state)
        check_finite(state)
        # On the host: what follows looks at single rows.
        names = ("tokens", "prompt_length", "length", "log_probs")
        host = jax.device_get({name: getattr(state, name) for name in names})
        return state._replace(**host)

    coupled = Coupled()
    honest = Subject(subject.params, subject.reference, NoDrafter(), coupled)
    plain = decode(honest, ready(honest))
    start = ready(subject)
    arms = {"coupled": (decode(subject._replace(rule=coupled), start), both)}
    if subject.rule != coupled:
        arms["greedy"] = (decode(subject, _greedy_rows(start, size=size)), size)
    identical, found, shares, rounding = 0, [], [], 0.0
    for name, (state, rows) in arms.items():
        for row in range(rows):
            one, other = _text(plain, row), _text(state, row)
            settings, key = (greedy, None) if row < size else (sampling, keys[row])
            difference = explain_difference(
                subject.reference, subject.params.target, prompts[row], one, other,
                sampling=settings, key=key,
            )  # fmt: skip
            agreed = len(one) if difference is None else difference.position
            shares.append(agreed / max(len(one), 1))
            rounding = max(rounding, _rounding(plain, state, row, agreed))
            if difference is None:
                identical += 1
            else:
                way = "greedy" if row < size else name
                found.append(Found(way, row % size, difference))
    tie = NEAR_TIE
    if jnp.finfo(dtype).bits < 32:
        tie = max(NEAR_TIE, min(4 * rounding, LARGEST_TIE))
    ties = sum(one.difference.margin < tie for one in found)
    return Texts(
        identical=identical,
        near_ties=ties,
        mismatches=len(found) - ties,
        found=found,
        tie=tie,
        agreement=(min(shares), float(np.mean(shares)), max(shares)),
        rounding=rounding,
        problems=[
            f"{name}: {problem}"
            for name, (state, _) in arms.items()
            for problem in bookkeeping_problems(state)
        ],
    )


@partial(jax.jit, static_argnames="size")
def _greedy_rows(state: DecodeState, *, size: int) -> DecodeState:
    """Returns the first rows, as a batch in which nothing is ever drawn."""
    rows = take(state, jnp.arange(size, dtype=jnp.int32))
    return rows._replace(sampling=SamplingRows())


def _mixed(sampling: Sampling, size: int, both: int) -> Sampling:
    """Returns greedy settings for the first `size` rows, the given ones for the rest.

    Filters play no part in a greedy row, so only the temperature differs.
    """
    temperatures = [0.0] * size + [sampling.temperature] * (both - size)
    return replace(sampling, temperature=temperatures)


def _text(state: DecodeState, row: int) -> list[int]:
    start, end = int(state.prompt_length[row]), int(state.length[row])
    return state.tokens[row, start:end].tolist()


def _rounding(plain: DecodeState, state: DecodeState, row: int, agreed: int) -> float:
    """Returns how far the log-probabilities of the tokens that agree are apart."""
    start = int(plain.prompt_length[row])
    span = slice(start, start + agreed)
    one, other = plain.log_probs[row, span], state.log_probs[row, span]
    return float(np.abs(one - other).max(initial=0.0))

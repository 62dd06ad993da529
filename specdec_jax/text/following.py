"""One request as the host sees it while it is decoded: its text, its end, its counts.

The host looks at a batch now and then. A request whose text a stop string completed
has run on to the next look; what it emitted since then is not part of its result.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax import decode
from specdec_jax.text.detokenize import TextFollower
from specdec_jax.text.detokenize import decode as decode_text
from specdec_jax.text.packing import Request
from specdec_jax.text.results import (
    FINISH_REASONS,
    ORIGINS,
    NonFiniteLogitsError,
    Result,
    acceptance_histogram,
)
from specdec_jax.trace import Trace


@dataclass(frozen=True)
class Piece:
    """A piece of a request's text, or its end."""

    index: int
    """The request's place among the prompts."""
    text: str
    """Whole characters; the pieces of a request join to the result's text."""
    origin: str
    """"accepted", "corrected" or "bonus": where the token that completes it is from."""
    result: Result | None = None
    """The request's result in its last piece, None in all others."""


class Look(NamedTuple):
    """What the host sees of a state; new arrays, since the state is donated."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    finish: Int[Array, " B"]
    log_probs: Float[Array, "B T"]
    policy_log_probs: Float[Array, "B T"]
    origin: Int[Array, "B T"]
    counts: decode.Counts
    drafted: Int[Array, "B R"]
    """Tokens drafted in each round since the last look."""
    emitted: Int[Array, "B R"]
    """Tokens emitted in each round since the last look."""
    trace: Trace | None
    """The rounds since the last look, if the run is traced."""


def collect(pieces: Iterable[Piece]) -> list[Result]:
    """Returns the results of all requests in order.

    Raises:
      NonFiniteLogitsError: After everything was decoded, if a request met bad logits.
    """
    results = [piece.result for piece in pieces if piece.result is not None]
    results.sort(key=lambda result: result.index)
    if any(result.finish_reason == "error" for result in results):
        raise NonFiniteLogitsError(results)
    return results


def texts(pieces: Iterable[Piece]) -> Iterator[str]:
    """Yields the text of pieces of one request, then raises as `collect` does."""
    for piece in pieces:
        if piece.text:
            yield piece.text
        if piece.result is not None:
            collect([piece])


class Row:
    """One request as the host sees it."""

    def __init__(
        self,
        request: Request,
        tokenizer: Any,
        stop: Sequence[str],
        depth: int,
        lossless: bool = True,
    ):
        self.done = False
        self._request = request
        self._tokenizer = tokenizer
        self._depth = depth
        self._lossless = lossless
        self._text = TextFollower(tokenizer, stop)
        self._num_tokens = 0
        self._num_drafted = 0
        self._rounds: list[Trace] = []

    def read(self, look: Look, place: int, follow: bool) -> Iterator[Piece]:
        """Yields the pieces that are new in row `place`, and the last one if it ended.

        With `follow` false only the last one comes, without text.
        """
        reason = FINISH_REASONS[look.finish[place]]
        start = len(self._request.token_ids)
        length = int(look.length[place]) - start
        if follow:
            for at in range(self._num_tokens, length):
                origin = ORIGINS[look.origin[place, start + at]]
                if reason == "eos" and at == length - 1:
                    break  # the EOS is no part of the text
                stopped = self._text.push(int(look.tokens[place, start + at]))
                text = self._text.take()
                if text:
                    yield Piece(self._request.index, text, origin)
                if stopped:
                    length, reason = at + 1, "stop"
                    break
        self.done = reason != "running"
        if look.trace is not None:
            self._rounds.append(_own_rounds(look.trace, place, start + length))
        if self.done:
            yield self._end(look, place, length, reason, follow)
        self._num_tokens = length
        self._num_drafted = int(look.counts.num_drafted[place])

    def _end(
        self, look: Look, place: int, length: int, reason: str, follow: bool
    ) -> Piece:
        start = len(self._request.token_ids)
        new = slice(start, start + length)
        tokens = look.tokens[place, new].tolist()
        origins = look.origin[place, new].tolist()
        if follow:
            tail = self._text.finish()
            text = self._text.text
        else:
            tail = ""
            text = decode_text(
                self._tokenizer, tokens[:-1] if reason == "eos" else tokens
            )
        rounds, num_drafted, histogram = self._counts(look, place, origins, reason)
        result = Result(
            index=self._request.index,
            prompt=self._request.text,
            prompt_token_ids=self._request.token_ids,
            text=text,
            token_ids=tokens,
            finish_reason=reason,
            logprobs=look.log_probs[place, new].tolist(),
            policy_logprobs=look.policy_log_probs[place, new].tolist(),
            origins=[ORIGINS[origin] for origin in origins],
            rounds=rounds,
            num_drafted=num_drafted,
            num_accepted=sum(ORIGINS[origin] == "accepted" for origin in origins),
            acceptance_histogram=histogram,
            lossless=self._lossless,
            trace=self._trace(),
        )
        last = result.origins[-1] if origins else ""
        return Piece(self._request.index, tail, last, result)

    def _trace(self) -> Trace | None:
        if not self._rounds:
            return None
        return jax.tree.map(lambda *parts: np.concatenate(parts), *self._rounds)

    def _counts(
        self, look: Look, place: int, origins: list[int], reason: str
    ) -> tuple[int, int, list[int]]:
        """Returns rounds, drafted tokens and histogram of the tokens that stay."""
        if reason != "stop":
            counts = jax.tree.map(lambda leaf: leaf[place], look.counts)
            return (
                int(counts.rounds),
                int(counts.num_drafted),
                counts.histogram.tolist(),
            )
        histogram = acceptance_histogram(origins, self._depth)
        # The device ran on to the next look: count to the round of the last token.
        reached = np.cumsum(look.emitted[place])
        rounds = np.searchsorted(reached, len(origins) - self._num_tokens) + 1
        drafted = self._num_drafted + int(look.drafted[place, :rounds].sum())
        return sum(histogram), drafted, histogram


def _own_rounds(trace: Trace, place: int, end: int) -> Trace:
    """Returns the rounds [R, ...] of one row that began before its text's end."""
    own = jax.tree.map(lambda leaf: leaf[place], trace)
    happened = (own.num_emitted > 0) & (own.start < end)
    return jax.tree.map(lambda leaf: leaf[happened], own)

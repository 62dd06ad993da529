"""What a request comes back as: `Result`, and the counts of its tokens.

All counts are of emitted tokens. Each token was accepted (drafted and kept), corrected
(it replaced a rejected draft) or a bonus (nothing was drafted at its place), and every
round ends with a corrected or bonus token unless it was cut. The counts of a text that
a stop string cut therefore follow from the origins of the tokens that stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_jax.trace import Trace

ORIGINS = ("prompt", "accepted", "corrected", "bonus")
"""Names of `decode.PROMPT`, `ACCEPTED`, `CORRECTED` and `BONUS`."""

FINISH_REASONS = ("running", "eos", "length", "error", "stop")
"""Names of `decode.RUNNING`, `EOS`, `LENGTH`, `ERROR` and `STOP`."""


@dataclass(frozen=True)
class Result:
    """One finished request. Lists of tokens have one entry a new token.

    Attributes:
      index: The request's place among the prompts (in the data set).
      prompt: The prompt's text.
      prompt_token_ids: The prompt's tokens, as the model read them.
      text: The new text, without the EOS and cut before the stop string.
      token_ids: The new tokens; the last one is the EOS, or the token that completes
        the stop string, where one of them ended the text.
      finish_reason: "eos", "stop", "length" or "error" (the model's logits after
        `token_ids` were not finite).
      logprobs: Log-probability of each token under the model itself, in nats.
      policy_logprobs: The same under the sampling settings.
      origins: "accepted", "corrected" or "bonus" for each token.
      rounds: Target passes that emitted something.
      num_drafted: Tokens proposed in these rounds; of a tree all nodes, of which one
        path can be emitted.
      num_accepted: Proposed tokens that were emitted.
      acceptance_histogram: Entry n is the number of rounds that emitted n drafts.
      lossless: Whether the rule keeps the target's distribution; not so of a lossy one.
      trace: What every round did, without the axis of rows, if that was asked for. The
        last round may have emitted more than a stop string left of it.
    """

    index: int
    prompt: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float]
    policy_logprobs: list[float]
    origins: list[str]
    rounds: int
    num_drafted: int
    num_accepted: int
    acceptance_histogram: list[int]
    lossless: bool = True
    trace: Trace | None = field(default=None, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids)

    @property
    def mean_acceptance_length(self) -> float:
        """New tokens per round, the corrected or bonus one included; 0 for no round."""
        return self.num_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def error_position(self) -> int | None:
        """Position of the token for which the logits were not finite, or None."""
        if self.finish_reason != "error":
            return None
        return len(self.prompt_token_ids) + self.num_tokens


class NonFiniteLogitsError(FloatingPointError):
    """The model gave logits that are not finite; other requests were finished.

    Attributes:
      results: What all requests came to; the broken ones end before the bad logits.
    """

    def __init__(self, results: Sequence[Result]):
        self.results = list(results)
        broken = [r for r in self.results if r.finish_reason == "error"]
        places = ", ".join(
            f"prompt {r.index} at position {r.error_position}" for r in broken
        )
        super().__init__(
            f"the target's logits are not finite for {places}; the other requests are "
            "complete (see `.results`). Check the checkpoint, or use dtype='float32' "
            "if it overflows in a smaller one"
        )


def acceptance_histogram(origins: Sequence[int], depth: int) -> list[int]:
    """Returns how many rounds emitted n drafted tokens, for n = 0 .. depth.

    Args:
      origins: `decode.ACCEPTED`, `CORRECTED` or `BONUS` for each emitted token.
      depth: The most tokens that a round can accept.

    Example:
      Rounds of 2, 0 and 1 accepted tokens, the last one cut after it:

      >>> acceptance_histogram([1, 1, 2, 3, 1], depth=2)
      [1, 1, 1]
    """
    histogram = [0] * (depth + 1)
    accepted = 0
    for origin in origins:
        if ORIGINS[origin] == "accepted":
            accepted += 1
        else:
            histogram[accepted] += 1
            accepted = 0
    if accepted:
        histogram[accepted] += 1
    return histogram

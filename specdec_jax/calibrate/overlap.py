"""Alpha by its definition: how much the two laws overlap on the target's own text.

    alpha = E over contexts h of the target's own text of  sum_x min(p(x | h), q(x | h))

It is the mean chance that the first draft of a round is accepted, were every place of
the text the start of one (Leviathan et al., arXiv:2211.17192, section 3.2). The text is
plain decoding's. At each of its places the drafter is asked for one token, whose law is
set against the target's row, and nothing is accepted: any drafter can be scored so,
through the loop that it is made for. A deterministic draft is one-hot; the sum is then
p of the drafted token, and 0 where nothing is drafted.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.base import SIBLINGS, Draft, Noise, Verdict
from specdec_jax.benchmark.bootstrap import Estimate, estimate
from specdec_jax.benchmark.sweep import with_length
from specdec_jax.benchmark.units import batches, check_finite, run_rounds
from specdec_jax.drafters.around import Around
from specdec_jax.rng import draw
from specdec_jax.sampling import History, policy
from specdec_jax.text.packing import Plan
from specdec_jax.text.running import Engine


class Overlaps(NamedTuple):
    """Sums over the places of each prompt's text."""

    total: Float[np.ndarray, " P"]
    """Of sum min(p, q)."""
    num_places: Int[np.ndarray, " P"]

    def alpha(self) -> Estimate:
        """Returns the mean over all places, with its bootstrap interval over prompts.

        Prompts are drawn, not places: places of one text are correlated.
        """

        def mean(weights):
            return weights @ self.total / np.maximum(weights @ self.num_places, 1)

        return estimate(mean, len(self.total))


def overlaps(
    engine: Engine, plan: Plan, *, num_prompts: int, batch_size: int = 1
) -> Overlaps:
    """Decodes plainly and measures the overlap at every place but each text's last.

    Args:
      engine: Target and drafter; the rule plays no part.
      plan: The requests, of at least two new tokens each. The draft's policy is the
        target's.
      num_prompts: P. Request i has prompt i modulo P.
      batch_size: Rows of a batch.

    Raises:
      ValueError: The drafter's length cannot be varied.
      FloatingPointError: The target's logits are not finite.
    """
    witness = Witness(with_length(engine.drafter, 1))
    engine = engine._replace(drafter=witness, rule=Plain())
    total = np.zeros(num_prompts, np.float64)
    num_places = np.zeros(num_prompts, np.int64)
    for requests, batch in batches(plan, batch_size):
        state = engine.start(batch, witness)
        _, state = run_rounds(engine, state)
        indices = [request.index for request in requests]
        check_finite(state, indices)
        _, sums, counts = state.drafter_state
        prompts = [index % num_prompts for index in indices]
        np.add.at(total, prompts, np.asarray(sums)[: len(prompts)])
        np.add.at(num_places, prompts, np.asarray(counts)[: len(prompts)])
    return Overlaps(total, num_places)


def overlap(target_log_probs: Float[Array, "B V"], draft: Draft) -> Float[Array, " B"]:
    """Returns sum min(p, q) of each row's first draft; 0 where there is none.

    Args:
      target_log_probs: Policy rows of the target, in nats.
      draft: Without `log_probs` it is one-hot.

    Example:
      >>> p = jnp.log(jnp.array([[0.2, 0.8]]))
      >>> one = jnp.ones((1,), jnp.int32)
      >>> q = jnp.log(jnp.array([[[0.5, 0.5]]]))
      >>> overlap(p, Draft(one[None], one, q)).round(1).tolist()
      [0.699999988079071]
      >>> overlap(p, Draft(one[None], one)).round(1).tolist()
      [0.800000011920929]
    """
    if draft.log_probs is None:
        shared = jnp.take_along_axis(target_log_probs, draft.tokens[:, :1], axis=1)
    else:
        shared = jnp.minimum(target_log_probs, draft.log_probs[:, 0])
    return jnp.where(draft.num_valid > 0, jnp.exp(shared).sum(axis=-1), 0)


@dataclass(frozen=True)
class Plain:
    """The rule that accepts nothing: plain decoding, whatever is drafted."""

    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    siblings: ClassVar[tuple[str, ...]] = SIBLINGS
    noise: ClassVar[str] = "position"

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the target's own rows; see `base.AcceptanceRule.law`."""
        slots = jnp.arange(len(target_log_probs), dtype=jnp.int32)
        stop = (slots == 0).astype(target_log_probs.dtype)
        return stop, jnp.exp(target_log_probs)

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the next token as plain decoding does."""
        path = jnp.arange(len(target_log_probs) - 1, dtype=jnp.int32)
        token = draw(target_log_probs[0], noise, 0)
        return Verdict(jnp.zeros((), jnp.int32), token, path)


@dataclass(frozen=True)
class Witness(Around):
    """Drafts as another drafter does, and adds up how its law overlaps the target's.

    The state is the other's, the sum and the number of places of each row.
    """

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns sums of nothing."""
        inner = self.drafter.init(params, batch_size, capacity, inputs)
        zeros = jnp.zeros((batch_size,), jnp.float32)
        return inner, zeros, jnp.zeros((batch_size,), jnp.int32)

    def prefill(self, params, state, *chunk):
        """Reads one chunk of the prompts."""
        return self.drafter.prefill(params, state[0], *chunk), *state[1:]

    def draft(self, state, context):
        """Drafts."""
        draft, inner, cache = self.drafter.draft(state[0], context)
        return draft, (inner, *state[1:]), cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Adds the overlap at every place but the last, where nothing is drafted."""
        inner, total, count = state
        inner = self.drafter.update(
            params, inner, context, draft, target_output, verdict
        )
        history = History.plain(context.tokens, context.length)
        row = policy(target_output.logits[:, :1], context.sampling, history)[:, 0]
        allowed = context.max_draft > 0
        total = total + jnp.where(allowed, overlap(row, draft), 0)
        return inner, total, count + allowed.astype(jnp.int32)

"""A draft that is itself drafted: speculative decoding inside speculative decoding.

The middle model's tokens are what the target judges; an inner drafter proposes them to
the middle model, through the very round that the outer loop runs (Spector and Re,
arXiv:2308.04623, with n-grams inside; to any depth the vertical cascade of
arXiv:2312.11462). Inner rounds are exact, so every token that comes out of them is a
draw from the middle model's own law, whether it was accepted, corrected or a bonus.
That law, and no other, is what the outer rule is told: reporting the inner draft's law
where it was accepted, or the residual where it was not, spoils the text.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.base import (
    AcceptanceRule,
    Cache,
    Draft,
    Drafter,
    LanguageModel,
    Noise,
    Params,
    PyTree,
    RoundContext,
)
from specdec_jax.drafters.children import (
    check_children,
    with_num_draft_tokens,
    with_window,
)
from specdec_jax.drafters.model import Fitted
from specdec_jax.rng import PositionNoise
from specdec_jax.sampling import is_greedy
from specdec_jax.state import append
from specdec_jax.verify import Round, verify_round


@dataclass(frozen=True)
class Nested:
    """Drafts with a middle model that an inner drafter drafts for.

    `Params.draft` is a pair: the middle model's variables and the inner drafter's. A
    draft takes as many inner rounds as its slowest row needs.

    Args:
      middle: The model whose law the drafted tokens have.
      inner: Drafts for it; another `Nested` makes a deeper cascade.
      num_draft_tokens: Tokens handed over a round, K.
      vocab_size: The target's; None where it is the middle model's own.
      window: Tokens that the middle model reads at a time of what it lacks. It lacks
        one after a draft that was accepted whole, more inside another drafter, which
        sets it.

    Raises:
      ValueError: K is below 1 or below the inner drafter's, or the inner drafter reads
        hidden states or drafts a tree.
    """

    middle: LanguageModel
    inner: Drafter
    num_draft_tokens: int
    vocab_size: int | None = None
    window: int = 1
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses what cannot be nested."""
        check_children("nested", [self.inner])
        if self.num_draft_tokens < max(self.inner.num_nodes, 1):
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}; it must be at least 1 "
                f"and at least the inner drafter's {self.inner.num_nodes}"
            )

    @property
    def num_nodes(self) -> int:
        """K."""
        return self.num_draft_tokens

    depth = num_nodes

    @property
    def model(self) -> tuple[Any, Any]:
        """The models that draft, in the structure of `Params.draft`."""
        return self.middle, getattr(self.inner, "model", None)

    def with_num_draft_tokens(self, num_draft_tokens: int) -> "Nested":
        """Returns the same with another K, and with an inner one that is no longer."""
        least = min(self.inner.num_nodes, num_draft_tokens)
        inner = with_num_draft_tokens(self.inner, least) if least else self.inner
        return replace(self, num_draft_tokens=num_draft_tokens, inner=inner)

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the middle model's empty cache and the inner drafter's state."""
        target, inner, own = self._parts(params)
        return _State(
            target.init_cache(batch_size, capacity),
            jnp.zeros((batch_size,), jnp.int32),
            inner.init(own, batch_size, capacity, inputs),
        )

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts."""
        target, inner, own = self._parts(params)
        output, cache = target.apply(own.target, tokens, state.cache.rewind(start))
        read = jnp.where(num_valid > 0, start + num_valid, state.num_read)
        return _State(
            cache.rewind(read),
            read,
            inner.prefill(own, state.inner, tokens, start, num_valid, output),
        )

    def draft(self, state, context: RoundContext):
        """Runs inner rounds until every row has its tokens."""
        target, inner, own = self._parts(context.params)
        state = self._catch_up(state, context)
        laws = None
        if not is_greedy(context.sampling):
            vocab_size = self.vocab_size or self.middle.vocab_size
            shape = (len(context.length), self.num_draft_tokens, vocab_size)
            laws = jnp.zeros(shape, jnp.float32)

        def wanted(found: _Found):
            return (found.length - context.length < context.max_draft).any()

        def body(found: _Found) -> _Found:
            done = found.length - context.length
            noise = context.noise.child(2 * found.rounds, done)
            coins = context.noise.child(2 * found.rounds + 1, done)
            # Of a round's tokens the last one is the middle model's.
            room = jnp.clip(context.max_draft - done - 1, 0, inner.depth)
            round_ = verify_round(
                own,
                found.inner,
                context._replace(
                    params=own,
                    tokens=found.tokens,
                    length=found.length,
                    max_draft=room,
                    noise=noise,
                    target_cache=found.cache,
                ),
                context.sampling,
                coins,
                target=target,
                drafter=inner,
                rule=inner_rule(coins),
            )
            gained = jnp.minimum(
                round_.verdict.num_accepted + 1, context.max_draft - done
            )
            return found.add(round_, self._told(round_), gained, done)

        zero = jnp.zeros((), jnp.int32)
        start = _Found(
            zero, context.tokens, context.length, state.cache, state.inner, laws
        )
        found = jax.lax.while_loop(wanted, body, start)
        slots = jnp.arange(self.num_draft_tokens, dtype=jnp.int32)[None]
        drafted = jnp.take_along_axis(
            found.tokens, context.length[:, None] + slots, axis=1
        )
        draft = Draft(drafted, found.length - context.length, found.log_probs)
        state = state._replace(cache=found.cache, inner=found.inner)
        return draft, state, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Keeps what the middle model read of accepted tokens."""
        accepted = context.length + verdict.num_accepted
        return state._replace(num_read=jnp.minimum(state.cache.length, accepted))

    def _told(self, found: Round) -> Float[Array, "B E V"]:
        """Returns the law that is told of each token of an inner round: the model's."""
        return found.log_probs

    def _parts(self, params: Params) -> tuple[LanguageModel, Drafter, Params]:
        """Returns target, drafter and variables of the inner rounds."""
        target: Any = self.middle
        if self.vocab_size not in (None, target.vocab_size):
            target = Fitted(target, self.vocab_size or 0)
        inner = with_window(self.inner, max(self.window, self.num_draft_tokens + 1))
        return target, inner, Params(params.draft[0], params.draft[1])

    def _catch_up(self, state: "_State", context: RoundContext) -> "_State":
        """Reads all committed tokens but the last one, if some are not read."""
        target, _, own = self._parts(context.params)
        wanted = context.length - 1
        size = min(self.window, context.tokens.shape[1])
        places = jnp.arange(size, dtype=jnp.int32)[None]

        def read_more(state: _State) -> _State:
            start = jnp.minimum(state.num_read, wanted)
            block = jnp.take_along_axis(context.tokens, start[:, None] + places, axis=1)
            _, cache = target.apply(own.target, block, state.cache.rewind(start))
            read = jnp.minimum(start + size, wanted)
            return state._replace(cache=cache.rewind(read), num_read=read)

        state = jax.lax.while_loop(
            lambda state: (state.num_read < wanted).any(), read_more, state
        )
        return state._replace(cache=state.cache.rewind(wanted), num_read=wanted)


class _State(NamedTuple):
    cache: Cache
    """The middle model's."""
    num_read: Int[Array, " B"]
    """Slots of it that hold committed tokens for certain."""
    inner: PyTree


class _Found(NamedTuple):
    """What inner rounds have made so far."""

    rounds: Int[Array, ""]
    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    cache: Cache
    inner: PyTree
    log_probs: Float[Array, "B K V"] | None
    """The middle model's law of each drafted token."""

    def add(
        self,
        found: Round,
        told: Float[Array, "B E V"],
        gained: Int[Array, " B"],
        done: Int[Array, " B"],
    ) -> "_Found":
        """Returns these rounds and one more, of which `gained` tokens are kept."""
        laws = self.log_probs
        if laws is not None:
            laws = append(laws, done, told, gained)
        return _Found(
            self.rounds + 1,
            append(self.tokens, self.length, found.tokens, gained),
            self.length + gained,
            found.cache,
            found.drafter_state,
            laws,
        )


def inner_rule(noise: Noise) -> AcceptanceRule:
    """Returns the rule of inner rounds: by position the noise of all drafts is shared.

    Then the middle model's tokens are its own draws, as of any model that drafts.

    Example:
      >>> from specdec_jax.rng import NoNoise
      >>> inner_rule(NoNoise())
      Rejection()
    """
    return Coupled() if isinstance(noise, PositionNoise) else Rejection()

"""A small language model as drafter (Leviathan et al., Chen et al.)."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax.base import LanguageModel, RoundContext
from specdec_jax.drafters.chain import Stop, draw_chain


@dataclass(frozen=True)
class ModelDrafter:
    """Draws a chain from a causal language model with a cache of its own.

    Every call first re-reads the last `window` committed tokens. After a fully accepted
    round the cache lacks the last drafted token, and after a rejected one it holds the
    wrong token there; the window mends both with one shape.

    Args:
      model: The draft model.
      num_draft_tokens: Draft length K.
      vocab_size: The target's; None where it is the model's own. Ids that the target
        lacks are never drawn, ids that the draft lacks have q = 0.
      window: Tokens re-read each round: 2 for the loop's own drafter, the outermost
        K + 1 for a child of a composed one.
      stop: When a row ends its draft early; None never does.
    """

    model: LanguageModel
    num_draft_tokens: int
    vocab_size: int | None = None
    window: int = 2
    stop: Stop | None = None
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses sizes that make no draft."""
        if self.num_draft_tokens < 1 or self.window < 2:
            raise ValueError(
                "num_draft_tokens must be at least 1 and window at least 2, got "
                f"{self.num_draft_tokens} and {self.window}; "
                "for plain decoding use no drafter."
            )

    @property
    def num_nodes(self) -> int:
        """K."""
        return self.num_draft_tokens

    depth = num_nodes

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns an empty cache."""
        return self.model.init_cache(batch_size, capacity)

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Reads one chunk of the prompts."""
        _, cache = self._apply(params, tokens, state.rewind(start))
        return cache.rewind(jnp.where(num_valid > 0, start + num_valid, state.length))

    def draft(self, state, context: RoundContext):
        """Draws `max_draft` tokens a row; as many forwards as the longest row needs."""

        def read(token, cache):
            return self._apply(context.params, token, cache)

        logits, cache = self._catch_up(state, context)
        draft, cache = draw_chain(
            read, logits, cache, context, self.num_draft_tokens, self.stop
        )
        return draft, cache, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is: the next window rolls it back."""
        return state

    def _catch_up(self, cache, context):
        """Re-reads the window; returns the logits [B, 1, V] after the last token."""
        start = jnp.maximum(context.length - self.window, 0)
        slots = start[:, None] + jnp.arange(self.window, dtype=jnp.int32)[None]
        window = jnp.take_along_axis(context.tokens, slots, axis=1)
        logits, cache = self._apply(context.params, window, cache.rewind(start))
        last = (context.length - 1 - start)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)
        return logits, cache.rewind(context.length)

    def _apply(self, params, tokens, cache, block=None):
        model = Fitted(self.model, self.vocab_size or self.model.vocab_size)
        output, cache = model.apply(params.draft, tokens, cache, block=block)
        return output.logits, cache


@dataclass(frozen=True)
class Fitted:
    """A model with the target's vocabulary; see `fit_vocabulary`."""

    model: LanguageModel
    vocab_size: int

    def init_cache(self, batch_size, capacity):
        """Returns the model's own cache."""
        return self.model.init_cache(batch_size, capacity)

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        output, cache = self.model.apply(
            variables,
            jnp.minimum(tokens, self.model.vocab_size - 1),
            cache,
            block=block,
            hidden_layers=hidden_layers,
        )
        logits = fit_vocabulary(output.logits, self.vocab_size)
        return output._replace(logits=logits), cache


def fit_vocabulary(
    logits: Float[Array, "*A U"], vocab_size: int
) -> Float[Array, "*A V"]:
    """Cuts ids that the target lacks; ids that the draft lacks become impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)

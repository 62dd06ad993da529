"""The target's own first layers as a draft, on the target's own cache.

LayerSkip (arXiv:2404.16710) and Draft & Verify (arXiv:2309.08168) draft with a part of
the target, which costs no second model. Here it is the first E layers, then the final
norm and the head. Whatever it writes into the free slots of the target's cache is what
the target would write there too, and verifying writes all layers again: there is no
cache of its own, no window to catch up, and no copy of a weight.

    slot            n-1    n    n+1   n+2       n committed tokens
    drafting reads  last   d1   d2              first E layers written
    verify reads    last   d1   d2    d3        all layers written

Without training for it (LayerSkip's early-exit loss) an early exit of a small model
accepts little; it pays with targets whose depth is mostly refinement.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp

from specdec_jax.base import Cache, LanguageModel, RoundContext
from specdec_jax.drafters.chain import Stop, draw_chain


@dataclass(frozen=True)
class EarlyExit:
    """Draws a chain from a part of the target, in the free slots of its cache.

    Lossless under every chain rule: the law of each token is recorded.

    Args:
      model: The target cut to its first layers; see `first_layers`. It must take the
        target's variables and cache, and hand back what it does not use.
      num_draft_tokens: Draft length K.
      stop: When a row ends its draft early; None never does.
    """

    model: LanguageModel
    num_draft_tokens: int
    stop: Stop | None = None
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Refuses sizes that make no draft."""
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}; "
                "for plain decoding use no drafter."
            )

    @property
    def num_nodes(self) -> int:
        """K."""
        return self.num_draft_tokens

    depth = num_nodes

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the empty state: the target's cache is all it needs."""
        return ()

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Returns the state as it is."""
        return state

    def draft(self, state, context: RoundContext):
        """Draws `max_draft` tokens a row, and hands back the target's cache.

        Raises:
          ValueError: There is no cache to share: it is no longer the first to draft.
        """
        if context.target_cache is None:
            raise ValueError(
                "early exit drafts on the target's cache, which goes to the first of "
                "several drafts alone; put it first"
            )

        def read(token, cache):
            output, cache = self.model.apply(context.params.target, token, cache)
            return output.logits, cache

        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        logits, cache = read(last, self._committed(context))
        draft, cache = draw_chain(
            read, logits, cache, context, self.num_draft_tokens, self.stop
        )
        return draft, state, cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is."""
        return state

    def _committed(self, context: RoundContext) -> Cache:
        """Returns the target's cache: it holds all committed tokens but the last."""
        cache: Cache = context.target_cache.rewind(context.length - 1)
        return cache


def first_layers(target: Any, num_layers: int) -> LanguageModel:
    """Returns the target cut to its first layers; it takes the target's variables.

    Args:
      target: A `networks.Decoder`, or a linen module with such a config.
      num_layers: How many layers it keeps, E.

    Raises:
      ValueError: The target has no layers to cut, or not that many.

    Example:
      >>> from specdec_jax.networks import Decoder, DecoderConfig
      >>> config = DecoderConfig(
      ...     vocab_size=11, width=8, num_layers=3, num_heads=2, num_kv_heads=1,
      ...     head_dim=4, mlp_width=16, max_positions=64)
      >>> first_layers(Decoder(config), 1).config.num_layers
      1
    """
    config: Any = getattr(target, "config", None)
    depth = getattr(config, "num_layers", None)
    if depth is None or not hasattr(target, "clone"):
        raise ValueError(
            f"early exit needs a target made of layers that can be cut, and "
            f"{type(target).__name__} has no config that counts them; draft with a "
            "model or ngram"
        )
    if not 1 <= num_layers < depth:
        raise ValueError(
            f"early exit after layer {num_layers} of {depth}: give 1 to {depth - 1}"
        )
    windows = config.windows[:num_layers]
    return target.clone(config=replace(config, num_layers=num_layers, windows=windows))

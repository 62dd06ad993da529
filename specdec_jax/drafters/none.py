"""The empty drafter: plain decoding is the same loop with nothing drafted."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from specdec_jax.base import Draft, RoundContext


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing; each round is one plain decoding step."""

    num_nodes: ClassVar[int] = 0
    depth: ClassVar[int] = 0
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    def init(self, params, batch_size, capacity, inputs=None):
        """Returns the empty state."""
        return ()

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        """Returns the state as it is."""
        return state

    def draft(self, state, context: RoundContext):
        """Returns a draft of no nodes."""
        batch_size = context.length.shape[0]
        draft = Draft(
            tokens=jnp.zeros((batch_size, 0), jnp.int32),
            num_valid=jnp.zeros((batch_size,), jnp.int32),
        )
        return draft, state, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        """Returns the state as it is."""
        return state

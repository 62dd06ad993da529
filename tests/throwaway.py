"""Drafters that exist to prove the contract: each leans on another part of it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from specdec_jax.base import Draft


class _Plain:
    """The parts that most of these do not need."""

    siblings: ClassVar = "none"
    hidden_layers: ClassVar = ()

    def init(self, params, batch_size, capacity, inputs=None):
        return ()

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        return state

    def update(self, params, state, context, draft, target_output, verdict):
        return state


def _last(context):
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)


@dataclass(frozen=True)
class HiddenReader(_Plain):
    """Keeps the target's hidden state of the token before the last, and drafts from it.

    On the table model this repeats what the target made of that token, so that under
    greedy decoding the draft is the last committed token once more.
    """

    target: Any
    num_nodes: ClassVar = 1
    depth: ClassVar = 1
    siblings: ClassVar = "none"
    hidden_layers: ClassVar = (-1,)

    def init(self, params, batch_size, capacity, inputs=None):
        return jnp.full((batch_size, 1), -1.0, jnp.float32)

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        last = jnp.maximum(num_valid - 1, 0)[:, None, None]
        seen = jnp.take_along_axis(target_output.hidden[0], last, axis=1)[:, 0]
        return jnp.where(num_valid[:, None] > 0, seen, state)

    def draft(self, state, context):
        before = jnp.maximum(context.length[:, None] - 2, 0)
        token = jnp.take_along_axis(context.tokens, before, axis=1)[:, 0]
        code = jnp.maximum(state[:, 0], 0).astype(jnp.int32)
        row = context.params.target["params"]["table"][token, code]
        drafted = jnp.argmax(row, -1).astype(jnp.int32)[:, None]
        return Draft(drafted, context.max_draft), state, context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        row = verdict.num_accepted[:, None, None]
        return jnp.take_along_axis(target_output.hidden[0], row, axis=1)[:, 0]


@dataclass(frozen=True)
class Scheduled:
    """Lets an inner drafter draft another number of tokens in each round."""

    inner: Any
    schedule: tuple[int, ...]
    siblings: ClassVar = "none"
    hidden_layers: ClassVar = ()

    @property
    def num_nodes(self):
        return self.inner.num_nodes

    depth = num_nodes

    def init(self, params, batch_size, capacity, inputs=None):
        inner = self.inner.init(params, batch_size, capacity, inputs)
        return jnp.zeros((batch_size,), jnp.int32), inner

    def prefill(self, params, state, *chunk):
        return state[0], self.inner.prefill(params, state[1], *chunk)

    def draft(self, state, context):
        schedule = jnp.array(self.schedule, jnp.int32)
        allowed = schedule[state[0] % len(self.schedule)]
        context = context._replace(max_draft=jnp.minimum(context.max_draft, allowed))
        draft, inner, cache = self.inner.draft(state[1], context)
        return draft, (state[0] + 1, inner), cache

    def update(self, params, state, *round_):
        return state[0], self.inner.update(params, state[1], *round_)

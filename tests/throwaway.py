"""Drafters that exist to prove the contract: each leans on another part of it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from specdec_jax.acceptance import Rejection
from specdec_jax.base import Draft, Params
from specdec_jax.drafters import ModelDrafter
from specdec_jax.verify import verify_round


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
class Tree(_Plain):
    """A static binary tree of depth 2, a function of the last token."""

    vocab_size: int
    num_nodes: ClassVar = 6
    depth: ClassVar = 2
    siblings: ClassVar = "ranked"

    def draft(self, state, context):
        one = _last(context) + jnp.arange(1, 3, dtype=jnp.int32)[None]
        two = jnp.repeat(one, 2, axis=1) + jnp.array([[0, 2, 1, 1]], jnp.int32)
        tokens = jnp.concatenate([one, two], axis=1) % self.vocab_size
        parents = jnp.array([[-1, -1, 0, 0, 1, 1]], jnp.int32)
        batch = len(tokens)
        draft = Draft(
            tokens=tokens,
            num_valid=jnp.full((batch,), 6, jnp.int32),
            parents=jnp.broadcast_to(parents, (batch, 6)),
        )
        return draft, state, context.target_cache


@dataclass(frozen=True)
class EarlyExit(_Plain):
    """Drafts greedily with the target itself, in the free slots of its cache."""

    target: Any
    num_nodes: int

    @property
    def depth(self):
        return self.num_nodes

    def draft(self, state, context):
        cache = context.target_cache.rewind(context.length - 1)
        token, drafted = _last(context), []
        for _ in range(self.num_nodes):
            output, cache = self.target.apply(context.params.target, token, cache)
            token = jnp.argmax(output.logits, -1).astype(jnp.int32)
            drafted.append(token)
        return Draft(jnp.concatenate(drafted, 1), context.max_draft), state, cache


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


@dataclass(frozen=True)
class Nested:
    """The draft is a middle model, itself decoded speculatively by an inner drafter."""

    middle: Any
    inner: ModelDrafter
    rounds: int = 2
    share_noise: bool = False  # the fault: inner coins are the outer ones
    siblings: ClassVar = "none"
    hidden_layers: ClassVar = ()

    @property
    def num_nodes(self):
        return self.rounds * (self.inner.num_nodes + 1)

    depth = num_nodes

    def _params(self, params):
        return Params(params.draft[0], params.draft[1])

    def init(self, params, batch_size, capacity, inputs=None):
        return (
            self.middle.init_cache(batch_size, capacity),
            self.inner.init(self._params(params), batch_size, capacity),
        )

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        cache, inner = state
        own = self._params(params)
        output, read = self.middle.apply(own.target, tokens, cache.rewind(start))
        cache = read.rewind(jnp.where(num_valid > 0, start + num_valid, cache.length))
        inner = self.inner.prefill(own, inner, tokens, start, num_valid, output)
        return cache, inner

    def draft(self, state, context):
        cache, inner = state
        own = self._params(context.params)
        rows = jnp.arange(len(context.length), dtype=jnp.int32)[:, None]
        # Catch up: the middle model's cache may hold rejected tokens or a hole.
        window = self.num_nodes + 1
        start = jnp.maximum(context.length - window, 0)
        slots = start[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
        block = jnp.take_along_axis(context.tokens, slots, axis=1)
        _, cache = self.middle.apply(own.target, block, cache.rewind(start))
        cache = cache.rewind(context.length - 1)
        laws = jnp.zeros(
            (len(rows), self.num_nodes, self.middle.vocab_size), jnp.float32
        )
        tokens, length = context.tokens, context.length
        for r in range(self.rounds):
            done = length - context.length
            noises = [context.noise.child(2 * r + side, done) for side in (0, 1)]
            if self.share_noise:
                noises = [context.noise, context.noise]
            room = jnp.clip(context.max_draft - done - 1, 0, self.inner.depth)
            found = verify_round(
                own,
                inner,
                context._replace(
                    params=own,
                    tokens=tokens,
                    length=length,
                    max_draft=room,
                    noise=noises[0],
                    target_cache=cache,
                ),
                context.sampling,
                noises[1],
                target=self.middle,
                drafter=self.inner,
                rule=Rejection(),
            )
            inner, cache = found.drafter_state, found.cache
            gained = jnp.minimum(
                found.verdict.num_accepted + 1, context.max_draft - done
            )
            places = jnp.arange(found.tokens.shape[1], dtype=jnp.int32)[None]
            kept = places < gained[:, None]
            slots = jnp.where(kept, length[:, None] + places, tokens.shape[1])
            tokens = tokens.at[rows, slots].set(found.tokens, mode="drop")
            slots = jnp.where(kept, done[:, None] + places, self.num_nodes)
            laws = laws.at[rows, slots].set(found.log_probs, mode="drop")
            length = length + gained
        slots = jnp.arange(self.num_nodes, dtype=jnp.int32)[None]
        drafted = jnp.take_along_axis(tokens, context.length[:, None] + slots, axis=1)
        draft = Draft(drafted, length - context.length, laws)
        return draft, (cache, inner), context.target_cache

    def update(self, params, state, context, draft, target_output, verdict):
        return state

"""What is audited: a target, a drafter and a rule in the loop, and whose law is meant.

A fault is the same subject with one part exchanged, so levels know nothing of faults.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from specdec_jax import decode
from specdec_jax.base import LanguageModel, Params, Variables
from specdec_jax.decode import DecodeState
from specdec_jax.drafters import (
    Adaptive,
    EarlyExit,
    JoinedTrees,
    ModelDrafter,
    Nested,
    NgramDrafter,
    Staged,
    TreeDrafter,
)
from specdec_jax.sampling import Sampling, SamplingRows


class DraftLaw(NamedTuple):
    """Where the law of drafted tokens comes from."""

    model: LanguageModel | None = None
    """Whose own law each token has, where there is one."""
    variables: Variables = None
    deterministic: bool = False
    """Whether each token has all the mass; without a model only."""


class Subject(NamedTuple):
    """The parts of a decoder, and the model that its text is said to come from."""

    params: Params
    target: Any
    """A `base.LanguageModel`."""
    drafter: Any
    """A `base.Drafter`."""
    rule: Any
    """A `base.AcceptanceRule`."""
    step: Callable = decode.step
    """One round; another one than `decode.step` only to plant a fault."""
    honest: Any = None
    """The model whose law is meant, with the target's variables; None: the target."""

    @classmethod
    def of(cls, decoder: Any) -> "Subject":
        """Returns the parts of a `SpeculativeDecoder`."""
        engine = decoder.engine
        return cls(engine.params, engine.target, engine.drafter, engine.rule)

    @property
    def reference(self) -> LanguageModel:
        """The model whose law is meant."""
        return self.target if self.honest is None else self.honest

    @property
    def draft_laws(self) -> list[DraftLaw]:
        """Whose laws the rule is told of, in the order of the draft."""
        return list(_draft_laws(self.drafter, self.params, self.params.draft))

    @property
    def loop(self) -> dict[str, Any]:
        """The static arguments of a step."""
        return {"target": self.target, "drafter": self.drafter, "rule": self.rule}


def _draft_laws(drafter: Any, params: Params, variables: Any) -> Iterator[DraftLaw]:
    """Finds what draws the tokens inside a drafter."""
    if isinstance(drafter, Adaptive):  # lengths change no law
        yield from _draft_laws(drafter.drafter, params, variables)
    elif isinstance(drafter, ModelDrafter):
        yield DraftLaw(drafter.model, variables)
    elif isinstance(drafter, EarlyExit):
        yield DraftLaw(drafter.model, params.target)
    elif isinstance(drafter, Nested):
        yield DraftLaw(drafter.middle, variables[0])
    elif isinstance(drafter, Staged):
        each = variables or (None,) * len(drafter.stages)
        for stage, own in zip(drafter.stages, each, strict=True):
            yield from _draft_laws(stage, params, own)
    elif isinstance(drafter, JoinedTrees):
        for tree, own in zip(drafter.trees, variables, strict=True):
            yield from _draft_laws(tree, params, own)
    elif drafter.siblings == "ranked":  # whatever they are, no law is told of them
        yield DraftLaw(deterministic=True)
    elif isinstance(drafter, TreeDrafter):
        yield DraftLaw(drafter.model, variables)
    else:
        yield DraftLaw(deterministic=isinstance(drafter, NgramDrafter))


def begin(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    keys: Key[Array, " B"],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
) -> DecodeState:
    """Returns the state of prompts that were read, ready for its first round."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    size = int(lengths.max()) + max_new_tokens
    tokens = np.zeros((len(prompts), decode.bucket(size)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    rows = sampling.rows(
        len(prompts), subject.target.vocab_size, prompt_length=jnp.asarray(lengths)
    )
    return _begin(
        subject.params,
        keys,
        tokens,
        lengths,
        np.int32(max_new_tokens),
        np.array(eos_token_ids, np.int32),
        rows,
        target=subject.target,
        drafter=subject.drafter,
    )


@partial(jax.jit, static_argnames=("target", "drafter"))
def _begin(params, keys, tokens, lengths, budget, eos, rows, *, target, drafter):
    state = decode.init(
        params,
        keys,
        tokens,
        lengths,
        target=target,
        drafter=drafter,
        max_new_tokens=jnp.broadcast_to(budget, lengths.shape),
        capacity=tokens.shape[1] + drafter.num_nodes + 1,
        sampling=rows,
        eos_token_ids=eos,
    )
    return decode.prefill(params, state, target=target, drafter=drafter)


def finish(subject: Subject, state: DecodeState) -> DecodeState:
    """Runs rounds until every row is finished."""
    return _finish(subject.params, state, step=subject.step, **subject.loop)


@partial(jax.jit, static_argnames=("step", "target", "drafter", "rule"))
def _finish(params, state, *, step, target, drafter, rule):
    def body(state):
        return step(params, state, target=target, drafter=drafter, rule=rule)[0]

    return jax.lax.while_loop(lambda state: ~state.done.all(), body, state)


@partial(jax.jit, static_argnames=("step", "target", "drafter", "rule"))
def one_round(params, state, *, step, target, drafter, rule):
    """Runs one round; see `decode.step`."""
    return step(params, state, target=target, drafter=drafter, rule=rule)


def check_finite(state: DecodeState) -> None:
    """Refuses logits that are not numbers: they have no law.

    Raises:
      FloatingPointError: Naming the position.
    """
    broken = np.asarray(state.finish) == decode.ERROR
    if broken.any():
        row = int(broken.argmax())
        raise FloatingPointError(
            f"the target's logits are not finite at position {int(state.length[row])} "
            f"of row {row}; check the checkpoint, or use dtype float32 if it overflows "
            "in a smaller one"
        )


def read_prompt(
    model: LanguageModel, variables: Any, prompt: Sequence[int], capacity: int
) -> Any:
    """Returns a cache of one row that holds all of a prompt but its last token."""
    tokens = np.zeros((1, decode.bucket(len(prompt))), np.int32)
    tokens[0, : len(prompt)] = prompt
    last = np.array([len(prompt) - 1], np.int32)
    return _read(variables, tokens, last, model=model, capacity=capacity)


@partial(jax.jit, static_argnames=("model", "capacity"))
def _read(variables, tokens, length, *, model, capacity):
    cache = model.init_cache(1, max(capacity, tokens.shape[1]))
    return model.apply(variables, tokens, cache)[1].rewind(length)


def settings(
    sampling: Sampling, batch_size: int, vocab_size: int, prompt_length: Int[Array, ""]
) -> SamplingRows:
    """Returns the same settings for every row of one prompt."""
    length = jnp.broadcast_to(prompt_length, (batch_size,))
    return sampling.rows(batch_size, vocab_size, prompt_length=length)

"""The audit's exact table model, and its laws worked out in numpy."""

import dataclasses
import itertools

import numpy as np

from specdec_jax.audit.table import CODES, TableModel, mix, table

__all__ = [
    "CODES",
    "Softer",
    "TableModel",
    "joint_law",
    "mix",
    "next_logits",
    "softmax",
    "table",
]


def next_logits(model, variables, contexts):
    """Returns float64 logits [C, V] after each context, worked out in numpy."""
    logits = np.asarray(variables["params"]["table"], np.float64)
    rows = []
    for context in contexts:
        tokens, positions = np.array(context), np.arange(len(context))
        marks = (tokens + 1) * (3 * positions + 2) + tokens**2
        rows.append(logits[tokens[-1], marks.sum() % CODES])
    return np.stack(rows)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def joint_law(model, variables, prompt, length, temperature=1.0):
    """Returns P(the next `length` tokens), an array of V^length, by enumeration."""
    vocab = range(model.vocab_size)
    law = np.ones(())
    for size in range(length):
        contexts = [(*prompt, *tail) for tail in itertools.product(vocab, repeat=size)]
        probs = softmax(next_logits(model, variables, contexts) / temperature)
        law = law[..., None] * probs.reshape(law.shape + (model.vocab_size,))
    return law


@dataclasses.dataclass(frozen=True)
class Softer(TableModel):
    """Shares a table model's cache and variables, with another law: an early exit."""

    def apply(self, variables, *arguments, **options):
        output, cache = super().apply(variables, *arguments, **options)
        return output._replace(logits=0.4 * output.logits), cache

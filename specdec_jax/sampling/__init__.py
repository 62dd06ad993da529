"""Sampling settings, and the one function that turns logits into policy rows.

`Sampling` is what a user writes. `Sampling.rows` checks it against a batch and turns
it into `SamplingRows`: one array a setting, one entry a row. `policy` applies them. It
serves plain decoding, the draft, and every row of a verified block, because a rule is
exact only if all of them mean the same law by the same settings.

Values never decide a program, only presence does: a setting that is neutral in all
rows is None and costs nothing; otherwise the rows that do not use it carry its neutral
value.

Order, that of `GenerationMixin._get_logits_processor` in transformers 5.24: logit
bias, repetition penalty, no-repeat n-grams, banned tokens, minimum length, temperature,
top-k, top-p, min-p, typical-p. Banned tokens share the array of the bias: nothing in
between brings a token back. Presence and frequency penalties, which Hugging Face
lacks, follow the repetition penalty as in vLLM.
"""

from specdec_jax.sampling.law import (
    SamplingRows,
    certain,
    is_greedy,
    law_dtype,
    policy,
)
from specdec_jax.sampling.options import Sampling
from specdec_jax.sampling.penalties import History

__all__ = [
    "History",
    "Sampling",
    "SamplingRows",
    "certain",
    "is_greedy",
    "law_dtype",
    "policy",
]

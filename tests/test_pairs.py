"""Every drafter with every lossless rule that judges it, through the audit's levels.

Each part has tests of its own; here are all combinations that a user can ask for, on a
table model: 8,192 rows of three rounds against the target's exact law, and whole texts
against plain decoding's. It takes a dozen minutes: SPECDEC_FULL=1.
"""

import os

import jax
import numpy as np
import pytest
import test_decode
import test_trees

from specdec_jax.acceptance import EVERY_RULE
from specdec_jax.audit.loop_law import loop_law
from specdec_jax.audit.subject import Subject
from specdec_jax.audit.texts import compare_texts
from specdec_jax.base import Params
from specdec_jax.sampling import Sampling

FULL = bool(os.environ.get("SPECDEC_FULL"))
DRAFTERS = {**test_decode.DRAFTERS, **test_trees.TREES}
DRAFTERS["independent"] = (
    test_trees.tree(siblings="independent"),
    test_decode.DRAFT_TABLE,
)
for elsewhere in ("none", "model-1", "model-8", "scheduled", "hidden reader"):
    del DRAFTERS[elsewhere]

PAIRS = [
    (name, rule)
    for name, (drafter, _) in DRAFTERS.items()
    for rule in EVERY_RULE
    if drafter.siblings in EVERY_RULE[rule].siblings
]


@pytest.fixture(autouse=True)
def _few_programs_at_a_time():
    yield
    jax.clear_caches()


@pytest.mark.skipif(not FULL, reason="takes minutes")
@pytest.mark.parametrize("name, rule", PAIRS)
def test_every_pair_is_lossless(name, rule):
    drafter, table = DRAFTERS[name]
    subject = Subject(
        Params(test_decode.TABLE, table),
        test_decode.TARGET,
        drafter,
        EVERY_RULE[rule],
    )
    prompts = [
        np.asarray(tokens)[:length].tolist()
        for tokens, length in zip(test_decode.PROMPTS, test_decode.LENGTHS, strict=True)
    ]
    sampling = Sampling(temperature=1.0)
    found = loop_law(subject, prompts[:2], sampling, num_samples=8192)
    assert found.lossless, found
    assert found.impossible == 0
    assert found.num_tokens >= 3 * 8192
    texts = compare_texts(
        subject, prompts, sampling, max_new_tokens=8, eos_token_ids=(3,)
    )
    assert texts.lossless, texts
    assert texts.near_ties == 0


def test_every_rule_and_every_kind_of_draft_is_among_the_pairs():
    names, rules = (set(column) for column in zip(*PAIRS, strict=True))
    assert rules == set(EVERY_RULE)
    assert names == set(DRAFTERS)

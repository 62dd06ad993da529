"""Real networks: greedy text is transformers', coupled text plain, rows alone."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoints import VARIANTS, build

from specdec_jax import decode, rng
from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.audit import explain_difference
from specdec_jax.base import Params
from specdec_jax.checkpoints import load
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specdec_jax.sampling import Sampling

FULL = bool(os.environ.get("SPECDEC_FULL"))
FAMILIES = ["llama_biases", "mistral", "qwen2_window", "qwen3", "gpt2"]
NEW = 24
PROMPTS = [[5, 9, 5, 9, 5], [7], list(range(3, 40)), [11, 12]]


class Decoded:
    """Runs of one pair over the prompts, each program compiled once."""

    def __init__(self, target, params, draft, draft_params):
        self.target, self.params = target, params
        self.draft, self.draft_params = draft, draft_params
        self.programs = {}

    def drafter(self, kind, num_draft_tokens):
        if kind == "ngram":
            return NgramDrafter(num_draft_tokens), None
        if kind == "model":
            drafter = ModelDrafter(self.draft, num_draft_tokens)
            return drafter, self.draft_params
        return NoDrafter(), None

    def __call__(
        self, kind, num_draft_tokens, rule=Rejection(), *, temperature=0.0,
        prompts=PROMPTS, keys=None, width=40,
    ):  # fmt: skip
        drafter, draft_params = self.drafter(kind, num_draft_tokens)
        name = (drafter, rule, temperature, len(prompts), width)
        if name not in self.programs:
            self.programs[name] = jax.jit(
                lambda params, keys, tokens, lengths: decode.generate(
                    params,
                    keys,
                    tokens,
                    lengths,
                    target=self.target,
                    drafter=drafter,
                    rule=rule,
                    max_new_tokens=NEW,
                    sampling=Sampling(temperature=temperature),
                )  # fmt: skip
            )
        tokens = np.full((len(prompts), width), 1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
        if keys is None:
            keys = rng.request_keys(jax.random.key(3), len(prompts))
        state = self.programs[name](
            Params(self.params, draft_params), keys, jnp.asarray(tokens), lengths
        )
        return [
            np.asarray(row[start : start + NEW]).tolist()
            for row, start in zip(state.tokens, lengths.tolist(), strict=True)
        ]


def assert_same(decoded, ours, theirs, prompts=PROMPTS, **how):
    """Equal texts, or near-ties that are counted and returned."""
    ties = 0
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            keys = how.get("keys")
            found = explain_difference(
                decoded.target, decoded.params, prompts[row], one, other,
                sampling=how.get("sampling"), key=None if keys is None else keys[row],
            )  # fmt: skip
            assert found.near_tie, found
            ties += 1
    return ties


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, folder)
    whole, cut = load(folder), load(folder, num_layers=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    theirs = []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        theirs.append(out[0, len(prompt) :].tolist())
    return Decoded(whole.model, whole.params, cut.model, cut.params), theirs


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(family):
    decoded, theirs = family
    assert {VARIANTS[name][0] for name in FAMILIES} == {
        prefix for prefix, _ in VARIANTS.values()
    }
    ties = assert_same(decoded, decoded("none", 0), theirs)
    for num_draft_tokens in range(1, 9) if FULL else (1, 5):
        for kind in ("model", "ngram"):
            ties += assert_same(decoded, decoded(kind, num_draft_tokens), theirs)
    print(f"near-ties: {ties}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("llama")
    build("llama", folder)
    whole, cut = load(folder), load(folder, num_layers=1)
    return Decoded(whole.model, whole.params, cut.model, cut.params)


@pytest.mark.slow
def test_coupled_text_is_plain_whatever_drafts_and_however_it_is_batched(llama):
    """Any drafter, K, batch, slot and padding, at temperature .9."""
    how = {"temperature": 0.9}
    keys = rng.request_keys(jax.random.key(3), len(PROMPTS))
    plain = llama("none", 0, Coupled(), **how)
    check = {"sampling": Sampling(temperature=0.9), "keys": keys}
    ties = 0
    for num_draft_tokens in range(1, 9) if FULL else (1, 8):
        for kind in ("model", "ngram"):
            text = llama(kind, num_draft_tokens, Coupled(), **how)
            ties += assert_same(llama, text, plain, **check)
    # Batch 8 in another order, and batch 1 with more padding.
    order = [3, 1, 0, 2, 0, 1, 2, 3]
    many = llama(
        "model", 3, Coupled(), prompts=[PROMPTS[i] for i in order],
        keys=keys[jnp.array(order)], **how,
    )  # fmt: skip
    for slot, row in enumerate(order):
        ties += assert_same(
            llama, [many[slot]], [plain[row]], [PROMPTS[row]],
            sampling=check["sampling"], keys=keys[row : row + 1],
        )  # fmt: skip
    alone = llama(
        "ngram", 4, Coupled(), prompts=PROMPTS[:1], keys=keys[:1], width=200, **how
    )
    ties += assert_same(llama, alone, plain[:1], **check)
    print(f"near-ties: {ties}")


@pytest.mark.slow
def test_rejection_text_of_a_row_is_its_own_in_any_batch(llama):
    keys = rng.request_keys(jax.random.key(3), len(PROMPTS))
    together = llama("model", 4, temperature=0.9)
    order = [2, 0, 1, 3]
    moved = llama(
        "model", 4, temperature=0.9, prompts=[PROMPTS[i] for i in order],
        keys=keys[jnp.array(order)],
    )  # fmt: skip
    assert moved == [together[i] for i in order]
    for row in range(len(PROMPTS)):
        alone = llama(
            "model", 4, temperature=0.9, prompts=[PROMPTS[row]],
            keys=keys[row : row + 1],
        )  # fmt: skip
        assert alone == [together[row]]


def test_a_real_difference_is_told_from_a_near_tie(llama):
    plain = llama("none", 0)[0]
    wrong = [*plain[:3], (plain[3] + 1) % 96, *plain[4:]]
    found = explain_difference(llama.target, llama.params, PROMPTS[0], plain, wrong)
    assert found.position == 3 and not found.near_tie
    same = explain_difference(llama.target, llama.params, PROMPTS[0], plain, plain)
    assert same is None
    shorter = explain_difference(
        llama.target, llama.params, PROMPTS[0], plain, plain[:5]
    )
    assert shorter.position == 5 and not shorter.near_tie

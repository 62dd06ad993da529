import json
import subprocess
import sys

import gguf
import gguf_reference
import jax
import numpy as np
import pytest

from specdec_jax import checkpoints
from specdec_jax.checkpoints.gguf import open_gguf
from specdec_jax.checkpoints.gguf_file import read_file
from specdec_jax.checkpoints.gguf_tokenizer import build_tokenizer

WIDTH, MLP, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 32, 8, 4, 32
KINDS = gguf.GGMLQuantizationType


def hf_weights(tied=False, bias=False, qk_norm=False, seed=0):
    """One layer of a Llama-like decoder, under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        layer + "input_layernorm.weight": (WIDTH,),
        layer + "post_attention_layernorm.weight": (WIDTH,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (MLP, WIDTH),
        layer + "mlp.up_proj.weight": (MLP, WIDTH),
        layer + "mlp.down_proj.weight": (WIDTH, MLP),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    if bias:
        shapes |= {
            f"{layer}self_attn.{p}_proj.bias": (heads * HEAD_DIM,)
            for p, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        }
    if qk_norm:
        shapes |= {f"{layer}self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


STORED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def stored_name(name):
    stem, leaf = name.rsplit(".", 1)
    if stem in STORED:
        return f"{STORED[stem]}.{leaf}"
    return f"blk.{stem.split('.')[2]}.{STORED[stem.split('.')[-1]]}.{leaf}"


def interleave(values):
    """Rows as a llama file stores them: dimension i, then dimension i + half."""
    half = HEAD_DIM // 2
    order = [r for i in range(half) for r in (i, i + half)]
    heads = values.reshape(-1, HEAD_DIM, *values.shape[1:])
    return heads[:, order].reshape(values.shape)


def write(
    path, weights, kind=KINDS.F32, architecture="llama", extra=None, keys=None, vocab=()
):
    """Writes a file as llama.cpp's converter would; vectors stay float32."""
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(1)
    out.add_context_length(64)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(MLP)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(50_000.0)
    out.add_vocab_size(VOCAB)
    for key, value in (keys or {}).items():
        add = {str: out.add_string, int: out.add_uint32, float: out.add_float32}
        (out.add_array if isinstance(value, list) else add[type(value)])(key, value)
    if vocab:
        out.add_tokenizer_model("gpt2")
        out.add_token_list(list(vocab))
    for name, values in weights.items():
        stored = stored_name(name)
        if architecture == "llama" and ("attn_q" in stored or "attn_k" in stored):
            values = interleave(values)
        if values.ndim == 1:
            out.add_tensor(stored, values)
        else:
            packed = gguf.quants.quantize(values, kind)
            out.add_tensor(stored, packed, raw_dtype=kind)
    for name, values in (extra or {}).items():
        out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture
def good(path):
    return write(path, hf_weights())


def read_all(source):
    return {name: tensor.read() for name, tensor in source.tensors.items()}


# ---- tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_float_tensors_load_to_what_they_came_from(path, tied, bias):
    weights = hf_weights(tied=tied, bias=bias)
    source = open_gguf(write(path, weights))
    loaded = read_all(source)
    assert loaded.keys() == weights.keys()
    for name, expected in weights.items():
        assert source.tensors[name].shape == expected.shape
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)
    assert source.config["tie_word_embeddings"] is tied
    assert source.config["attention_bias"] is bias


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4"]
)
def test_packed_tensors_load_to_the_values_of_their_blocks(path, kind):
    weights = hf_weights()
    source = open_gguf(write(path, weights, KINDS[kind]))
    for name, values in weights.items():
        expected = values
        if values.ndim == 2:
            packed = gguf.quants.quantize(values, KINDS[kind])
            expected = gguf.quants.dequantize(packed, KINDS[kind])
            assert source.tensors[name].dtype == kind
        np.testing.assert_array_equal(source.tensors[name].read(), expected)


def q4_k_block(rng):
    """Returns one block of 256 values as bytes, and the values, by the definition.

    Eight groups of 32; value = d * scale * q - dmin * minimum, scales and minima of six
    bits each packed into twelve bytes.
    """
    d, dmin = np.float16(0.25), np.float16(0.5)
    scale, minimum = rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    q = rng.integers(0, 16, (8, 32))
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = scale[j] | (scale[j + 4] >> 4) << 6
        packed[j + 4] = minimum[j] | (minimum[j + 4] >> 4) << 6
        packed[j + 8] = (scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4
    nibbles = [q[2 * j] | q[2 * j + 1] << 4 for j in range(4)]
    head = np.array([d, dmin]).view(np.uint8)
    block = np.concatenate([head, packed, *nibbles]).astype(np.uint8)
    values = float(d) * scale[:, None] * q - float(dmin) * minimum[:, None]
    return block, values.reshape(-1).astype(np.float32)


def test_q4_k_blocks_load_by_their_definition(path):
    rng = np.random.default_rng(1)
    rows = [q4_k_block(rng) for _ in range(HEADS * HEAD_DIM)]  # WIDTH is one block
    blocks, values = (np.stack(part) for part in zip(*rows, strict=True))
    name = "model.layers.0.self_attn.q_proj.weight"
    out = gguf.GGUFWriter(path, "llama")
    out.add_tensor("blk.0.attn_q.weight", interleave(blocks), raw_dtype=KINDS.Q4_K)
    out.add_tensor("token_embd.weight", np.ones((2, WIDTH), np.float32))
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.layer_norm_rms_epsilon": 1,
    }.items():
        out.add_uint32(f"llama.{key}", value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    np.testing.assert_array_equal(open_gguf(path).tensors[name].read(), values)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_and_weights_equal_those_of_transformers_reader(path, architecture):
    pytest.importorskip("torch")
    weights = hf_weights(
        tied=True, bias=architecture == "qwen2", qk_norm=architecture == "qwen3"
    )
    keys = {f"{architecture}.attention.key_length": HEAD_DIM}
    keys |= {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": 4}
    write(path, weights, KINDS.Q8_0, architecture, keys=keys)
    source = open_gguf(path)
    model, config = gguf_reference.load(path, source.config)
    theirs = model.state_dict()
    theirs.pop("lm_head.weight")
    ours = read_all(source)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name].numpy(), err_msg=name)
    assert [type(model).__name__] == source.config["architectures"]
    assert config.pop("rope_theta") == source.config["rope_parameters"]["rope_theta"]
    assert config == {key: source.config[key] for key in config}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"tied": True}),
        ("qwen2", {"bias": True}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_files_load_as_models_that_transformers_agrees_with(
    path, architecture, options
):
    torch = pytest.importorskip("torch")

    weights = hf_weights(**options)
    keys = {f"{architecture}.attention.key_length": HEAD_DIM}
    write(path, weights, architecture=architecture, keys=keys)
    loaded = checkpoints.load(path)
    theirs, _ = gguf_reference.load(path, loaded.config)
    tokens = np.arange(2 * 12, dtype=np.int32).reshape(2, 12) % VOCAB
    cache = loaded.model.init_cache(2, 16)
    output, _ = jax.jit(loaded.model.apply)(loaded.params, tokens, cache)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(output.logits, expected, rtol=1e-4, atol=1e-3)


# ---- configuration


def test_missing_key_value_heads_means_as_many_as_query_heads(path):
    weights = hf_weights()
    weights["model.layers.0.self_attn.k_proj.weight"] = np.random.default_rng(
        3
    ).standard_normal((HEADS * HEAD_DIM, WIDTH), np.float32)
    write(path, weights, keys={"llama.attention.key_length": HEAD_DIM})
    data = path.read_bytes()
    # The key is renamed in place to one that says nothing.
    old, new = b"llama.attention.head_count_kv", b"other.attention.head_count_kv"
    path.write_bytes(data.replace(old, new))
    source = open_gguf(path)
    assert source.config["num_key_value_heads"] == HEADS
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(source.tensors[name].read(), weights[name])


def test_sliding_window_makes_it_a_mistral(path):
    keys = {"llama.attention.sliding_window": 16}
    config = open_gguf(write(path, hf_weights(), keys=keys)).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        (
            {"type": "yarn", "factor": 2.0, "yarn_beta_fast": 8.0, "attn_factor": 1.0},
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8.0},
        ),
    ],
)
def test_rotary_scaling_is_translated(path, keys, expected):
    keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    config = open_gguf(write(path, hf_weights(), keys=keys)).config
    assert config["rope_parameters"] == {"rope_theta": 50_000.0, **expected}


def llama3_divisors(factor):
    """Divisors of the frequencies, as the recipe of Llama 3.1 states them."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 50_000.0 ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_tensor_is_read_as_llama3_scaling(path, factor):
    extra = {"rope_freqs.weight": llama3_divisors(factor)}
    source = open_gguf(write(path, hf_weights(), extra=extra))
    assert source.config["rope_parameters"] == {
        "rope_theta": 50_000.0,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in source.tensors


def test_rope_freqs_of_another_recipe_are_refused(path):
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write(path, hf_weights(), extra={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match="not Llama 3's rotary scaling"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, "expert_count = 8 is not supported"),
        ({"llama.logit_scale": 2.0}, "logit_scale = 2.0 is not supported"),
        ({"llama.attention.value_length": 16}, "value_length is 16"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0},
            "attn_factor",
        ),
        ({"llama.some_list": [1, 2]}, "differs between layers"),
        ({"split.count": 3}, "in 3 files"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(path, keys, message):
    write(path, hf_weights(), keys=keys)
    with pytest.raises(ValueError, match=message):
        open_gguf(path)


def test_unknown_architecture_is_refused_with_the_supported_ones(path):
    write(path, hf_weights(), architecture="mamba")
    with pytest.raises(
        ValueError, match="'mamba'; supported in GGUF files: llama, qwen"
    ):
        open_gguf(path)


def test_missing_description_is_named(good):
    # The key is renamed in place to one that says nothing.
    old, new = b"llama.block_count", b"other.block_count"
    good.write_bytes(good.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match="llama.block_count is None"):
        open_gguf(good)


def test_left_over_tensor_is_refused(path):
    extra = {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}
    write(path, hf_weights(), extra=extra)
    with pytest.raises(ValueError, match="blk.0.attn_sinks.weight, which has no place"):
        open_gguf(path)


def test_all_tokens_that_end_a_text_are_given(path):
    ids = {"bos": 1, "eos": 2, "eot": 5, "padding": 2}
    keys = {f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items()}
    source = open_gguf(write(path, hf_weights(), keys=keys))
    expected = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 2}
    assert source.generation_config == expected


# ---- damaged files


def test_wrong_magic_is_refused(path):
    path.write_bytes(b"<!DOCTYPE html>" * 10)
    with pytest.raises(ValueError, match="not a GGUF file: it starts with b'<!DO'"):
        open_gguf(path)


def test_empty_file_is_refused(path):
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        open_gguf(path)


def test_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"tiny\.gguf"):
        open_gguf(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_are_refused(good, version):
    data = bytearray(good.read_bytes())
    data[4:8] = version.to_bytes(4, "little")
    good.write_bytes(data)
    with pytest.raises(ValueError, match="version"):
        open_gguf(good)


def test_file_cut_anywhere_is_refused(good):
    data = good.read_bytes()
    header = read_file(good)
    start = min(entry.start for entry in header.tensors.values())
    for size in [*range(4, start, 37), start, start + 1, len(data) - 64]:
        good.write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut short or damaged"):
            open_gguf(good)


def test_flipped_header_bytes_never_escape_as_other_errors(good):
    data = good.read_bytes()
    start = min(entry.start for entry in read_file(good).tensors.values())
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.integers(8, start)] = rng.integers(256)
        good.write_bytes(broken)
        try:
            open_gguf(good)
        except ValueError as error:
            assert len(str(error)) > 20


def test_format_that_cannot_be_dequantised_is_refused(good):
    header = read_file(good)
    data = bytearray(good.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)  # F32
    data[at : at + 4] = (99).to_bytes(4, "little")
    good.write_bytes(data)
    with pytest.raises(ValueError, match=r"ffn_up.weight is stored as type \(99\)"):
        open_gguf(good)
    assert header.tensors["blk.0.ffn_up.weight"].kind == "F32"


def test_missing_package_says_how_to_install_it(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'specdec-jax\[gguf\]'"):
        open_gguf(good)


# ---- tokenizers

TEXTS = [
    "Hello world 12345 it's 3.14159",
    "  two  spaces\n\n\tnew",
    "naïve café 日本語 🤖",
    "x½ ² ٣٤ 1²3 abc123def",
    "",
    " ",
    "def f(x):\r\n    return x != 'I'LL'",
]


def byte_level(pre, **extra):
    """Metadata of a byte-level tokenizer with three merges and two whole tokens."""
    alphabet = sorted(set(map(chr, range(33, 127))) | set("¡ÂÃ") | {"Ġ", "Ċ", "ĉ", "č"})
    alphabet += [chr(c) for c in range(161, 324) if chr(c) not in alphabet]
    tokens = ["<|a|>", "<|b|>", *alphabet, "12", "he", "Ġhe", "  ", "[PAD9]"]
    types = [3, 3, *[1] * (len(tokens) - 4), 4, 5]
    tokens[-1] = f"[PAD{len(tokens) - 1}]"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "h e", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def pieces(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer.convert_ids_to_tokens(ids)


def test_digits_stay_alone_where_the_rule_says_so():
    # The vocabulary has "12": only a rule that splits digits first never makes it.
    assert pieces(build_tokenizer(byte_level("gpt-2")), "he12") == ["he", "12"]
    assert pieces(build_tokenizer(byte_level("llama-bpe")), "he12") == ["he", "12"]
    assert pieces(build_tokenizer(byte_level("smollm")), "he12") == ["he", "1", "2"]
    assert pieces(build_tokenizer(byte_level("qwen2")), "he12") == ["he", "1", "2"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(pre, text):
    tokenizer = build_tokenizer(byte_level(pre))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_splits_text_as_transformers_does(text):
    from transformers import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    ours = build_tokenizer(byte_level("qwen2")).backend_tokenizer
    split = [t.pre_tokenizer.pre_tokenize_str(text) for t in (ours, theirs)]
    assert split[0] == split[1]


def test_special_tokens_and_padding_rows():
    metadata = byte_level("gpt-2", add_bos_token=True)
    tokenizer = build_tokenizer(metadata)
    assert pieces(tokenizer, "he<|b|>he") == ["he", "<|b|>", "he"]
    assert pieces(tokenizer, "he  he") == ["he", "  ", "he"]  # user-defined: whole
    ids = tokenizer("he<|b|>he").input_ids
    assert (ids[0], tokenizer.bos_token, tokenizer.eos_token) == (0, "<|a|>", "<|b|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hehe"
    # Rows that pad the embedding are no tokens.
    assert len(tokenizer) == len(metadata["tokenizer.ggml.tokens"]) - 1


@pytest.mark.parametrize(
    ("pre", "extra", "expected"),
    [
        ("smollm", {}, ["he"]),
        ("llama-bpe", {}, ["<|a|>", "he"]),
        ("llama-bpe", {"add_bos_token": False}, ["he"]),
        (
            "qwen2",
            {"add_bos_token": True, "add_eos_token": True},
            ["<|a|>", "he", "<|b|>"],
        ),
    ],
)
def test_start_and_end_are_added_as_the_file_says(pre, extra, expected):
    tokenizer = build_tokenizer(byte_level(pre, **extra))
    assert tokenizer.convert_ids_to_tokens(tokenizer("he").input_ids) == expected


def sentencepiece(**extra):
    words = {"▁": -9, "▁t": -1, "he": -2, "▁the": -3, "th": -4, "ee": -5, "hee": -6}
    letters = {letter: -20 - i for i, letter in enumerate("thexyz")}
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    normal = words | letters
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *normal],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(normal)],
        "tokenizer.ggml.scores": [0.0] * 259 + [float(s) for s in normal.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def merged_by_score(text, scores):
    """Sentencepiece's rule, literally: join the best-scored neighbours, leftmost."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in scores
        ]
        if not joins:
            return parts
        i = min(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_merges_by_score():
    metadata = sentencepiece()
    tokens, scores = (metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores"))
    table = dict(zip(tokens[259:], scores[259:], strict=True))
    tokenizer = build_tokenizer(metadata)
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("thexyz tthee"), rng.integers(1, 15)))
        assert pieces(tokenizer, text) == merged_by_score(text, table), text
        ids = tokenizer(text).input_ids
        assert ids[0] == 1  # BOS is these files' default
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_falls_back_to_bytes():
    tokenizer = build_tokenizer(sentencepiece())
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer("the é 日</s>x", add_special_tokens=False).input_ids
    assert 2 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the é 日 x"


def test_space_prefix_can_be_switched_off():
    tokenizer = build_tokenizer(sentencepiece(add_space_prefix=False))
    assert pieces(tokenizer, "the") == ["t", "he"]
    assert tokenizer.decode(tokenizer("the").input_ids, True) == "the"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level("default"), "rule 'default'.*supported: deepseek-r1-qwen, gpt-2"),
        (byte_level(None), "rule None"),
        (byte_level("gpt-2") | {"tokenizer.ggml.model": "rwkv"}, "kind 'rwkv'"),
        (byte_level("gpt-2", token_type=[1]), "tokens and 1 token types"),
        (sentencepiece(scores=[1.0]), "one score for each token"),
        (sentencepiece(precompiled_charsmap=[1]), "rewrites text"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(metadata, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(metadata)


def test_tokenizer_needs_no_torch(tmp_path):
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps(byte_level("smollm")))
    script = (
        "import json, sys; sys.modules['torch'] = None\n"
        "from specdec_jax.checkpoints.gguf_tokenizer import build_tokenizer\n"
        "tokenizer = build_tokenizer(json.load(open(sys.argv[1])))\n"
        "print(tokenizer.tokenize('he12'))"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['he', '1', '2']"


def test_file_without_tokenizer_gives_none(good):
    assert open_gguf(good).load_tokenizer() is None

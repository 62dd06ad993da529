"""Checkpoints of every family against transformers, and every way they can be wrong.

All tensors are filled at random: fresh models have zero biases and unit norms, and so
hide a dropped bias or swapped norms. Shapes are the same throughout, so that one
compiled program serves many variants.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as tiny_models
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from specdec_jax.checkpoints import load
from specdec_jax.checkpoints.load import FAMILIES, parameter_shapes
from specdec_jax.networks.layers import TILE

DATA = Path(__file__).parent / "data"
LENGTH = 64
TOKENS = np.random.default_rng(0).integers(0, 96, (1, LENGTH))

_SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def _scaled(kind: str, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


LONGROPE = dict(
    short_factor=[1.0, 1.5, 2.0, 2.5],
    long_factor=[4.0, 6.0, 8.0, 9.0],
)
# Name: (class prefix, config); head_dim is 8 = 32 / 4 unless given.
VARIANTS = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama_head_dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama_linear": ("Llama", _scaled("linear", factor=4.0)),
    "llama_llama3": (
        "Llama",
        _scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_yarn": (
        "Llama",
        _scaled("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_yarn_factor_1": (
        "Llama",
        _scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            attention_factor=1.0,
        ),
    ),
    "llama_yarn_mscale": (
        "Llama",
        _scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "llama_longrope_short": (
        "Llama",
        _scaled("longrope", original_max_position_embeddings=64, **LONGROPE),
    ),
    "llama_longrope_long": (
        "Llama",
        _scaled("longrope", original_max_position_embeddings=32, **LONGROPE),
    ),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 7}),
    "mistral_no_window": ("Mistral", {"head_dim": 8, "sliding_window": None}),
    "qwen2": ("Qwen2", {"sliding_window": 4, "max_window_layers": 0}),
    "qwen2_window": (
        "Qwen2",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gpt2": ("GPT2", {"vocab_size": 96, "n_positions": 128, "n_embd": 32, "n_head": 4}),
    "gpt2_untied": (
        "GPT2",
        {
            "vocab_size": 96,
            "n_positions": 128,
            "n_embd": 32,
            "n_head": 4,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
}
CONTEXT = {"llama_longrope_long": 128}


def build(variant: str, folder: Path, half: bool = False, **save_options):
    """Saves a random checkpoint; returns its logits at all positions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prefix, options = VARIANTS[variant]
    shape = {"n_layer": 2} if prefix == "GPT2" else _SHAPE
    config = getattr(transformers, f"{prefix}Config")(
        **(shape | {"bos_token_id": 1, "eos_token_id": 2} | options)
    )
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{prefix}{head}")(config).eval()
    generator = torch.Generator().manual_seed(len(variant))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0))
            if half:  # The module's own .to() would round the rotary buffers too.
                tensor.copy_(tensor.bfloat16())
    if half:
        state = {name: leaf.bfloat16() for name, leaf in model.state_dict().items()}
        save_options["state_dict"] = state
    model.save_pretrained(folder, **save_options)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


_apply = jax.jit(
    lambda model, *args: model.apply(*args),
    static_argnums=0,
    # Tiny models: compiling is what costs here.
    compiler_options={"xla_backend_optimization_level": 0},
)


def logits(loaded, *blocks: int) -> np.ndarray:
    """Reads the tokens in blocks of these sizes, the last one repeated."""
    tokens, sizes = jnp.asarray(TOKENS, jnp.int32), list(blocks or (LENGTH,))
    cache, rows, start = loaded.model.init_cache(1, LENGTH + 8), [], 0
    while start < LENGTH:
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], LENGTH - start)
        output, cache = _apply(
            loaded.model, loaded.params, tokens[:, start : start + size], cache
        )
        rows.append(np.asarray(output.logits))
        start += size
    return np.concatenate(rows, axis=1)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Builds each variant once; name -> (folder, logits of transformers)."""
    made = {}

    def get(variant: str):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = folder, build(variant, folder)
        return made[variant]

    return get


@pytest.fixture
def tiny(tmp_path):
    """A writable copy of the committed Llama checkpoint."""
    return Path(shutil.copytree(DATA / "tiny_llama", tmp_path / "tiny"))


def edit(folder: Path, file: str = "config.json", **changes) -> None:
    config = json.loads((folder / file).read_text())
    config.update(changes)
    (folder / file).write_text(json.dumps(config))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_at_every_position(variant, zoo):
    folder, expected = zoo(variant)
    loaded = load(folder, context_length=CONTEXT.get(variant))
    np.testing.assert_allclose(logits(loaded), expected, atol=1e-4)


@pytest.mark.parametrize("variant", ["mistral", "qwen2_window", "gpt2"])
def test_logits_through_the_cache_equal_transformers(variant, zoo):
    folder, expected = zoo(variant)
    for blocks in (54, 1), (54, 2), (54, 5):
        np.testing.assert_allclose(logits(load(folder), *blocks), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_committed_checkpoint_gives_the_committed_logits(name):
    expected = np.load(DATA / f"{name}.npz")["logits"]
    loaded = load(DATA / name)
    np.testing.assert_allclose(logits(loaded), expected, atol=1e-4)


def test_sharded_bfloat16_files_are_read(tmp_path):
    expected = build("llama_biases", tmp_path, half=True, max_shard_size="15KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    loaded = load(tmp_path)
    np.testing.assert_allclose(logits(loaded), expected, atol=1e-4)
    half = load(tmp_path, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert jnp.dtype(half.model.init_cache(1, 8).keys[0].dtype) == jnp.bfloat16
    shard = sorted(tmp_path.glob("*-00002-*"))[0]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load(tmp_path)


def test_longrope_takes_the_long_factors_only_when_asked(zoo):
    folder, expected = zoo("llama_longrope_long")
    short = load(folder)
    assert short.max_positions == 32
    assert np.abs(logits(short) - expected).max() > 0.1
    assert load(folder, context_length=33).max_positions == 128
    with pytest.raises(ValueError, match="context_length 129"):
        load(folder, context_length=129)


def test_old_and_new_rotary_keys_are_the_same(tiny):
    new = load(tiny).model.config.rotary
    theta = json.loads((tiny / "config.json").read_text())["rope_parameters"]
    edit(tiny, rope_parameters=None, rope_theta=theta["rope_theta"], rope_scaling=None)
    assert load(tiny).model.config.rotary == new
    edit(tiny, rope_scaling={"type": "linear", "factor": 2.0})
    old = load(tiny).model.config.rotary
    assert old.frequencies == tuple(f / 2 for f in new.frequencies)


def test_gpt2_is_read_without_prefix_and_with_mask_buffers(tmp_path):
    folder = shutil.copytree(DATA / "tiny_gpt2", tmp_path / "gpt2")
    expected = load(folder).params

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.uint8)
        tensors["h.0.attn.masked_bias"] = np.asarray(-1e4, np.float32)

    edit_tensors(folder, change)
    found = load(folder).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_stored_head_is_used_even_when_the_config_says_tied(tiny):
    edit(tiny, tie_word_embeddings=True)
    assert not load(tiny).model.config.tied
    edit_tensors(tiny, lambda tensors: tensors.pop("lm_head.weight"))
    tied = load(tiny)
    assert tied.model.config.tied
    assert "lm_head" not in tied.params["params"]


def test_the_first_layers_can_be_loaded_alone(tiny):
    whole, cut = load(tiny), load(tiny, num_layers=1)
    assert cut.model.config.num_layers == 1
    for name, subtree in cut.params["params"].items():
        jax.tree.map(
            np.testing.assert_array_equal, subtree, whole.params["params"][name]
        )


def test_stop_tokens_come_from_the_generation_config_first(tiny):
    (tiny / "generation_config.json").unlink(missing_ok=True)
    edit(tiny, eos_token_id=5)
    assert load(tiny).eos_token_ids == (5,)
    (tiny / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load(tiny).eos_token_ids == (3, 4)
    (tiny / "generation_config.json").write_text("{}")
    edit(tiny, eos_token_id=None)
    assert load(tiny).eos_token_ids == ()


def test_parameters_can_be_placed_one_by_one(tiny):
    placed = {}

    def place(path, shape, read):
        placed[path] = shape
        whole = read()
        halves = [read((slice(0, 1), *[slice(None)] * (len(shape) - 1)))]
        halves += [read((slice(1, None), *[slice(None)] * (len(shape) - 1)))]
        np.testing.assert_array_equal(np.concatenate(halves), whole)
        return jnp.asarray(whole)

    loaded = load(tiny, place=lambda model: place)
    assert placed == parameter_shapes(loaded.model)


@pytest.mark.parametrize("tied", [True, False])
def test_tiles_hold_the_same_weights(tied, tmp_path):
    folder = tiny_models.save_checkpoint(tmp_path / "wide", width=128, tied=tied)
    flat, tiles = load(folder, tiled=False), load(folder)
    assert tiles.model.tiled and jax.tree.leaves(flat.params)[0].ndim < 3
    ours, theirs = (
        traverse_util.flatten_dict(x.params, sep="/") for x in (tiles, flat)
    )
    cut = {path for path, leaf in ours.items() if leaf.ndim == 3}
    assert len(cut) == 2 * 7 + 1 and ours.keys() == theirs.keys()
    for path in cut:
        kernel = theirs[path].T if path.endswith("/embedding") else theirs[path]
        columns = [kernel[:, i : i + TILE] for i in range(0, kernel.shape[1], TILE)]
        np.testing.assert_array_equal(ours[path], jnp.stack(columns))
    for sizes in ((LENGTH,), (1,), (5,)):
        np.testing.assert_allclose(logits(tiles, *sizes), logits(flat), atol=2e-4)


def test_a_folder_without_tokenizer_loads_without(tiny):
    loaded = load(tiny)
    assert loaded.tokenizer is None
    assert loaded.name == str(tiny)
    assert (loaded.bos_token_id, loaded.max_positions) == (1, 128)


def test_the_bundled_names_are_found_in_the_checkout(tiny, monkeypatch):
    from specdec_jax.checkpoints import locate

    monkeypatch.setitem(locate.BUNDLED, "some-pair", "tiny")
    monkeypatch.setattr(locate, "_roots", lambda: iter([tiny, tiny.parent]))
    assert load("some-pair").path == tiny
    monkeypatch.setattr(locate, "_roots", lambda: iter([tiny]))
    with pytest.raises(FileNotFoundError, match="some-pair.*looked in"):
        load("some-pair")


def test_importing_pulls_in_neither_transformers_nor_torch():
    code = (
        "import sys, specdec_jax.checkpoints\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Bad input: the message names what is wrong.

BAD_SETTINGS = [
    ({"model_type": "mamba"}, "architecture 'mamba'.*supported: gpt2, llama"),
    ({"model_type": None}, "architecture None"),
    ({"hidden_act": "xielu"}, "hidden_act = 'xielu'"),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"rope_interleaved": True}, "rope_interleaved = True"),
    ({"num_local_experts": 8}, "not supported.*num_local_experts"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"sliding_window": 8}, "sliding_window"),
    ({"head_dim": 16}, r"q_proj.weight has shape \(32, 32\).* \(64, 32\)"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    ({"num_hidden_layers": 3}, "missing: model.layers.2.*and 4 more"),
    ({"num_hidden_layers": 1}, "left over: model.layers.1"),
    ({"attention_bias": True}, "missing: model.layers.0.self_attn.k_proj.bias"),
    (_scaled("dynamic", factor=2.0), "rotary scaling 'dynamic'"),
    (_scaled("yarn"), "'yarn' lacks 'factor'"),
    (_scaled("linear", factor=2.0, wavelength=3), "wavelength"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_settings_that_are_not_understood_are_refused(changes, message, tiny):
    edit(tiny, **changes)
    with pytest.raises(ValueError, match=message):
        load(tiny)


def test_a_window_left_unsaid_is_not_a_window_of_null(tiny):
    edit(tiny, model_type="mistral")
    assert load(tiny).model.config.windows == (4096, 4096)
    edit(tiny, sliding_window=None)
    assert load(tiny).model.config.windows == (None, None)


def test_window_lists_that_contradict_are_refused(zoo, tmp_path):
    folder = Path(shutil.copytree(zoo("qwen2_window")[0], tmp_path / "qwen"))
    edit(folder, use_sliding_window=False)
    with pytest.raises(ValueError, match="no sliding_window is switched on"):
        load(folder)
    edit(folder, use_sliding_window=True, layer_types=["full_attention"])
    with pytest.raises(ValueError, match="for each of 2 layers"):
        load(folder)
    edit(folder, layer_types=None)
    assert load(folder).model.config.windows == (None, 4)


BAD_TENSORS = [
    (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing.*false"),
    (lambda t: t.update(extra=np.zeros(2, np.float32)), "left over: extra"),
    (
        lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
        r"model.norm.weight has shape \(31,\), the config asks for \(32,\)",
    ),
    (
        lambda t: t.update({"model.norm.weight": np.zeros(32, np.int8)}),
        "model.norm.weight is stored as I8",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(change, message, tiny):
    edit_tensors(tiny, change)
    with pytest.raises(ValueError, match=message):
        load(tiny)


@pytest.mark.parametrize("keep", [4, 200, -100])
def test_a_file_cut_short_is_named(keep, tiny):
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        load(tiny)


def test_missing_files_are_named(tiny):
    (tiny / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors"):
        load(tiny)
    (tiny / "config.json").write_text("{")
    (tiny / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(FileNotFoundError, match="0 shards"):
        load(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tiny)


def test_json_that_is_damaged_is_named(tiny):
    (tiny / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        load(tiny)


def test_arguments_out_of_range_are_refused(tiny):
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32"):
        load(tiny, "int8")
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"num_layers {number} must be between 1"):
            load(tiny, num_layers=number)


def test_a_name_that_means_nothing_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint 'nothing'.*looked in"):
        load("nothing")


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match="no local folder 'org/name'.*offline"):
        load("org/name")


def test_every_family_is_tried():
    prefixes = {prefix.lower() for prefix, _ in VARIANTS.values()}
    assert prefixes == set(FAMILIES)

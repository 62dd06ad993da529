"""The configuration and tensor names of a GGUF file, as Hugging Face spells them.

A metadata key or a tensor that is not understood is refused by name: it may change
what the model computes, and a model that is nearly right drafts and verifies nearly
right, which nobody sees.

llama.cpp's converter permutes the rows of q and k of the `llama` architecture, head by
head, from two halves (Hugging Face) to neighbouring pairs; `tensor` undoes it.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.checkpoints.gguf_file import GGUFFile
from specdec_jax.checkpoints.gguf_rope import FACTORS, rope_parameters

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class _Architecture(NamedTuple):
    model_type: str
    class_name: str
    layer: Mapping[str, str]
    biases: tuple[str, ...] = ()
    """Settings of Hugging Face's config that say which biases there are."""
    permuted: bool = False
    """Whether q and k are stored for interleaved rotary embedding."""


_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
_ARCHITECTURES = {
    "llama": _Architecture(
        "llama", "LlamaForCausalLM", _LAYER, tuple(_BIASES), permuted=True
    ),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": _Architecture(
        "qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORM, ("attention_bias",)
    ),
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Read below, or known to change nothing when the value is the one given.
_READ = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
}
_NEUTRAL = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
}
_IGNORED = ("tensor_data_layout",)


def config(file: GGUFFile) -> dict[str, Any]:
    """Returns what `config.json` of the original checkpoint would say.

    Raises:
      ValueError: The architecture, a metadata key or a kind of rotary scaling is not
        supported, or a needed key is missing.
    """
    name, architecture = _architecture(file)
    keys = _keys(file, name)
    for key in _KEYS:
        size = keys.get(key)
        if not isinstance(size, int | float) or size <= 0:
            raise ValueError(
                f"{file.path}: {name}.{key} is {size!r} and describes the model: a "
                "positive number is needed; convert the model again"
            )
    found = {hf: keys[key] for key, hf in _KEYS.items()}
    heads, head_dim = found["num_attention_heads"], _head_dim(file, keys)
    found |= {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_act": "silu",
        "head_dim": head_dim,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file, keys, head_dim),
    }
    found |= {key: _BIASES[key] in file.tensors for key in architecture.biases}
    for token in ("bos", "eos"):
        found[f"{token}_token_id"] = file.metadata.get(
            f"tokenizer.ggml.{token}_token_id"
        )
    if (window := keys.get("attention.sliding_window")) is not None:
        # Mistral is Llama with a window, and files call it llama.
        if name != "llama":
            raise ValueError(
                f"{file.path} gives a sliding window to architecture {name}, without "
                "saying in which layers; use the original checkpoint"
            )
        found |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        found["sliding_window"] = window
    return found


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the token ids that start, end and pad a text."""
    get = lambda key: file.metadata.get(f"tokenizer.ggml.{key}_token_id")  # noqa: E731
    ends = [get(key) for key in ("eos", "eot", "eom")]
    found = {
        "bos_token_id": get("bos"),
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
        "pad_token_id": get("padding"),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def tensor_names(file: GGUFFile) -> dict[str, str]:
    """Returns Hugging Face's name -> the file's name, for every weight.

    Raises:
      ValueError: A tensor of the file has no place in the architecture.
    """
    name, architecture = _architecture(file)
    names = {}
    for stored in file.tensors:
        if stored == FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
        layer, part, leaf = match.groups() if match else (None, "", "")
        table = _OUTSIDE if layer is None else architecture.layer
        if part not in table:
            raise ValueError(
                f"{file.path} has a tensor {stored}, which has no place in "
                f"architecture {name} as known here; use the original checkpoint"
            )
        prefix = "" if layer is None else f"model.layers.{layer}."
        names[f"{prefix}{table[part]}.{leaf}"] = stored
    return names


def tensor(file: GGUFFile, stored: str) -> np.ndarray:
    """Returns one tensor in float32, laid out as Hugging Face has it ([out, in]).

    Args:
      file: The open file.
      stored: The tensor's name in the file.
    """
    values = file.read(stored)
    name, architecture = _architecture(file)
    part = stored.split(".")[-2]
    if not architecture.permuted or part not in ("attn_q", "attn_k"):
        return values
    keys = _keys(file, name)
    heads = keys["attention.head_count"]
    if part == "attn_k":
        heads = keys.get("attention.head_count_kv", heads)
    return unpermute(values, heads)


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns rows in half-split rotary order, from rows in interleaved order.

    Row 2i + j of a head (j = 0, 1) moves to row i + j * head_dim / 2.

    >>> unpermute(np.array([0, 1, 2, 3]), num_heads=1).tolist()
    [0, 2, 1, 3]
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _architecture(file: GGUFFile) -> tuple[str, _Architecture]:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path} has architecture {name!r}; supported in GGUF files: "
            f"{', '.join(_ARCHITECTURES)}; other families load from Hugging Face "
            "checkpoints"
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(
            f"{file.path} has no token_embd.weight: it holds a vocabulary or an "
            "adapter, and a whole model is needed"
        )
    return name, _ARCHITECTURES[name]


def _keys(file: GGUFFile, name: str) -> dict[str, Any]:
    """Returns the architecture's own metadata keys, all of them understood."""
    found = {}
    for key, value in file.metadata.items():
        if not key.startswith(f"{name}."):
            continue
        key = key.removeprefix(f"{name}.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(
                    f"{file.path}: {name}.{key} differs between layers ({value}), "
                    "which is not supported"
                )
            value = value[0]
        known = key in _KEYS or key in _READ or key in _IGNORED
        if (
            not known
            and not key.startswith("rope.scal")
            and (value not in _NEUTRAL.get(key, ()))
        ):
            raise ValueError(
                f"{file.path}: {name}.{key} = {value!r} is not supported; it may "
                "change what the model computes; use the original checkpoint"
            )
        found[key] = value
    return found


def _head_dim(file: GGUFFile, keys: Mapping[str, Any]) -> int:
    """Returns the size of a head, which values share and rotation covers."""
    default = keys["embedding_length"] // keys["attention.head_count"]
    head_dim = keys.get("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.get(key, head_dim)) != head_dim:
            raise ValueError(
                f"{file.path}: {key} is {size} and a head has {head_dim} dimensions; "
                "only equal sizes are supported"
            )
    return head_dim

"""Writes a trained decoder as a Hugging Face folder.

The folder opens in plain `transformers` as a `LlamaForCausalLM` with the same logits,
and with this library's own loader: one format, no private one.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specdec_jax.networks.config import DecoderConfig
from specdec_jax.training.forward import check
from specdec_jax.training.tokenizer import BOS, EOS

_LAYER = {
    "input_layernorm.weight": ("input_norm", "scale"),
    "post_attention_layernorm.weight": ("post_attention_norm", "scale"),
    **{
        f"self_attn.{x}_proj.weight": ("self_attn", f"{x}_proj", "kernel")
        for x in "qkvo"
    },
    **{
        f"mlp.{name}_proj.weight": ("mlp", f"{name}_proj", "kernel")
        for name in ("gate", "up", "down")
    },
}


def export(
    folder: Path,
    config: DecoderConfig,
    params: Any,
    tokenizer: Tokenizer,
    *,
    rope_theta: float,
    dtype: str = "bfloat16",
) -> None:
    """Writes `config.json`, weights, tokenizer and generation config.

    Args:
      folder: Made if missing; files of the same names are overwritten.
      config: Shape; a Llama decoder.
      params: The `"params"` of its variables.
      tokenizer: From `train_tokenizer`.
      rope_theta: Base of the rotary frequencies that `config` holds.
      dtype: Type of the stored weights.
    """
    check(config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.asarray(jnp.asarray(leaf, jnp.dtype(dtype)))
        for name, leaf in _tensors(config, params).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    _write(folder / "config.json", _config(config, rope_theta, dtype) | special)
    _write(folder / "generation_config.json", {"do_sample": False} | special)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
        },
    )


def _tensors(config: DecoderConfig, params: Any) -> dict[str, np.ndarray]:
    """Returns every tensor under its Hugging Face name, matrices as [out, in]."""
    tensors = {
        "model.embed_tokens.weight": params["embed_tokens"]["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    if not config.tied:
        tensors["lm_head.weight"] = params["lm_head"]["kernel"].T
    for i in range(config.num_layers):
        for name, path in _LAYER.items():
            leaf = params[f"layers_{i}"]
            for part in path:
                leaf = leaf[part]
            tensors[f"model.layers.{i}.{name}"] = (
                leaf.T if path[-1] == "kernel" else leaf
            )
    return {name: np.ascontiguousarray(leaf) for name, leaf in tensors.items()}


def _config(config: DecoderConfig, rope_theta: float, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

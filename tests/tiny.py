"""Small things that text goes through: a tokenizer, a checkpoint, a scripted model."""

import functools
import json
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specdec_jax.base import ModelOutput

BOS, EOS = 0, 1
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@functools.cache
def make_tokenizer(add_bos=False, swapped=False):
    """A byte-level BPE of some 300 tokens; `swapped` exchanges two of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "hello world, the cat sat on the mat and the dog sat on the log. "
    tokenizer.train_from_iterator([text * 5], trainer)
    if swapped:
        data = json.loads(tokenizer.to_str())
        vocab = data["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    if add_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(
    path, *, seed=0, num_layers=2, max_positions=512, eos=EOS, tokenizer=None,
    nan=False, width=32, tied=True,
):  # fmt: skip
    """Writes a random Llama as Hugging Face would; returns its folder as a string."""
    path.mkdir(parents=True)
    heads, head_dim, mlp = 4, width // 4, 3 * width // 2
    draw = np.random.default_rng(seed)

    def weight(*shape):
        return draw.normal(0, 0.3, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(VOCAB_SIZE, width)}
    tensors["model.norm.weight"] = np.full(width, np.nan if nan else 1, np.float32)
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": 1 + weight(width),
            layer + "post_attention_layernorm.weight": 1 + weight(width),
            layer + "self_attn.q_proj.weight": weight(heads * head_dim, width),
            layer + "self_attn.k_proj.weight": weight(2 * head_dim, width),
            layer + "self_attn.v_proj.weight": weight(2 * head_dim, width),
            layer + "self_attn.o_proj.weight": weight(width, heads * head_dim),
            layer + "mlp.gate_proj.weight": weight(mlp, width),
            layer + "mlp.up_proj.weight": weight(mlp, width),
            layer + "mlp.down_proj.weight": weight(width, mlp),
        }
    if not tied:
        tensors["lm_head.weight"] = weight(VOCAB_SIZE, width)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": eos,
    }
    (path / "config.json").write_text(json.dumps(config))
    (tokenizer or make_tokenizer()).save_pretrained(str(path))
    return str(path)


class ScriptCache(NamedTuple):
    length: jax.Array

    def rewind(self, length):
        return self._replace(length=length)

    def commit(self, start, path):
        return self


@dataclass(frozen=True)
class ScriptModel:
    """Says what its variables tell it: token `script[i]` is certain at position i.

    -1 in the script gives logits that are not numbers. Every bit can be worked out by
    hand, and all scripts share one compiled program.
    """

    vocab_size: int = VOCAB_SIZE

    def init_cache(self, batch_size, capacity):
        return ScriptCache(jnp.zeros((batch_size,), jnp.int32))

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        following = variables["params"]["script"][cache.length[:, None] + steps + 1]
        logits = 20 * jax.nn.one_hot(following, self.vocab_size, dtype=jnp.float32)
        logits = jnp.where(following[..., None] < 0, jnp.nan, logits)
        return ModelOutput(logits), ScriptCache(cache.length + tokens.shape[1])


def script(tokens, start, size=1024, fill=7):
    """Returns variables that say `tokens` from position `start` on, then `fill`."""
    says = np.full(size, fill, np.int32)
    says[start : start + len(tokens)] = tokens
    return {"params": {"script": jnp.asarray(says)}}

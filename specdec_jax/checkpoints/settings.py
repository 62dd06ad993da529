"""Reads a config.json so that nothing in it is overlooked.

A setting that changes the model and is not honoured gives a model that is nearly right:
no error, a little less quality, and a law that is not the checkpoint's. So whoever
reads a setting takes it, and what nobody took must be known to be harmless, or be off
(null or false). Whoever knows a setting that is on by default takes it with `fixed`.
"""

from collections.abc import Mapping
from typing import Any

HARMLESS = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path _num_labels architectures
    attention_dropout attn_pdrop auto_map bos_token_id chunk_size_feed_forward
    classifier_dropout diversity_penalty do_sample dtype embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id finetuning_task
    gradient_checkpointing hidden_dropout id2label initializer_range is_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty
    max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past pad_token_id predict_special_tokens prefix
    pretraining_tp problem_type repetition_penalty resid_pdrop return_dict
    sep_token_id task_specific_params temperature tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version
    typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()
)
"""Settings that change nothing the network computes at inference, in any family."""


class Settings:
    """The settings of one config, each taken at most once or several times."""

    def __init__(self, config: Mapping[str, Any], name: str):
        """Wraps a config; `name` is what messages call the checkpoint."""
        self.name = name
        self._config = config
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or `default` where it is absent or null."""
        self._taken.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def nullable(self, key: str, absent: Any) -> Any:
        """Returns the value of `key`, None included, or `absent` where it is absent."""
        self._taken.add(key)
        return self._config.get(key, absent)

    def need(self, key: str) -> Any:
        """Returns the value of `key`.

        Raises:
          ValueError: It is absent or null.
        """
        value = self.take(key)
        if value is None:
            raise ValueError(f"{self.name}: config.json lacks {key!r}")
        return value

    def fixed(self, key: str, value: Any) -> None:
        """Raises ValueError unless `key` is absent, null or `value`."""
        found = self.take(key, value)
        if found != value:
            raise ValueError(
                f"{self.name}: config.json has {key} = {found!r}; only {value!r} is "
                "supported"
            )

    def choice(self, key: str, options: Mapping[str, str], default: str) -> str:
        """Returns `options` at the value of `key`, or raises ValueError."""
        found = self.take(key, default)
        if found not in options:
            raise ValueError(
                f"{self.name}: config.json has {key} = {found!r}; supported: "
                f"{', '.join(sorted(options))}"
            )
        return options[found]

    def refuse_rest(self, harmless: frozenset[str]) -> None:
        """Raises ValueError for settings that nobody took and that may matter."""
        known = self._taken | HARMLESS | harmless
        rest = {
            key: value
            for key, value in self._config.items()
            if key not in known and value is not None and value is not False
        }
        if rest:
            raise ValueError(
                f"{self.name}: config.json has settings that are not supported and may "
                f"change the model: {rest}"
            )

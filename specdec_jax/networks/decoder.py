"""One causal decoder for all families: Llama, Mistral, Qwen, GPT-2 and their kin.

A family is a `DecoderConfig` (and, in `checkpoints`, a table of tensor names); there is
no class a family. The module satisfies `base.LanguageModel` as it is: linen passes the
arguments of `apply` on to `__call__`, and hashes modules by value.

Layers are unrolled: a scan would carry weights and cache through another loop, which
costs 2.5 times a step on CPU.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.base import Block, ModelOutput
from specdec_jax.cache import KVCache, allocate
from specdec_jax.networks.attention import Attention, View
from specdec_jax.networks.config import DecoderConfig
from specdec_jax.networks.layers import MLP, Embedding, Linear, Norm, rotary_angles


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    config: DecoderConfig
    window: int | None
    dtype: Any
    tiled: bool

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B S D"],
        keys: Float[Array, "B H E T"],
        values: Float[Array, "B H E T"],
        view: View,
    ) -> tuple[Float[Array, "B S D"], Array, Array]:
        """Returns the layer's output, and both buffers with the block written."""
        config = self.config

        def norm(name: str) -> Norm:
            return Norm(config.norm, config.norm_eps, self.dtype, name=name)

        attention = Attention(
            config, self.window, self.dtype, self.tiled, name="self_attn"
        )
        mlp = MLP(
            config.mlp_width,
            config.activation,
            config.gated,
            config.mlp_bias,
            self.dtype,
            self.tiled,
            name="mlp",
        )
        mixed, keys, values = attention(norm("input_norm")(x), keys, values, view)
        x = x + mixed
        return x + mlp(norm("post_attention_norm")(x)), keys, values


class Decoder(nn.Module):
    """A causal language model; satisfies `base.LanguageModel`.

    Attributes:
      config: Shape and options.
      dtype: Type of parameters, cache, activations and logits.
      tiled: Whether weights lie in tiles, for CPUs; see `layers`.
      sliced: Whether few tokens are looked up one by one, for a TPU that has the whole
        table; see `layers.Embedding`.

    Example:
      >>> import jax
      >>> config = DecoderConfig(
      ...     vocab_size=11, width=8, num_layers=1, num_heads=2, num_kv_heads=1,
      ...     head_dim=4, mlp_width=16, max_positions=64)
      >>> model, tokens = Decoder(config), jnp.zeros((1, 3), jnp.int32)
      >>> cache = model.init_cache(1, 16)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens, cache)
      >>> output, cache = jax.jit(model.apply)(variables, tokens, cache)
      >>> output.logits.shape, cache.length.tolist()
      ((1, 3, 11), [3])
    """

    config: DecoderConfig
    dtype: Any = jnp.float32
    tiled: bool = False
    sliced: bool = False

    @property
    def vocab_size(self) -> int:
        """Columns of the LM head, V."""
        return self.config.vocab_size

    @nn.nowrap
    def init_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Returns an empty cache that holds at least `capacity` slots a row."""
        c = self.config
        return allocate(
            c.num_layers, batch_size, c.num_kv_heads, c.head_dim, capacity, self.dtype
        )

    def setup(self):
        """Makes the submodules; their names are the paths of the parameters."""
        c = self.config
        self.embed_tokens = Embedding(
            c.vocab_size, c.width, self.dtype, self.tiled and c.tied, self.sliced
        )
        if c.rotary is None:
            self.embed_positions = Embedding(c.max_positions, c.width, self.dtype)
        self.layers = [
            DecoderLayer(c, c.window(i), self.dtype, self.tiled)
            for i in range(c.num_layers)
        ]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        if not c.tied:
            self.lm_head = Linear(c.vocab_size, False, self.dtype, self.tiled)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        cache: KVCache,
        *,
        block: Block | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[ModelOutput, KVCache]:
        """Reads S tokens on top of the cache; see `base.LanguageModel.apply`.

        A cache with more layers than the model is taken too: its first layers are used
        and the rest is handed back as it came. So a model cut to its first layers can
        draft on the whole model's cache.

        Raises:
          ValueError: For a hidden layer that the model does not have.
        """
        self._check_layers(hidden_layers)
        view = self._view(tokens, cache.length, block)
        x = self._embed(tokens, view.positions[:, -tokens.shape[1] :])
        keys, values, inputs = list(cache.keys), list(cache.values), {}
        for i, layer in enumerate(self.layers):
            inputs[i] = x
            x, keys[i], values[i] = layer(x, keys[i], values[i], view)
        inputs[-1] = self.norm(x)
        output = ModelOutput(
            logits=self.logits(inputs[-1]),
            hidden=tuple(inputs[i] for i in hidden_layers),
        )
        length = cache.length + tokens.shape[1]
        return output, KVCache(length, tuple(keys), tuple(values))

    def embedding(self, tokens: Int[Array, "*A"]) -> Float[Array, "*A D"]:
        """Returns the token embeddings."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: Float[Array, "*A D"]) -> Float[Array, "*A V"]:
        """Applies the LM head to hidden layer -1."""
        if self.config.tied:
            return self.embed_tokens.attend(hidden)
        return self.lm_head(hidden)

    def _embed(self, tokens: Array, positions: Array) -> Float[Array, "B S D"]:
        x = self.embedding(tokens)
        if self.config.rotary is None:
            x = x + self.embed_positions(positions)
        return x

    def _view(self, tokens: Array, length: Array, block: Block | None) -> View:
        batch, size = tokens.shape
        if block is None:
            steps = jnp.arange(size, dtype=jnp.int32)
            block = Block(
                depth=jnp.broadcast_to(steps[None, :], (batch, size)),
                ancestors=jnp.broadcast_to(
                    (steps[:, None] >= steps[None, :])[None], (batch, size, size)
                ),
            )
        # Slots of the same tree that earlier calls have read.
        before = block.depth.shape[1] - size
        start = length - before
        positions = start[:, None] + block.depth
        rotary = self.config.rotary
        own = positions[:, before:]
        angles = None if rotary is None else rotary_angles(rotary, own)
        return View(
            start,
            positions,
            block.ancestors[:, before:],
            angles,
            longest=start.max(),
            earliest=own.min(),
        )

    def _check_layers(self, hidden_layers: tuple[int, ...]) -> None:
        for layer in hidden_layers:
            if not -1 <= layer < self.config.num_layers:
                raise ValueError(
                    f"hidden layer {layer} was asked of a model with "
                    f"{self.config.num_layers} layers; give -1 (input of the LM head) "
                    f"to {self.config.num_layers - 1}"
                )

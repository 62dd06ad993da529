"""What experiments on a pair of models share: the pair, its prompts, a calibration."""

import jax
import jax.numpy as jnp

from specdec_jax import Sampling, SpeculativeDecoder, compilation
from specdec_jax.base import Params
from specdec_jax.calibrate import calibrate
from specdec_jax.cli.prompts import bundled_prompts, contents, read_all
from specdec_jax.drafters import ModelDrafter
from specdec_jax.networks import Decoder, DecoderConfig, Rotary


def calibration(config, batch_size, temperature):
    """Returns `Calibration.summary()` of the pair that a config names.

    Args:
      config: Has target, draft, lengths, num_prompts, max_new_tokens and repeats. The
        target "random" is two tiny models that nobody trained.
      batch_size: Prompts decoded together.
      temperature: 0 is greedy.
    """
    decoder, prompts = pair(config)
    found = calibrate(
        decoder,
        prompts,
        lengths=config.lengths,
        max_new_tokens=config.max_new_tokens,
        sampling=Sampling(temperature=temperature),
        batch_size=batch_size,
        repeats=config.repeats,
    )
    return found.summary()


def pair(config, **options):
    """Returns the decoder that a config names, and its prompts.

    Args:
      config: Has target, draft and num_prompts. The target "random" is two tiny models
        that nobody trained.
      **options: Of `SpeculativeDecoder.from_pretrained`.
    """
    compilation.enable_compilation_cache()
    if config.target == "random":
        return random_pair(), [[5, 7, 5], [9, 2]][: config.num_prompts]
    decoder = SpeculativeDecoder.from_pretrained(config.target, config.draft, **options)
    entries = read_all(bundled_prompts(), config.num_prompts)
    return decoder, contents(decoder, entries, chat=False)


def random_pair():
    """Returns a decoder of two tiny models with random weights."""
    sizes = {"vocab_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = DecoderConfig(
        width=16,
        num_layers=1,
        mlp_width=16,
        max_positions=256,
        rotary=Rotary(tuple(1e4 ** (-i / 8) for i in range(0, 8, 2))),
        tied=True,
        **sizes,
    )
    model = Decoder(config, jnp.dtype("float32"))
    tokens = jnp.zeros((1, 1), jnp.int32)
    target, draft = (
        model.init(jax.random.key(seed), tokens, model.init_cache(1, 1))
        for seed in range(2)
    )
    return SpeculativeDecoder(
        model, Params(target, draft), None, ModelDrafter(model, 1)
    )

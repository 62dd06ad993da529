"""Flax networks that satisfy `base.LanguageModel`."""

from specdec_jax.networks.config import DecoderConfig, Rotary
from specdec_jax.networks.decoder import Decoder
from specdec_jax.networks.vocabulary import Remapped, remap, trim

__all__ = ["Decoder", "DecoderConfig", "Remapped", "Rotary", "remap", "trim"]

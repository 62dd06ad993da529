"""Flax networks that satisfy `base.LanguageModel`."""

from specdec_jax.networks.config import DecoderConfig, Rotary
from specdec_jax.networks.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig", "Rotary"]

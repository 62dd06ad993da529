"""Checkpoints from Hugging Face folders, the hub and GGUF files."""

from specdec_jax.checkpoints.load import Loaded, load
from specdec_jax.checkpoints.source import Source, Tensor

__all__ = ["Loaded", "Source", "Tensor", "load"]

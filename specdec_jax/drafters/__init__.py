"""Drafters: where proposals come from. One drafter a file; all meet `base.Drafter`."""

from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.nested import Nested
from specdec_jax.drafters.ngram import NgramDrafter
from specdec_jax.drafters.none import NoDrafter
from specdec_jax.drafters.staged import Staged

__all__ = ["ModelDrafter", "Nested", "NgramDrafter", "NoDrafter", "Staged"]

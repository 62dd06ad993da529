"""Drafters: where proposals come from. One drafter a file; all meet `base.Drafter`."""

from specdec_jax.drafters.adaptive import Adaptive
from specdec_jax.drafters.chain import Stop
from specdec_jax.drafters.early_exit import EarlyExit, first_layers
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.nested import Nested
from specdec_jax.drafters.ngram import NgramDrafter
from specdec_jax.drafters.ngram_counts import NgramCounts
from specdec_jax.drafters.none import NoDrafter
from specdec_jax.drafters.staged import Staged
from specdec_jax.drafters.table import (
    LookupTable,
    fit_bigram,
    fit_unigram,
    frequent_ids,
)
from specdec_jax.drafters.tree import TreeDrafter, branching_parents, read_parents
from specdec_jax.drafters.tree_dynamic import DynamicTreeDrafter
from specdec_jax.drafters.tree_joined import JoinedTrees

__all__ = [
    "Adaptive",
    "DynamicTreeDrafter",
    "EarlyExit",
    "JoinedTrees",
    "LookupTable",
    "ModelDrafter",
    "Nested",
    "NgramCounts",
    "NgramDrafter",
    "NoDrafter",
    "Staged",
    "Stop",
    "TreeDrafter",
    "branching_parents",
    "first_layers",
    "fit_bigram",
    "fit_unigram",
    "frequent_ids",
    "read_parents",
]

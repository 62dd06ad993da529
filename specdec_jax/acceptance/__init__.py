"""Acceptance rules: which drafted tokens to keep, and what follows them.

A rule is written for one row and judged by its exact `law`; the loop vmaps it.
"""

from specdec_jax.acceptance.coupled import Coupled
from specdec_jax.acceptance.rejection import Rejection

RULES = {"rejection": Rejection(), "coupled": Coupled()}
"""Names that the command line and `SpeculativeDecoder` understand."""

__all__ = ["RULES", "Coupled", "Rejection"]

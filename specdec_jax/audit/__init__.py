"""Proofs that the output's law did not move: exact, statistical, and by identity."""

from specdec_jax.audit.identity import NEAR_TIE, Difference, explain_difference

__all__ = ["NEAR_TIE", "Difference", "explain_difference"]

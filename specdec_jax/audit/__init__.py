"""Proofs that the output's law did not move: exact, statistical, and by identity."""

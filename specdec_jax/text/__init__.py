"""Text in, text out: requests are checked, packed, run, followed and reported.

requests   what a user asks for, checked        pairing     names -> target and draft
packing    buckets and batches                  running     the two compiled programs
following  what the host sees in between        detokenize  tokens -> whole characters
results    what comes out                       decoder     `SpeculativeDecoder`
"""

from specdec_jax.text.decoder import SpeculativeDecoder
from specdec_jax.text.following import Piece
from specdec_jax.text.results import NonFiniteLogitsError, Result

__all__ = ["NonFiniteLogitsError", "Piece", "Result", "SpeculativeDecoder"]

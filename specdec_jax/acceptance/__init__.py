"""Acceptance rules: which drafted tokens to keep, and what follows them.

A rule is written for one row and judged by its exact `law`; the loop vmaps it.
`RULES` are lossless. `LOSSY` change the law of the text, and are refused unless asked
for in so many words.
"""

from specdec_jax.acceptance.block import Block
from specdec_jax.acceptance.coupled import Coupled
from specdec_jax.acceptance.lossy import Lenience, Typical
from specdec_jax.acceptance.multi_draft import MultiDraft
from specdec_jax.acceptance.rejection import Rejection

RULES = {
    "rejection": Rejection(),
    "block": Block(),
    "coupled": Coupled(),
    "multi_draft": MultiDraft(),
}
"""Names that the command line and `SpeculativeDecoder` understand; all lossless."""

EVERY_RULE = {**RULES, "multi_draft, independent": MultiDraft("independent")}
"""What is tested: the rules, where one stands for two in both of its kinds."""

LOSSY = {"lenience": Lenience(), "typical": Typical()}
"""Names that need a permission: the text's law is not the target's."""

__all__ = [
    "EVERY_RULE",
    "LOSSY",
    "RULES",
    "Block",
    "Coupled",
    "Lenience",
    "MultiDraft",
    "Rejection",
    "Typical",
]

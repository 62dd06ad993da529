"""Proofs that the output's law did not move: exact, statistical, and by identity.

Each level can be used alone: `exact_law`, `enumerate_rules`, `loop_law`,
`compare_texts` and `audit_records`; `audit` runs several. `audit.faults` plants faults
and says which level sees them.
"""

from specdec_jax.audit.exact import exact_law
from specdec_jax.audit.identity import NEAR_TIE, Difference, explain_difference
from specdec_jax.audit.levels import LEVELS, audit, check_levels, enumerate_rules
from specdec_jax.audit.loop_law import loop_law
from specdec_jax.audit.records import Records, audit_records, read_records
from specdec_jax.audit.report import Report
from specdec_jax.audit.subject import Subject
from specdec_jax.audit.texts import compare_texts

__all__ = [
    "LEVELS",
    "NEAR_TIE",
    "Difference",
    "Records",
    "Report",
    "Subject",
    "audit",
    "audit_records",
    "check_levels",
    "compare_texts",
    "enumerate_rules",
    "exact_law",
    "explain_difference",
    "loop_law",
    "read_records",
]

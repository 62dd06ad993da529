"""Faults that real implementations shipped, planted one at a time, and what sees them.

A fault is a right subject on a small table model with one part exchanged: the rule, the
drafter, the model or the step. Levels are run cheapest first until one objects; the
audit is worth what it catches here, and what it lets pass: `CONTROLS` are right.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from specdec_jax.acceptance import EVERY_RULE, RULES
from specdec_jax.audit import enumeration
from specdec_jax.audit.coins import coin_problems
from specdec_jax.audit.exact import exact_law
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE, loop_law
from specdec_jax.audit.planted import block, parts, rules, tree_parts, trees
from specdec_jax.audit.planted.rules import Chain
from specdec_jax.audit.subject import Subject
from specdec_jax.audit.table import TableModel, table
from specdec_jax.audit.texts import compare_texts
from specdec_jax.base import Params
from specdec_jax.drafters import ModelDrafter, Nested, Staged, TreeDrafter
from specdec_jax.sampling import Sampling

LAW, EFFICIENCY, BOOKKEEPING = "law", "efficiency", "bookkeeping"
"""What a fault spoils: the text's law, only speed, or counts, budgets and ends."""

VOCAB_SIZE, NUM_DRAFT_TOKENS = 5, 3
PROMPTS = [[a, b, a, a + b, 1, b][: 2 + a + b] for a in range(4) for b in range(3)]
NUM_SAMPLES = 16384

EOS = (3,)
"""An id that ends texts early, in the middle of rounds too."""

SAMPLED = Sampling(temperature=1.0)


RUN_THE_LOOP = ("statistics", "identity")
"""Levels that draw; a rule that is only a law stops before them."""

LEVELS = {
    "rule": ("exact_law", "enumeration", "statistics", "identity"),
    "drafter": ("statistics", "identity"),
    "target": ("identity", "statistics"),
    "step": ("identity", "statistics"),
}
"""Levels that run the exchanged part at all, cheapest first."""


class Fault(NamedTuple):
    """One way to be wrong, and where it comes from."""

    kind: str
    """LAW, EFFICIENCY or BOOKKEEPING."""
    part: str
    """The field of `Subject` that is exchanged."""
    wrong: Any
    source: str
    """Section of the reference that describes it."""
    on_trees: bool = False
    """Whether it is planted where trees are drafted."""


class Outcome(NamedTuple):
    """What became of a planted fault."""

    name: str
    kind: str
    caught: bool
    level: str | None
    """The first level that objected."""


_MODEL: Any = TableModel(VOCAB_SIZE)


def _drafter(kind: type, **options: Any) -> Any:
    return kind(_MODEL, NUM_DRAFT_TOKENS, **options)


def _stages() -> tuple[Any, ...]:
    return ModelDrafter(_MODEL, 2), ModelDrafter(_MODEL, 1)


def _nested(kind: type, **options: Any) -> Nested:
    return kind(_MODEL, ModelDrafter(_MODEL, 2), NUM_DRAFT_TOKENS, **options)


TREE = (-1, -1, 0, 0, 1)
"""The tree of the subject that drafts trees."""


def _tree(kind: type) -> TreeDrafter:
    return kind(_MODEL, TREE)


FAULTS: dict[str, Fault] = {
    "draft law misreported": Fault(
        LAW, "rule", Chain(hear=rules.draft_softer), "B.1.4"
    ),
    "greedy draft judged by its softmax": Fault(
        LAW, "drafter", _drafter(parts.GreedyToldSoft), "B.1.4"
    ),
    "bonus row without the policy": Fault(
        LAW, "rule", Chain(hear=rules.bonus_without_policy), "B.1.1"
    ),
    "no residual": Fault(LAW, "rule", Chain(corrected=rules.target_again), "B.1.4"),
    "first token unconditional": Fault(
        LAW, "rule", Chain(hear=rules.first_is_right), "B.1.4"
    ),
    "rows shifted by one": Fault(LAW, "rule", Chain(hear=rules.rows_shifted), "B.1.1"),
    "residual of the wrong row": Fault(
        LAW, "rule", Chain(corrected=rules.next_row), "B.1.1"
    ),
    "matches counted, not the prefix": Fault(
        LAW, "rule", Chain(count=rules.matches), "B.1.1"
    ),
    "argmax verification of sampled text": Fault(
        LAW, "rule", Chain(log_ratio=rules.argmax_only), "A.5"
    ),
    "stale target cache": Fault(
        LAW, "target", parts.SeesStaleSlots(VOCAB_SIZE), "B.1.5"
    ),
    "residual with epsilon 1e-6": Fault(
        LAW, "rule", Chain(corrected=rules.residual_plus), "B.2"
    ),
    "residual in bfloat16": Fault(
        LAW, "rule", Chain(corrected=rules.in_bfloat16), "B.2"
    ),
    "softmax of the residual": Fault(
        LAW, "rule", Chain(corrected=rules.softmax_of_residual), "B.2"
    ),
    "coins in bfloat16": Fault(
        LAW, "rule", Chain(coins=rules.coins_in_bfloat16), "B.2"
    ),
    "coin at most the ratio": Fault(LAW, "rule", Chain(flags=rules.at_most), "B.2"),
    "one coin for all positions": Fault(
        LAW, "rule", Chain(coins=rules.one_coin), "B.1.5"
    ),
    "draft and residual share their noise": Fault(
        LAW, "rule", Chain(noise="position"), "B.1.5"
    ),
    "block: stops at the first failed coin": Fault(
        LAW, "rule", block.StopsAtFirstFailure(), "B.3"
    ),
    "block: token-wise residual": Fault(LAW, "rule", block.TokenResidual(), "B.3"),
    "block: product clipped at the end": Fault(
        LAW, "rule", block.ClipsAtTheEnd(), "B.3"
    ),
    "tree: siblings tested one by one, one residual": Fault(
        LAW, "rule", trees.JudgedAlone("independent"), "B.6.2"
    ),
    "tree: duplicates merged": Fault(
        LAW, "rule", trees.MergesDuplicates("independent"), "B.6.2"
    ),
    "tree: draft law not renormalised": Fault(
        LAW, "rule", trees.NotRenormalised("distinct"), "B.6.2"
    ),
    "tree: siblings tested in another order": Fault(
        LAW, "rule", trees.LikeliestFirst("distinct"), "B.6.2"
    ),
    "tree: siblings see each other": Fault(
        LAW, "target", tree_parts.SeesSiblings(VOCAB_SIZE), "B.6.2", True
    ),
    "tree: position is the slot": Fault(
        LAW, "target", tree_parts.PositionIsSlot(VOCAB_SIZE), "B.6.2", True
    ),
    "tree: accepted path not moved": Fault(
        LAW,
        "target",
        tree_parts.WithCache(VOCAB_SIZE, tree_parts.Uncommitted),
        "B.6.1",
        True,
    ),
    "tree: accepted path moved wrongly": Fault(
        LAW,
        "target",
        tree_parts.WithCache(VOCAB_SIZE, tree_parts.CommittedAlong),
        "B.6.1",
        True,
    ),
    "tree: likeliest children told as drawn": Fault(
        LAW, "drafter", _tree(tree_parts.LikeliestToldAsDrawn), "B.6.2", True
    ),
    "tree: children pruned by their probability": Fault(
        LAW, "drafter", tree_parts.PrunesUnlikely(_MODEL, (-1, -1, -1)), "B.6.2", True
    ),
    "nested: inner draft's law reported": Fault(
        LAW, "drafter", _nested(parts.NestedMisreported), "B.5"
    ),
    "nested: residual reported on inner rejects": Fault(
        LAW,
        "drafter",
        _nested(parts.NestedMisreported, residual_when_rejected=True),
        "B.5",
    ),
    "nested: inner rounds share their noise": Fault(
        LAW, "drafter", _nested(parts.NestedSharedNoise), "B.5"
    ),
    "unlikely drafts dropped": Fault(
        LAW, "drafter", _drafter(parts.DropsUnlikely), "B.9"
    ),
    "trimmed draft told by its whole law": Fault(
        LAW, "drafter", _drafter(parts.TrimmedToldWhole), "B.8"
    ),
    "absolute difference as residual": Fault(
        LAW, "rule", Chain(corrected=rules.absolute), "C.3"
    ),
    "ratio inverted": Fault(LAW, "rule", Chain(log_ratio=rules.inverted), "C.3"),
    "lenience 0.9": Fault(LAW, "rule", Chain(log_ratio=rules.lenient), "C.3"),
    "typical acceptance": Fault(LAW, "rule", Chain(log_ratio=rules.typical), "B.7"),
    "hole in the draft cache": Fault(
        EFFICIENCY, "drafter", _drafter(parts.HoleInCache), "B.1.5"
    ),
    "stale draft cache": Fault(
        EFFICIENCY, "drafter", _drafter(parts.StaleCache), "B.1.5"
    ),
    "wrong draft positions": Fault(
        EFFICIENCY, "drafter", _drafter(parts.LatePositions), "B.1.5"
    ),
    "staged: stages see two tokens back": Fault(
        EFFICIENCY,
        "drafter",
        parts.StagedNearSighted(_stages()),
        "B.5",
    ),
    "early exit after a hole in the cache": Fault(
        EFFICIENCY, "drafter", _drafter(parts.LateEarlyExit), "B.8"
    ),
    "draft forgets the temperature": Fault(
        EFFICIENCY, "drafter", _drafter(parts.ForgetsTemperature), "B.1.4"
    ),
    "budget overrun": Fault(BOOKKEEPING, "step", parts.over_budget, "B.1.1"),
    "tokens after the end of a text": Fault(
        BOOKKEEPING, "step", parts.past_eos, "B.1.1"
    ),
    "finished rows counted": Fault(BOOKKEEPING, "step", parts.counts_verdicts, "B.1.5"),
    "bonus token forgotten": Fault(BOOKKEEPING, "step", parts.drops_bonus, "B.1.1"),
}
"""Every fault by its name."""

CONTROLS: dict[str, Any] = EVERY_RULE
"""Right rules that no level may object to."""


def right_subject(on_trees: bool = False) -> Subject:
    """Returns the table pair that faults are planted in; the draft is a poor one."""
    tables = (table(jax.random.key(seed), VOCAB_SIZE, 1.3) for seed in (1, 2))
    params = Params(*tables)
    if on_trees:
        return Subject(params, _MODEL, _tree(TreeDrafter), RULES["multi_draft"])
    return Subject(params, _MODEL, _drafter(ModelDrafter), RULES["rejection"])


def subject_of(fault: Fault) -> Subject:
    """Returns the right subject with one part exchanged."""
    right = right_subject(fault.on_trees)
    subject = right._replace(honest=_MODEL, **{fault.part: fault.wrong})
    if not isinstance(subject.drafter, Nested | Staged):
        return subject
    both = subject.params.draft, table(jax.random.key(3), VOCAB_SIZE, 1.3)
    return subject._replace(params=subject.params._replace(draft=both))


def run_fault(name: str) -> Outcome:
    """Runs the levels on a planted fault until one catches it.

    Raises:
      ValueError: There is no such fault.
    """
    if name not in FAULTS:
        raise ValueError(
            f"there is no fault {name!r}; offered are {', '.join(map(repr, FAULTS))}"
        )
    fault = FAULTS[name]
    level = first_objection(
        subject_of(fault), LEVELS[fault.part], efficiency=fault.kind == EFFICIENCY
    )
    return Outcome(name, fault.kind, level is not None, level)


def run_control(name: str) -> str | None:
    """Returns the level that objects to a right rule; None is as it should be.

    The rule judges chains, and trees of every kind of siblings that it can.
    """
    rule = CONTROLS[name]
    for siblings in rule.siblings:
        right, levels = right_subject(), LEVELS["rule"]
        if siblings != "none":
            right, levels = right_subject(on_trees=True), LEVELS["drafter"]
            right = right._replace(drafter=replace(right.drafter, siblings=siblings))
        found = first_objection(right._replace(rule=rule), levels)
        if found is not None:
            return found
    return None


def first_objection(
    subject: Subject, levels: Sequence[str], *, efficiency: bool = False
) -> str | None:
    """Returns the first of the levels that objects to a subject.

    Args:
      subject: On the table model.
      levels: Names of levels, in the order to run them.
      efficiency: Looks for lost speed; the law must then be right.
    """
    for level in levels:
        if level in RUN_THE_LOOP and not callable(subject.rule):
            return None
        lossy, slow = _OBJECTS[level](subject)
        if efficiency and lossy:
            return None
        if slow if efficiency else lossy:
            return level
    return None


def _exact(subject: Subject) -> tuple[bool, bool]:
    return not exact_law(subject, PROMPTS, SAMPLED, num_contexts=8).lossless, False


def _enumeration(subject: Subject) -> tuple[bool, bool]:
    rule = subject.rule
    worst = enumeration.worst_deviation(rule)
    return worst > enumeration.TOLERANCE or bool(coin_problems(rule)), False


def _identity(subject: Subject) -> tuple[bool, bool]:
    found = compare_texts(
        subject, PROMPTS, SAMPLED, max_new_tokens=7, eos_token_ids=EOS
    )
    return not found.lossless, False


def _statistics(subject: Subject) -> tuple[bool, bool]:
    found = loop_law(subject, PROMPTS[:2], SAMPLED, num_samples=NUM_SAMPLES)
    return not found.lossless, (found.draft_deviation or 0.0) > DRAFT_TOLERANCE


_OBJECTS: dict[str, Callable[[Subject], tuple[bool, bool]]] = {
    "exact_law": _exact,
    "enumeration": _enumeration,
    "statistics": _statistics,
    "identity": _identity,
}
"""What says whether the law is lost, and whether speed is."""

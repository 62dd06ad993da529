"""Which drafter goes with a target: names become drafters, and misfits are refused."""

import difflib
from collections.abc import Callable
from typing import Any

from specdec_jax.acceptance import RULES
from specdec_jax.base import AcceptanceRule, Drafter
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter

DEFAULT_TARGET, DEFAULT_DRAFT = "pystd-5m", "pystd-draft"
"""The bundled pair, which the command line uses unless told otherwise."""


def find_rule(rule: str | AcceptanceRule) -> AcceptanceRule:
    """Returns the acceptance rule of a name; a rule object is returned as it is.

    Raises:
      ValueError: There is no such rule.

    Example:
      >>> find_rule("coupled")
      Coupled()
    """
    if not isinstance(rule, str):
        if not callable(rule) or not hasattr(rule, "law"):
            raise ValueError(
                f"rule is {rule!r}; give a name ({', '.join(RULES)}) or a rule object"
            )
        return rule
    if rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown rule {rule!r}{hint}; offered are {', '.join(RULES)}")
    return RULES[rule]


def find_drafter(
    target: Any,
    draft: Any,
    *,
    num_draft_tokens: int,
    load_draft: Callable[[str], Any],
) -> tuple[Drafter, Any]:
    """Returns the drafter that a user asked for, and its variables.

    Args:
      target: The target as `checkpoints.load` returns it.
      draft: None or "none", "ngram", a checkpoint's name, folder or file, or a drafter.
      num_draft_tokens: Draft length K; 0 is plain decoding.
      load_draft: Loads a checkpoint.

    Raises:
      ValueError: The draft is of no such kind, or its vocabulary is not the target's.
    """
    if isinstance(draft, list | tuple):
        raise ValueError(
            f"{len(draft)} drafts were given; staged drafts are not available yet, "
            "give one"
        )
    if draft is None or draft == "none" or num_draft_tokens == 0:
        return NoDrafter(), None
    if draft == "ngram":
        return NgramDrafter(num_draft_tokens), None
    if hasattr(draft, "draft") and hasattr(draft, "num_nodes"):
        return draft, None
    loaded = load_draft(draft)
    check_same_vocabulary(target, loaded)
    vocab_size = target.model.vocab_size
    return ModelDrafter(loaded.model, num_draft_tokens, vocab_size), loaded.params


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Refuses a draft whose token ids mean other text than the target's.

    Sizes may differ, since checkpoints pad their embedding; ids that only one of the
    two has are never drafted. Equal sizes prove nothing.

    Raises:
      ValueError: Naming an id that means two things.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        if target.model.vocab_size != draft.model.vocab_size:
            raise ValueError(
                f"the target has {target.model.vocab_size} ids and the draft "
                f"{draft.model.vocab_size}, and without both tokenizers nothing says "
                "which of them agree; use a draft with the target's vocabulary"
            )
        return
    ours = _by_id(target.tokenizer)
    theirs = _by_id(draft.tokenizer)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"the draft's tokenizer is not the target's: id {token} is "
                f"{theirs[token]!r} in the draft and {ours[token]!r} in the target; "
                "use a draft that was trained with the target's tokenizer, or 'ngram'"
            )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}

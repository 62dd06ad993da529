"""Which drafter goes with a target: names become drafters, and misfits are refused."""

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specdec_jax.acceptance import RULES
from specdec_jax.base import AcceptanceRule, Drafter
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter
from specdec_jax.sharding import Placement, check, read_shards
from specdec_jax.text.requests import per_prompt

DEFAULT_TARGET, DEFAULT_DRAFT = "pystd-5m", "pystd-draft"
"""The bundled pair, which the command line uses unless told otherwise."""


def default_draft(target: str, draft_num_layers: int | None = None) -> str:
    """Returns what drafts for a target where nobody said.

    Example:
      >>> default_draft("pystd-5m"), default_draft("org/name")
      ('pystd-draft', 'ngram')
    """
    if draft_num_layers is not None:
        return target
    return DEFAULT_DRAFT if target == DEFAULT_TARGET else "ngram"


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
    found: Any = RULES[rule]
    return found


def load_pair(
    target: str | Path,
    draft: Any,
    num_draft_tokens: int,
    dtype: Any,
    draft_num_layers: int | None,
    placement: Placement | None = None,
) -> tuple[Any, Drafter, Any]:
    """Loads a target and what drafts for it; see `SpeculativeDecoder.from_pretrained`.

    With a placement, weights are read straight to their devices.

    Returns:
      The loaded target, the drafter, and the drafter's variables or None.

    Raises:
      ValueError: An argument is out of range, or target and draft do not fit.
      FileNotFoundError: There is no such checkpoint.
    """
    from specdec_jax.checkpoints import load  # brings transformers in

    _check(draft, num_draft_tokens, draft_num_layers)
    on = partial(_placer, placement, str(target)) if placement else lambda **_: None
    loaded: Any = load(target, dtype=dtype, place=on(draft=False))
    if draft is None or draft == "none" or num_draft_tokens == 0:
        return loaded, NoDrafter(), None
    if draft == "ngram":
        return loaded, NgramDrafter(num_draft_tokens), None
    if _is_drafter(draft):
        return loaded, draft, None
    small: Any = loaded
    elsewhere = placement is not None and placement.draft != "target"
    if draft != target or draft_num_layers is not None or elsewhere:
        place = on(draft=True)
        small = load(draft, dtype=dtype, num_layers=draft_num_layers, place=place)
    check_same_vocabulary(loaded, small)
    vocab_size = loaded.model.vocab_size
    drafter = ModelDrafter(small.model, num_draft_tokens, vocab_size)
    return loaded, drafter, small.params


def _placer(placement: Placement, name: str, *, draft: bool) -> Callable[[Any], Any]:
    """Returns the `place` of `checkpoints.load` for a target or a draft."""
    from specdec_jax.checkpoints.load import parameter_shapes

    def place(model: Any) -> Callable[[str, tuple[int, ...], Any], Any]:
        placed = placement.parameters(parameter_shapes(model), model, draft=draft)
        if not draft:
            check(placement, placed.values(), name)

        def put(path: str, shape: tuple[int, ...], read: Any) -> Any:
            return read_shards(placement.sharding(placed[path]), shape, read)

        return put

    return place


def _check(draft: Any, num_draft_tokens: int, draft_num_layers: int | None) -> None:
    """Refuses arguments that no checkpoint could make right, before any is read."""
    per_prompt("num_draft_tokens", num_draft_tokens, 1, least=0, most=1024)
    if isinstance(draft, list | tuple):
        raise ValueError(
            f"{len(draft)} drafts were given; staged drafts are not available yet, "
            "give one"
        )
    if not (draft is None or isinstance(draft, str | Path) or _is_drafter(draft)):
        raise ValueError(
            f"draft is {draft!r}; give a checkpoint, 'ngram', 'none' or a drafter"
        )
    named = isinstance(draft, str | Path) and draft not in ("none", "ngram")
    if draft_num_layers is not None and not named:
        raise ValueError(
            f"draft_num_layers is {draft_num_layers}, but the draft is {draft!r}; "
            "name a checkpoint as draft, such as the target's own"
        )


def _is_drafter(draft: Any) -> bool:
    return hasattr(draft, "draft") and hasattr(draft, "num_nodes")


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

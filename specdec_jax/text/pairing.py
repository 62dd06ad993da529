"""Which drafter goes with a target: names become drafters, and misfits are refused."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec_jax.acceptance import LOSSY, RULES, MultiDraft
from specdec_jax.acceptance.multi_draft import KINDS
from specdec_jax.base import AcceptanceRule, Drafter
from specdec_jax.drafters import NoDrafter
from specdec_jax.sharding import Placement, check, read_shards
from specdec_jax.text.composing import COMPOSE, check_composition, draft_lengths
from specdec_jax.text.makers import CHECKPOINT, DRAFTS, Ask, maker_of, read_name
from specdec_jax.text.trees import JUDGE, read_shape

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


def find_rule(
    rule: str | AcceptanceRule | None,
    drafter: Drafter | None = None,
    *,
    allow_lossy: bool = False,
) -> AcceptanceRule:
    """Returns the acceptance rule of a name; a rule object is returned as it is.

    Args:
      rule: A name of `acceptance.RULES` or `LOSSY`, or a rule object; None is the
        default for such drafts: rejection for chains, multi_draft for drawn trees,
        coupled for other trees.
      drafter: Whose drafts it is to judge: the name "multi_draft" stands for the kind
        that fits its siblings.
      allow_lossy: Whether the rule may change the text's distribution.

    Raises:
      ValueError: There is no such rule, it cannot judge the drafter's drafts, or it is
        lossy and that is not permitted.

    Example:
      >>> find_rule("coupled")
      Coupled()
    """
    siblings = "none" if drafter is None else drafter.siblings
    if rule is None:
        rule = JUDGE.get(siblings, "multi_draft")
    found: Any = _named_rule(rule) if isinstance(rule, str) else rule
    if not callable(found) or not hasattr(found, "law"):
        raise ValueError(
            f"rule is {rule!r}; give a name ({', '.join(RULES)}) or a rule object"
        )
    if not found.lossless and not allow_lossy:
        raise ValueError(
            f"the rule {rule} is lossy: it changes the text's distribution, which is "
            "then not the target's; permit it with allow_lossy=True (--allow-lossy), "
            f"or use {', '.join(RULES)}"
        )
    if rule == "multi_draft" and siblings in KINDS:
        found = MultiDraft(siblings)
    if siblings not in found.siblings:
        raise ValueError(
            f"the rule {rule} does not judge the trees of {drafter}, whose siblings "
            f"are {siblings}: the text's distribution would not be the target's; use "
            f"{JUDGE.get(siblings, 'multi_draft or coupled')}"
        )
    return found


def _named_rule(name: str) -> Any:
    if name in RULES:
        return RULES[name]
    if name in LOSSY:
        return LOSSY[name]
    near = difflib.get_close_matches(name, [*RULES, *LOSSY], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"unknown rule {name!r}{hint}; offered are {', '.join(RULES)}")


def load_pair(
    target: str | Path,
    draft: Any,
    num_draft_tokens: int | Sequence[int],
    dtype: Any,
    draft_num_layers: int | None,
    placement: Placement | None = None,
    compose: str | None = None,
    branching: Sequence[int] | None = None,
    rule: str | AcceptanceRule | None = None,
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

    drafts = _as_drafts(draft)
    check_composition(drafts, compose)
    by_name = rule is None or rule == "multi_draft"
    kinds = KINDS if by_name else find_rule(rule, allow_lossy=True).siblings
    shape = read_shape(branching, compose, rule, kinds)
    if shape is not None and shape.depth is not None:
        num_draft_tokens = shape.depth
    lengths = draft_lengths(num_draft_tokens, len(drafts), compose)
    named = read_drafts(draft, draft_num_layers)
    if shape is not None:
        _check_models(drafts, named)
    on: Callable[..., dict[str, Any]] = lambda **_: {}  # noqa: E731
    if placement is not None:
        on = partial(_placer, placement, str(target))
    loaded: Any = load(target, dtype=dtype, **on(draft=False))
    if lengths[0] == 0:
        return loaded, NoDrafter(), None
    if _is_drafter(drafts[0]):
        return loaded, drafts[0], None
    elsewhere = placement is not None and placement.draft != "target"

    def load_draft(name: str, num_layers: int | None, same_vocabulary: bool) -> Any:
        small: Any = loaded
        if name != str(target) or num_layers is not None or elsewhere:
            small = load(name, dtype=dtype, num_layers=num_layers, **on(draft=True))
        if same_vocabulary:
            check_same_vocabulary(loaded, small, name)
        return small

    def make(index: int, length: int) -> tuple[Drafter, Any]:
        name, options = named[index]
        ask = Ask(name, loaded, length, options, load_draft)
        drafter, variables = maker_of(name).make(ask)
        return shape.grow(drafter, name) if shape else drafter, variables

    if compose is None:
        return loaded, *make(0, lengths[0])
    return loaded, *COMPOSE[compose].make(lengths, make)


def _check_models(drafts: list[Any], named: list[tuple[str, dict[str, str]]]) -> None:
    """Refuses drafts that are no models, and so grow no trees."""
    for one, (name, _) in zip(drafts, named, strict=True):
        if _is_drafter(one) or maker_of(name) is not CHECKPOINT:
            raise ValueError(
                f"the draft is {one!r}, and trees are drafted by a model; name a "
                "checkpoint, or leave out branching"
            )


def _placer(placement: Placement, name: str, *, draft: bool) -> dict[str, Any]:
    """Returns `place` and `whole` of `checkpoints.load` for a target or a draft."""
    from specdec_jax.checkpoints.load import parameter_shapes

    def place(model: Any) -> Callable[[str, tuple[int, ...], Any], Any]:
        placed = placement.parameters(parameter_shapes(model), model, draft=draft)
        if not draft:
            check(placement, placed.values(), name)

        def put(path: str, shape: tuple[int, ...], read: Any) -> Any:
            return read_shards(placement.sharding(placed[path]), shape, read)

        return put

    return {"place": place, "whole": placement.whole(draft)}


def _as_drafts(draft: Any) -> list[Any]:
    """Returns the drafts as a list of names or drafters, whatever was given.

    Raises:
      ValueError: One of them is neither.
    """
    drafts = list(draft) if isinstance(draft, list | tuple) else [draft]
    for one in drafts:
        if not (one is None or isinstance(one, str | Path) or _is_drafter(one)):
            raise ValueError(
                f"draft is {one!r}; give a checkpoint, {_offered()} or a drafter"
            )
    return [str(one) if isinstance(one, Path) else one or "none" for one in drafts]


def read_drafts(
    draft: Any, draft_num_layers: int | None = None
) -> list[tuple[str, dict[str, str]]]:
    """Returns the names and options of one draft or several; loads nothing.

    Args:
      draft: As `SpeculativeDecoder.from_pretrained` takes it; drafters have no name.
      draft_num_layers: The same; it goes with a single draft.

    Raises:
      ValueError: An option does not go with its draft.

    Example:
      >>> read_drafts(["org/name:layers=4", "ngram"])
      [('org/name', {'layers': '4'}), ('ngram', {})]
    """
    drafts = _as_drafts(draft)
    named = [("", {}) if _is_drafter(one) else read_name(one) for one in drafts]
    if draft_num_layers is None:
        return named
    name, options = named[0]
    if len(named) > 1:
        raise ValueError(
            f"draft_num_layers is {draft_num_layers} for {len(named)} drafts; write it "
            f"behind the one that it is meant for, as {name}:layers={draft_num_layers}"
        )
    if _is_drafter(drafts[0]) or "layers" not in maker_of(name).options:
        raise ValueError(
            f"draft_num_layers is {draft_num_layers}, but the draft is {drafts[0]!r}; "
            "name a checkpoint as draft, such as the target's own"
        )
    return [(name, {"layers": str(draft_num_layers)} | options)]


def _offered() -> str:
    return ", ".join(repr(name) for name in DRAFTS)


def _is_drafter(draft: Any) -> bool:
    return hasattr(draft, "draft") and hasattr(draft, "num_nodes")


def check_same_vocabulary(target: Any, draft: Any, name: str) -> None:
    """Refuses a draft whose token ids mean other text than the target's.

    Sizes may differ, since checkpoints pad their embedding; ids that only one of the
    two has are never drafted. Equal sizes prove nothing.

    Args:
      target: The loaded target.
      draft: The loaded draft.
      name: What messages call the draft.

    Raises:
      ValueError: Naming an id that means two things.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        if target.model.vocab_size != draft.model.vocab_size:
            raise ValueError(
                f"the target has {target.model.vocab_size} ids and the draft {name!r} "
                f"{draft.model.vocab_size}, and without both tokenizers nothing says "
                "which of them agree; use a draft with the target's vocabulary"
            )
        return
    ours = _by_id(target.tokenizer)
    theirs = _by_id(draft.tokenizer)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"the tokenizer of draft {name!r} is not the target's: id {token} is "
                f"{theirs[token]!r} in the draft and {ours[token]!r} in the target; "
                "use a draft that was trained with the target's tokenizer, or 'ngram', "
                f"or {name}:tokenizer=shared to draft the tokens that both have"
            )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}

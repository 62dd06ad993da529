"""What a composed drafter asks of the drafters inside it."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from specdec_jax.base import Drafter


def with_window(drafter: Any, window: int) -> Any:
    """Returns a drafter all of whose caches re-read `window` tokens or more.

    A child of a composed drafter is called once a round, and the text may have grown by
    all that the composed drafter drafts, and one, when it is called next. With less
    than these K + 1 tokens its cache keeps holes, which other rows of a batch may or
    may not happen to fill.

    Args:
      drafter: A frozen dataclass; fields named `window` are caches', fields that hold
        drafters are looked into.
      window: Tokens to re-read.

    Example:
      >>> from specdec_jax.audit.table import TableModel
      >>> from specdec_jax.drafters import ModelDrafter
      >>> with_window(ModelDrafter(TableModel(4), 3), 8).window
      8
    """
    if not is_dataclass(drafter):
        return drafter
    changes: dict[str, Any] = {}
    for field in fields(drafter):
        value = getattr(drafter, field.name)
        if field.name == "window":
            changes[field.name] = max(value, window)
        elif isinstance(value, Drafter):
            changes[field.name] = with_window(value, window)
        elif isinstance(value, tuple) and any(isinstance(v, Drafter) for v in value):
            changes[field.name] = tuple(with_window(v, window) for v in value)
    made: Any = replace(drafter, **changes)  # type: ignore[type-var]
    return made


def with_num_draft_tokens(drafter: Any, num_draft_tokens: int) -> Any:
    """Returns a drafter with another draft length, of at least 1.

    Raises:
      ValueError: It has no `num_draft_tokens` to change.

    Example:
      >>> from specdec_jax.drafters import NgramDrafter
      >>> with_num_draft_tokens(NgramDrafter(4), 7).num_nodes
      7
    """
    if hasattr(drafter, "with_num_draft_tokens"):
        return drafter.with_num_draft_tokens(num_draft_tokens)
    if not (is_dataclass(drafter) and hasattr(drafter, "num_draft_tokens")):
        raise ValueError(
            f"{drafter} has no num_draft_tokens that could be varied; give a drafter "
            "that is a dataclass with this field, such as a model or ngram"
        )
    made: Any = replace(drafter, num_draft_tokens=num_draft_tokens)  # type: ignore
    return made


def check_children(kind: str, drafters: Any) -> None:
    """Refuses drafters that cannot draft inside another one.

    Raises:
      ValueError: One of them reads the target's hidden states or drafts trees.
    """
    for drafter in drafters:
        if drafter.hidden_layers:
            raise ValueError(
                f"{drafter} reads hidden states of the last committed token, and a "
                f"{kind} draft also goes on after tokens that are not committed"
            )
        if drafter.siblings != "none":
            raise ValueError(
                f"{drafter} drafts trees; a {kind} draft is made of chains"
            )

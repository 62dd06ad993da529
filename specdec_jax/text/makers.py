"""One draft of a name: the table of what drafts, and how it is made for a target.

A name of the table needs no checkpoint; any other is that of a checkpoint. Options may
follow a name, as in `smollm2-135m:layers=8`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specdec_jax.base import Drafter, Variables
from specdec_jax.drafters import ModelDrafter, NgramDrafter, NoDrafter


class Ask(NamedTuple):
    """What a maker is asked for."""

    name: str
    target: Any
    """The loaded target."""
    num_draft_tokens: int
    """K, at least 1."""
    options: Mapping[str, str]
    """What was written behind the name; those the maker knows alone."""
    load: Callable[[str, int | None], Any]
    """Loads a checkpoint as a draft, from its name and the layers to keep (None keeps
    all), after a look at its vocabulary."""


class Maker(NamedTuple):
    """How a draft of one name is made."""

    make: Callable[[Ask], tuple[Drafter, Variables]]
    """Returns the drafter and its variables, None if it has none."""
    options: tuple[str, ...] = ()
    """What may be written behind the name."""


def _none(ask: Ask) -> tuple[Drafter, Variables]:
    return NoDrafter(), None


def _ngram(ask: Ask) -> tuple[Drafter, Variables]:
    return NgramDrafter(ask.num_draft_tokens), None


def _checkpoint(ask: Ask) -> tuple[Drafter, Variables]:
    small = ask.load(ask.name, whole(ask.name, ask.options, "layers"))
    vocab_size = ask.target.model.vocab_size
    return ModelDrafter(small.model, ask.num_draft_tokens, vocab_size), small.params


DRAFTS: dict[str, Maker] = {
    "none": Maker(_none),
    "ngram": Maker(_ngram),
}
"""What drafts without a checkpoint, by name."""

CHECKPOINT = Maker(_checkpoint, options=("layers",))
"""What all other names are."""


def whole(name: str, options: Mapping[str, str], option: str) -> int | None:
    """Returns a draft's option as a whole number; None if it was not written.

    Raises:
      ValueError: It is not a whole number.
    """
    value = options.get(option)
    if value is None:
        return None
    if not value.isdecimal():
        raise ValueError(
            f"draft {name!r}: {option} is {value!r}; it must be a whole number"
        )
    return int(value)


def read_name(draft: str) -> tuple[str, dict[str, str]]:
    """Splits a draft's name from its options, and refuses those it has not.

    Raises:
      ValueError: An option is none of this draft's.

    Example:
      >>> read_name("org/model:layers=8"), read_name("ngram")
      (('org/model', {'layers': '8'}), ('ngram', {}))
    """
    found = re.fullmatch(r"(.+?):(\w+=[^,=:]+(?:,\w+=[^,=:]+)*)", draft)
    name = found[1] if found else draft
    options = dict(one.split("=") for one in found[2].split(",")) if found else {}
    known = maker_of(name).options
    for option in options:
        if option not in known:
            told = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"draft {name!r} has no option {option!r}; {told}")
    return name, options


def maker_of(name: str) -> Maker:
    """Returns how the draft of a name is made."""
    return DRAFTS.get(name, CHECKPOINT)

"""One draft of a name: the table of what drafts, and how it is made for a target.

A name of the table needs no checkpoint; any other is that of a checkpoint. Options may
follow a name, as in `smollm2-135m:layers=8`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specdec_jax.base import Drafter, Variables
from specdec_jax.drafters import NgramDrafter, NoDrafter
from specdec_jax.text import free_drafts


class Ask(NamedTuple):
    """What a maker is asked for."""

    name: str
    target: Any
    """The loaded target."""
    num_draft_tokens: int
    """K, at least 1."""
    options: Mapping[str, str]
    """What was written behind the name; those the maker knows alone."""
    load: Callable[[str, int | None, bool], Any]
    """Loads a checkpoint as a draft, from its name, the layers to keep (None keeps all)
    and whether its vocabulary must be the target's."""


class Maker(NamedTuple):
    """How a draft of one name is made."""

    make: Callable[[Ask], tuple[Drafter, Variables]]
    """Returns the drafter and its variables, None if it has none."""
    options: tuple[str, ...] = ()
    """What may be written behind the name."""


def _none(ask: Ask) -> tuple[Drafter, Variables]:
    return NoDrafter(), None


def _ngram(ask: Ask) -> tuple[Drafter, Variables]:
    return free_drafts.length(ask, NgramDrafter(ask.num_draft_tokens)), None


_LAW = (*free_drafts.STOP, *free_drafts.LENGTH)

DRAFTS: dict[str, Maker] = {
    "none": Maker(_none),
    "ngram": Maker(_ngram, free_drafts.LENGTH),
    "ngram_counts": Maker(free_drafts.ngram_counts, ("size", *_LAW)),
    "early_exit": Maker(free_drafts.early_exit, ("layers", *_LAW)),
    "bigram": Maker(free_drafts.bigram, ("corpus", *_LAW)),
    "unigram": Maker(free_drafts.unigram, ("corpus", *_LAW)),
}
"""What drafts without a checkpoint, by name."""

CHECKPOINT = Maker(free_drafts.checkpoint, ("layers", *free_drafts.MODEL, *_LAW))
"""What all other names are."""


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

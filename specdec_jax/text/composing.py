"""Several drafts as one: which compositions there are, and how many tokens each drafts.

staged   the drafts share the K tokens of a round, in the order given
nested   each draft is itself drafted by the next one
tree     each draft grows branches of its own in one tree
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec_jax.base import Drafter, Variables
from specdec_jax.drafters import EarlyExit, JoinedTrees, ModelDrafter, Nested, Staged
from specdec_jax.drafters.staged import share
from specdec_jax.text.requests import per_prompt

Make = Callable[[int, int], tuple[Drafter, Variables]]
"""Returns draft number i, with a draft length, and its variables."""


class Composition(NamedTuple):
    """One way to make a drafter of several."""

    make: Callable[[Sequence[int], Make], tuple[Drafter, Variables]]
    """Takes the draft length of each draft, and what makes one."""
    lengths: Callable[[int, int], list[int]]
    """Returns each draft's length from the K of all and their number."""
    least: int = 2
    """The fewest drafts that it makes sense for."""


def _staged(lengths: Sequence[int], make: Make) -> tuple[Drafter, Variables]:
    made = [make(index, length) for index, length in enumerate(lengths)]
    return Staged(tuple(one for one, _ in made)), tuple(own for _, own in made)


def _nested(lengths: Sequence[int], make: Make) -> tuple[Drafter, Variables]:
    drafter, variables = make(len(lengths) - 1, lengths[-1])
    if isinstance(getattr(drafter, "drafter", drafter), EarlyExit):
        raise ValueError(
            "early_exit drafts for the target alone, and the last of nested drafts "
            "drafts for the one before it; use ngram or a model"
        )
    for index in reversed(range(len(lengths) - 1)):
        outer, own = make(index, lengths[index])
        if not isinstance(outer, ModelDrafter):
            raise ValueError(
                f"nested draft number {index + 1} is {outer}, but all except the last "
                "must be models: each verifies what the next one drafts"
            )
        if outer.stop is not None:
            raise ValueError(
                f"nested draft number {index + 1} cannot stop early: how far it goes "
                "is for the drafts inside; leave out below and entropy"
            )
        drafter = Nested(outer.model, drafter, lengths[index], outer.vocab_size)
        variables = own, variables
    return drafter, variables


def _tree(lengths: Sequence[int], make: Make) -> tuple[Drafter, Variables]:
    made = [make(index, length) for index, length in enumerate(lengths)]
    trees: Any = tuple(one for one, _ in made)
    merge = any(tree.siblings != "independent" for tree in trees)
    return JoinedTrees(trees, merge), tuple(own for _, own in made)


def _shrinking(num_draft_tokens: int, number: int) -> list[int]:
    """Returns K, and less by one for each draft inside: an inner round adds a token.

    Example:
      >>> _shrinking(4, 3), _shrinking(1, 2)
      ([4, 3, 2], [1, 1])
    """
    return [max(num_draft_tokens - depth, 1) for depth in range(number)]


COMPOSE: dict[str, Composition] = {
    "staged": Composition(_staged, share),
    "nested": Composition(_nested, _shrinking),
    "tree": Composition(_tree, lambda num_draft_tokens, n: [num_draft_tokens] * n),
}
"""Compositions by name."""


def draft_lengths(num_draft_tokens: Any, number: int, compose: str | None) -> list[int]:
    """Returns the draft length of each of the drafts.

    Args:
      num_draft_tokens: K of all of them, which `compose` shares out, or one a draft.
      number: Of drafts.
      compose: A name in `COMPOSE`; None for a single draft.

    Raises:
      ValueError: A length is out of range, or there are more or fewer than drafts.

    Example:
      >>> draft_lengths(5, 2, "staged"), draft_lengths([4, 1], 2, "staged")
      ([3, 2], [4, 1])
    """
    if not isinstance(num_draft_tokens, list | tuple):
        per_prompt("num_draft_tokens", num_draft_tokens, 1, least=0, most=1024)
        if compose is None or num_draft_tokens == 0:
            return [num_draft_tokens] * number
        lengths = COMPOSE[compose].lengths(num_draft_tokens, number)
        if min(lengths) < 1:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens} for {number} {compose} "
                f"drafts; give at least {number}, or one number for each draft"
            )
        return lengths
    for one in num_draft_tokens:
        per_prompt("num_draft_tokens", one, 1, least=1, most=1024)
    if len(num_draft_tokens) != number:
        raise ValueError(
            f"num_draft_tokens has {len(num_draft_tokens)} numbers for {number} "
            "drafts; give one for all or one for each"
        )
    return list(num_draft_tokens)


def check_composition(drafts: Sequence[Any], compose: str | None) -> None:
    """Refuses drafts that nothing puts together, or a composition of too few.

    Raises:
      ValueError: Saying which.
    """
    offered = ", ".join(COMPOSE)
    if compose is not None and compose not in COMPOSE:
        near = difflib.get_close_matches(str(compose), COMPOSE, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown compose {compose!r}{hint}; offered are {offered}")
    if compose is None and len(drafts) != 1:
        raise ValueError(
            f"{len(drafts)} drafts were given; say how they work together (compose, "
            f"one of {offered}), or give one"
        )
    if compose is not None and len(drafts) < COMPOSE[compose].least:
        raise ValueError(
            f"compose is {compose!r}, which takes at least {COMPOSE[compose].least} "
            f"drafts, and {len(drafts)} were given"
        )
    for draft in drafts if compose is not None else ():
        if draft is None or draft == "none" or not isinstance(draft, str):
            raise ValueError(
                f"{draft!r} is among the drafts to compose; name drafts that draft, or "
                "compose drafter objects yourself, as Staged, Nested and JoinedTrees do"
            )

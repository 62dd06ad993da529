"""Token trees by name: what `branching` and `compose="tree"` ask for.

A tree takes the place of a chain: each level costs one step of the draft model. Which
way siblings are chosen follows from the rule that is to judge them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_jax.drafters import ModelDrafter, TreeDrafter, read_parents
from specdec_jax.drafters.tree import node_depths

JUDGE = {"none": "rejection", "ranked": "coupled"}
"""Rules by the siblings of the drafts that they are the default for; multi_draft for
all others. Each is lossless."""


@dataclass(frozen=True)
class Shape:
    """The trees that are asked for.

    Attributes:
      parents: Of each node, breadth first; None is a chain of each draft's own length.
      siblings: How they are chosen, one of `drafters.siblings.KINDS`.
    """

    parents: tuple[int, ...] | None
    siblings: str

    @property
    def depth(self) -> int | None:
        """Levels, if the shape is given."""
        return max(node_depths(self.parents)) if self.parents else None

    def grow(self, drafter: Any, name: str) -> TreeDrafter:
        """Returns the tree drafter of a model that would draft a chain.

        Raises:
          ValueError: No model drafts, or it has options that only chains have.
        """
        if not isinstance(drafter, ModelDrafter):
            raise ValueError(
                f"draft {name!r} is {type(drafter).__name__}, which drafts chains of "
                "its own; trees are drafted by checkpoints, without adaptive lengths"
            )
        if drafter.stop is not None:
            raise ValueError(
                f"draft {name!r} ends its drafts early, and a tree has a fixed shape; "
                "leave out below and entropy"
            )
        parents = self.parents or tuple(range(-1, drafter.num_draft_tokens - 1))
        return TreeDrafter(drafter.model, parents, self.siblings, drafter.vocab_size)


def read_shape(
    branching: Any, compose: str | None, rule: Any, kinds: Sequence[str]
) -> Shape | None:
    """Returns the trees that are asked for, or None for chains.

    Args:
      branching: What the user gave, or None.
      compose: How several drafts work together, if there are several.
      rule: The rule as the user gave it, for messages.
      kinds: The siblings that it can judge.

    Raises:
      ValueError: The branching makes no tree, does not go with the composition, or the
        rule judges no trees.
    """
    if branching is None and compose != "tree":
        return None
    parents = None
    if branching is not None:
        given = isinstance(branching, list | tuple)
        parents = read_parents(tuple(branching) if given else (branching,))
        if compose not in (None, "tree"):
            raise ValueError(
                f"branching drafts trees, and {compose} drafts are chains; leave one "
                "of them out, or use compose tree"
            )
    # Trees of several models have one law for all siblings only if each is drawn
    # anew; a rule that needs no law sees them merged.
    order: tuple[str, ...] = ("distinct", "independent")
    if compose == "tree" and "ranked" not in kinds:
        order = ("independent",)
    for kind in order:
        if kind in kinds:
            return Shape(parents, kind)
    raise ValueError(
        f"the rule {rule} does not judge trees{_of_several(compose)}; use multi_draft "
        "(the default for trees) or coupled"
    )


def _of_several(compose: str | None) -> str:
    return " of several drafts" if compose == "tree" else ""

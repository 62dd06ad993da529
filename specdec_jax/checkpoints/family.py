"""What a family of checkpoints is: a reading of its config, and a table of names.

The table says for each of Hugging Face's tensors where it goes in our parameters:

    Row("model.layers.{i}.mlp.up_proj.weight", "layers_{i}/mlp/up_proj/kernel",
        transpose=True)

A row with several destinations is a fused tensor, split along the last axis (after the
transpose) in that order. Rows whose destination the model lacks are left out (biases,
an untied head), so one table serves all options of a family. Shapes are nowhere in the
table: they follow from the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specdec_jax.checkpoints.settings import Settings
from specdec_jax.networks import DecoderConfig


@dataclass(frozen=True)
class Row:
    """One of Hugging Face's tensors and where it goes.

    Attributes:
      theirs: Its name; `{i}` is the layer.
      ours: Paths of our parameters, "/" between the parts.
      transpose: Whether theirs is [out, in] and ours [in, out].
    """

    theirs: str
    ours: tuple[str, ...]
    transpose: bool = False


@dataclass(frozen=True)
class Family:
    """How to read one family.

    Attributes:
      config: Turns settings into our configuration; takes (settings, tied,
        context_length). It takes every setting it honours, so that what is left can be
        refused.
      rows: The table.
      harmless: Settings that do not change what is computed at inference.
      prefix: First part of the body's names, which some exporters leave out.
      tied: Whether the head is the embedding when the config does not say.
      ignored: Patterns (regular expressions) of stored buffers that are no parameters.
    """

    config: Callable[[Settings, bool, int | None], DecoderConfig]
    rows: tuple[Row, ...]
    harmless: frozenset[str] = frozenset()
    prefix: str = "model."
    tied: bool = False
    ignored: tuple[str, ...] = ()


def expand(
    rows: tuple[Row, ...], num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Row]:
    """Yields the rows a model needs, once for each layer.

    Args:
      rows: A family's table.
      num_layers: Layers of the model.
      shapes: Shape of each of the model's parameters, by path.
    """
    for row in rows:
        layers: Any = range(num_layers) if "{i}" in row.theirs else (0,)
        for i in layers:
            ours = tuple(path.replace("{i}", str(i)) for path in row.ours)
            if all(path in shapes for path in ours):
                yield Row(row.theirs.replace("{i}", str(i)), ours, row.transpose)


def stored_shape(row: Row, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape that the row's tensor must have on disk.

    Example:
      Two kernels [in, out] of one fused tensor [out, in]:

      >>> row = Row("qk", ("q", "k"), transpose=True)
      >>> stored_shape(row, {"q": (8, 4), "k": (8, 2)})
      (6, 8)
    """
    first = shapes[row.ours[0]]
    ours = (*first[:-1], sum(shapes[path][-1] for path in row.ours))
    return ours[::-1] if row.transpose else ours

"""Compiled programs as data: the text that XLA prints, read line by line.

    %copy.7 = bf16[1536,576]{1,0:T(8,128)(2,1)S(1)} copy(%param.3), metadata={...}
     name     element type, sizes, layout           opcode operands  attributes

A layout lists axes from the minor one on, then tiles, then the memory space: `S(1)` is
on the chip itself, and nothing is in the main memory that has a space.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """One array of a type."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def in_memory(self) -> bool:
        """Whether it lies in the device's main memory."""
        return "S(" not in self.layout

    @property
    def num_bytes(self) -> float:
        """Bytes it takes in memory, with what its tiles pad."""
        return self.padded * _item_bits(self.dtype) / 8

    @property
    def padded(self) -> int:
        """Elements, with what its tiles pad."""
        order, _, tiles = self.layout.partition(":")
        first = re.match(r"T\(([\d,]+)\)", tiles)
        if first is None or not self.sizes:
            return self.size
        sizes = list(self.sizes)
        minor = [int(axis) for axis in order.split(",") if axis]
        tile = [int(one) for one in first[1].split(",")][::-1]
        for axis, edge in zip(minor, tile, strict=False):
            sizes[axis] = -(-sizes[axis] // edge) * edge
        return math.prod(sizes)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]
    """What it gives; several if that is a tuple."""
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """Where in the Python program it comes from, as JAX names scopes."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self, role: str) -> str:
        """Returns the computation that an attribute names, such as "body"."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


class Module(NamedTuple):
    """A compiled program."""

    computations: Mapping[str, Mapping[str, Instruction]]
    """Instructions by name, in order; operands come before their users."""
    entry: str


def parse(text: str) -> Module:
    """Reads the text of `compiled.as_text()`.

    Raises:
      ValueError: It is no such text.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            one = _instruction(line)
            current[one.name] = one
    if not entry:
        raise ValueError("this is no compiled program: no computation is its ENTRY")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _balanced(right) if right.startswith("(") else right.index(" ")
    kind, rest = right[:end], right[end:].strip()
    opcode, _, _ = rest.partition("(")
    start = len(opcode)
    stop = start + _balanced(rest[start:])
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        arrays=arrays(kind),
        opcode=opcode,
        operands=tuple(_NAME.findall(rest[start:stop])),
        attributes=("ROOT " if left.startswith("ROOT ") else "") + rest[start:],
    )


def arrays(kind: str) -> tuple[Array, ...]:
    """Returns the arrays of a type.

    Example:
      >>> arrays("(f32[8,3]{1,0:T(8,128)}, s32[])")[0].padded
      1024
    """
    return tuple(
        Array(dtype, tuple(int(n) for n in sizes.split(",") if n), layout)
        for dtype, sizes, layout in _ARRAY.findall(kind)
    )


def _balanced(text: str) -> int:
    """Returns where the parenthesis that opens a text is closed."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


def _item_bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0

"""What a compiled program moves: bytes through main memory, and between devices.

The compiler's own figure counts a loop of unknown length once and an update in place as
the whole buffer, so the loops are walked here: each instruction reads its operands and
writes its results, with these exceptions.

*   What only names data (tuples, bitcasts, parameters) moves nothing; nor does what
    lies on the chip.
*   A slice reads what it takes, an update writes what it puts; inside a fusion too,
    where each operand is read as far as the results need it.
*   A loop is its body times its trips; a conditional is its dearest branch.
*   An asynchronous copy is counted where it starts.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specdec_jax.plan.hlo import Instruction, Module

FREE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
SAME_PLACES = {"bitcast", "reshape", "copy", "convert", "transpose", "reverse"}
MOVES = {"copy", "transpose", "convert", "copy-start"}

Trips = Callable[[Instruction], float | int | None]
"""How often a loop runs whose length is not in the program; None leaves it open."""


@dataclass
class Traffic:
    """Sums over everything that runs."""

    num_bytes: float = 0.0
    """Read from and written to main memory, on one device."""
    collectives: dict[str, float] = field(default_factory=dict)
    """Bytes that collectives of each kind give, on one device."""
    moved: dict[str, float] = field(default_factory=dict)
    """Bytes of copies, transposes and conversions that are no more than that, in main
    memory, by their type; what is fetched to the chip is not among them."""

    def add(self, other: "Traffic", times: float = 1.0) -> None:
        """Adds another's sums, so many times."""
        self.num_bytes += other.num_bytes * times
        for mine, theirs in (
            (self.collectives, other.collectives),
            (self.moved, other.moved),
        ):
            for name, size in theirs.items():
                mine[name] = mine.get(name, 0.0) + size * times


class Walk:
    """Counts the traffic of a module's computations.

    Args:
      module: The program.
      trips: See `Trips`. A loop about which it says nothing and whose length the
        program does not have either runs once.
    """

    def __init__(self, module: Module, trips: Trips = lambda loop: None):
        self.module, self._trips = module, trips
        self._known: dict[str, Traffic] = {}
        self._known_needs: dict[str, list[float]] = {}

    def computation(self, name: str) -> Traffic:
        """Returns what one run of a computation moves."""
        if name not in self._known:
            total = Traffic()
            for one in self.module.computations[name].values():
                total.add(self._instruction(one, name))
            self._known[name] = total
        return self._known[name]

    def trips(self, loop: Instruction) -> float:
        """Returns how often a loop runs."""
        asked = self._trips(loop)
        if asked is not None:
            return float(asked)
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known is not None:
            return float(known[1])
        return float(self._bound(loop.called("condition")) or 1)

    def _bound(self, condition: str) -> int | None:
        """Returns N if the condition is `i < N`, as for loops that start from 0."""
        lines = list(self.module.computations.get(condition, {}).values())
        compares = [one for one in lines if one.opcode == "compare"]
        bounds = [
            re.match(r"(?:ROOT )?\((\d+)\)", one.attributes)
            for one in lines
            if one.opcode == "constant" and one.arrays[0].dtype in ("s32", "u32")
        ]
        one = compares[0] if len(compares) == 1 else None
        if one is None or "direction=LT" not in one.attributes or len(bounds) != 1:
            return None
        if bounds[0] is not None:
            return int(bounds[0][1])
        return None

    def _instruction(self, one: Instruction, where: str) -> Traffic:
        kind = one.opcode
        if kind in FREE or kind.endswith(("-done", "-update")):
            return Traffic()
        if kind == "while":
            total = Traffic()
            total.add(self.computation(one.called("body")), self.trips(one))
            return total
        if kind == "conditional":
            return self._dearest(one)
        if kind in ("call", "async-start"):
            return self.computation(one.called("to_apply") or one.called("calls"))
        plain = kind.removesuffix("-start")
        if plain in COLLECTIVES:
            # An asynchronous one gives its operand back beside the result.
            given = one.arrays[-1:] if kind.endswith("-start") else one.arrays
            size = sum(array.num_bytes for array in given)
            inside = sum(array.num_bytes for array in given if array.in_memory)
            return Traffic(2 * inside, {plain: size})
        read, written = self._sizes(one, where)
        return Traffic(read + written, moved=self._moved(one))

    def _moved(self, one: Instruction) -> dict[str, float]:
        """Returns what an instruction moves within main memory, if that is all."""
        kind = one.opcode
        if kind == "fusion":
            inner = self.module.computations[one.called("calls")].values()
            kinds = {line.opcode for line in inner} - FREE
            kind = kinds.pop() if len(kinds) == 1 else "fusion"
        if kind not in MOVES or not one.arrays[0].in_memory:
            return {}
        array = one.arrays[0]
        told = f"{kind} {array.dtype}[{','.join(map(str, array.sizes))}]"
        return {told: array.num_bytes}

    def _dearest(self, one: Instruction) -> Traffic:
        names = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        branches = (
            re.findall(r"%?([\w.\-]+)", names[1])
            if names
            else [one.called("true_computation"), one.called("false_computation")]
        )
        costs = [self.computation(name) for name in branches]
        return max(costs, key=lambda cost: cost.num_bytes)

    def _sizes(self, one: Instruction, where: str) -> tuple[float, float]:
        """Returns the bytes that an instruction reads and writes."""
        scope = self.module.computations[where]
        operands = [scope[name] for name in one.operands if name in scope]
        if one.opcode == "fusion":
            return self._fusion(one, operands)
        result = one.arrays[0] if one.arrays else None
        if one.opcode in ("copy-start", "slice-start") and result is not None:
            whole = operands[0].arrays[0]
            moved = one.arrays[0] if one.opcode == "copy-start" else one.arrays[1]
            return (
                moved.num_bytes if whole.in_memory else 0.0,
                moved.num_bytes if moved.in_memory else 0.0,
            )
        shares = self._wanted(one, operands, num_elements(one))
        read = sum(map(_bytes, operands, shares))
        put = _put(scope, one) or one
        return read, _bytes(put, num_elements(put), one)

    def _fusion(
        self, one: Instruction, operands: list[Instruction]
    ) -> tuple[float, float]:
        """Follows what the results need back to the fusion's operands."""
        inner = self.module.computations[one.called("calls")]
        written = 0.0
        for root, array in zip(_roots(inner), one.arrays, strict=False):
            put = _put(inner, _origin(inner, root))
            size = num_elements(root) if put is None else num_elements(put)
            if array.in_memory:
                written += array.num_bytes * size / max(array.size, 1)
        needs = self._needs(one.called("calls"))
        return sum(map(_bytes, operands, needs)), written

    def _needs(self, name: str) -> list[float]:
        """Returns how many elements of each parameter a fusion's results need."""
        if name not in self._known_needs:
            inner = self.module.computations[name]
            lines = list(inner.values())
            wanted: defaultdict[str, float] = defaultdict(float)
            for root in _roots(inner):
                wanted[root.name] += num_elements(root)
            for line in reversed(lines):
                need = min(wanted[line.name], num_elements(line))
                inputs = [inner[operand] for operand in line.operands]
                if not need or line.opcode == "tuple":
                    continue
                for source, share in zip(
                    inputs, self._wanted(line, inputs, need), strict=True
                ):
                    wanted[source.name] += share
            parameters = {
                _number(line): wanted[line.name]
                for line in lines
                if line.opcode == "parameter"
            }
            self._known_needs[name] = [parameters[i] for i in sorted(parameters)]
        return self._known_needs[name]

    def _wanted(
        self, line: Instruction, inputs: list[Instruction], need: float
    ) -> list[float]:
        """Returns how many elements of each input `need` of the result take."""
        kind, full = line.opcode, [num_elements(one) for one in inputs]
        if kind == "fusion":
            share = need / max(num_elements(line), 1)
            return [size * share for size in self._needs(line.called("calls"))]
        if kind in ("dynamic-update-slice", "scatter"):
            return [0.0, *full[1:]]
        if kind in ("dynamic-slice", "gather"):
            return [min(need, full[0]), *full[1:]]
        whole = num_elements(line)
        by_place = kind in SAME_PLACES or all(size == whole for size in full)
        if by_place or kind in ("slice", "broadcast", "pad", "concatenate", "select"):
            return [min(need, size) for size in full]
        return full


def num_elements(one: Instruction) -> float:
    """Returns the elements of everything that an instruction gives."""
    return float(sum(array.size for array in one.arrays))


def _bytes(one: Instruction, size: float, at: Instruction | None = None) -> float:
    """Returns the bytes of some elements of what an instruction gave.

    They are 0 unless it (or `at`, where they are written) lies in main memory.
    """
    place, whole = (at or one).arrays, num_elements(one)
    if not whole or not place[0].in_memory:
        return 0.0
    return sum(array.num_bytes for array in one.arrays) * min(size / whole, 1.0)


def _put(inner: Mapping[str, Instruction], one: Instruction) -> Instruction | None:
    """Returns what an update in place puts, or None for anything else."""
    place = {"dynamic-update-slice": 1, "scatter": -1}.get(one.opcode)
    return None if place is None else inner[one.operands[place]]


def _number(parameter: Instruction) -> int:
    found = re.search(r"\((\d+)\)", parameter.attributes)
    assert found is not None
    return int(found[1])


def _roots(inner: Mapping[str, Instruction]) -> list[Instruction]:
    """Returns what a fusion gives: its root, or the parts of a tuple."""
    [root] = [one for one in inner.values() if one.attributes.startswith("ROOT ")]
    if root.opcode == "tuple":
        return [inner[name] for name in root.operands]
    return [root]


def _origin(inner: Mapping[str, Instruction], one: Instruction) -> Instruction:
    """Looks through bitcasts."""
    while one.opcode == "bitcast" and one.operands[0] in inner:
        one = inner[one.operands[0]]
    return one

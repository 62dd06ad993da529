"""One program over a mesh of devices.

A mesh has two axes: rows of the batch are split over `data`, tensors over `model`. What
is split how is one table of logical axes, for parameters, caches and states alike:

    batch -> data      heads, kv_heads, mlp, vocab -> model      embed -> nowhere

The rest is XLA's: `jax.jit` with shardings is what pjit was. Only arguments and results
are pinned here; no function of the loop knows of a mesh.

An axis that the mesh does not divide is replicated for that tensor. Query heads go with
the key/value heads they read, so that attention stays within a device: they are split
only if whole groups are.
"""

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax.base import Params, PyTree
from specdec_jax.cache import KVCache
from specdec_jax.processes import initialize

__all__ = [
    "DATA",
    "MODEL",
    "Placed",
    "Placement",
    "check",
    "initialize",
    "make_mesh",
    "read_shards",
]

DATA, MODEL = "data", "model"

RULES: Mapping[str | None, str | None] = {
    "batch": DATA,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "vocab": MODEL,
    "embed": None,
    None: None,
}
"""The axis of the mesh that a logical axis is split over."""

DRAFT_RULES: Mapping[str, Mapping[str | None, str | None]] = {
    "target": RULES,
    "data": {"batch": DATA},
}
"""How the draft lies, by name: like the target, or its rows alone are split and every
device has all of its weights, so that drafting needs no word from another device."""

PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"q_proj/kernel", ("embed", "heads")),
    (r"q_proj/bias", ("heads",)),
    (r"[kv]_proj/kernel", ("embed", "kv_heads")),
    (r"[kv]_proj/bias", ("kv_heads",)),
    (r"o_proj/kernel", ("heads", "embed")),
    (r"(gate|up)_proj/kernel", ("embed", "mlp")),
    (r"(gate|up)_proj/bias", ("mlp",)),
    (r"down_proj/kernel", ("mlp", "embed")),
    (r"embed_tokens/embedding", ("vocab", "embed")),
    (r"lm_head/kernel", ("embed", "vocab")),
)
"""Logical axes of parameters, by the end of their path; all others are replicated."""

CACHE = ("batch", "kv_heads", None, None)
"""Logical axes of a buffer of keys or values."""


class Placed(NamedTuple):
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    undivided: tuple[str, ...]
    """Logical axes that the mesh would split and does not divide."""


def make_mesh(
    axes: str | Mapping[str, int] | Mesh, devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns a mesh with the axes `data` and `model`.

    Args:
      axes: Sizes, as "data=2,model=4" or a mapping; an axis that is not named has size
        1. A mesh with these axes is returned as it is.
      devices: What to lay out, all of it; by default as many of JAX's as are needed.

    Raises:
      ValueError: An axis is unknown or not a number, or the devices do not suffice.

    Example:
      >>> dict(make_mesh("model=2").shape)
      {'data': 1, 'model': 2}
    """
    if isinstance(axes, Mesh):
        if set(axes.axis_names) != {DATA, MODEL}:
            raise ValueError(
                f"the mesh has the axes {axes.axis_names}; it needs data and model"
            )
        return axes
    sizes = _sizes(axes)
    needed = math.prod(sizes.values())
    told = ",".join(f"{name}={size}" for name, size in sizes.items())
    may_leave = devices is None and jax.process_count() == 1
    devices = jax.devices() if devices is None else list(devices)
    if needed > len(devices) or (needed < len(devices) and not may_leave):
        raise ValueError(
            f"mesh {told} needs {needed} devices and there are {len(devices)}; their "
            "product must be the number of devices (--cpu-devices simulates more)"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[:needed],
    )


def _sizes(axes: str | Mapping[str, int]) -> dict[str, int]:
    pairs = (
        [part.partition("=")[::2] for part in axes.split(",")]
        if isinstance(axes, str)
        else list(axes.items())
    )
    sizes = {DATA: 1, MODEL: 1}
    for name, size in pairs:
        number = int(size) if str(size).strip().isdecimal() else 0
        if str(name).strip() not in sizes or number < 1:
            raise ValueError(
                f"mesh {axes!r}: {name!r} = {size!r} is no axis; write data=2,model=4, "
                "with whole numbers from 1"
            )
        sizes[str(name).strip()] = number
    return sizes


@dataclass(frozen=True)
class Placement:
    """Where a target, its drafter and the state of a batch lie on a mesh.

    Hashable, so that a compiled program can depend on it.

    Attributes:
      mesh: Has the axes `data` and `model`.
      draft: "target" (the draft is split like the target) or "data" (its rows alone).
    """

    mesh: Mesh
    draft: str = "target"

    def __post_init__(self):
        """Raises ValueError for an unknown way to place the draft."""
        if self.draft not in DRAFT_RULES:
            raise ValueError(
                f"draft_sharding is {self.draft!r}; offered are "
                f"{', '.join(DRAFT_RULES)}"
            )

    @property
    def data(self) -> int:
        """Devices that the rows of a batch are split over."""
        return self.mesh.shape[DATA]

    def whole(self, draft: bool = False) -> bool:
        """Whether each device has the target, or the draft, as a whole."""
        return self.mesh.shape[MODEL] == 1 or (draft and self.draft == "data")

    def parameter(
        self, path: str, shape: Sequence[int], model: Any, *, draft: bool = False
    ) -> Placed:
        """Returns where the parameter at a path lies.

        Args:
          path: "/" between its parts.
          shape: Its shape, as [in, out]; tiles are replicated.
          model: Whose parameter it is; the heads are told by its `config`.
          draft: Whether it is the drafter's.
        """
        names: tuple[str | None, ...] = (None,) * len(shape)
        for pattern, axes in PARAMETERS:
            if re.search(rf"(^|/){pattern}$", path) and len(axes) == len(shape):
                names = axes
        groups = getattr(getattr(model, "config", None), "num_kv_heads", 1)
        return self.tensor(path, shape, names, groups, draft)

    def parameters(
        self, shapes: Mapping[str, Sequence[int]], model: Any, *, draft: bool = False
    ) -> dict[str, Placed]:
        """Returns where all parameters of a model lie, from their shapes by path."""
        return {
            path: self.parameter(path, shape, model, draft=draft)
            for path, shape in shapes.items()
        }

    def cache(self, model: Any, *, draft: bool = False) -> list[Placed]:
        """Returns where the buffers of a layer lie, at a batch that `data` divides."""
        buffers = jax.eval_shape(lambda: model.init_cache(self.data, 1))
        return [
            self.tensor(f"cache/{name}", one.shape, CACHE, one.shape[1], draft)
            for name, one in (("keys", buffers.keys[0]), ("values", buffers.values[0]))
        ]

    def sharding(self, placed: Placed) -> NamedSharding:
        """Returns what JAX is told of it."""
        return NamedSharding(self.mesh, placed.spec)

    def place_params(self, params: Params, target: Any, drafter: Any) -> Params:
        """Puts variables where they belong; what lies there already stays."""
        small = getattr(drafter, "model", None)  # a tuple where several draft
        return Params(
            self._place_variables(params.target, target, False),
            self._place_variables(params.draft, small, True),
        )

    def _place_variables(self, variables: PyTree, model: Any, draft: bool) -> PyTree:
        if isinstance(model, tuple) and variables is not None:
            pairs = zip(variables, model, strict=True)
            return tuple(self._place_variables(own, one, draft) for own, one in pairs)

        def put(path: Any, leaf: Any) -> jax.Array:
            where = self.parameter(_path(path), leaf.shape, model, draft=draft)
            return jax.device_put(leaf, self.sharding(where))

        return jax.tree_util.tree_map_with_path(put, variables)

    def rows(self, tree: PyTree, *, draft: bool = False) -> PyTree:
        """Returns the shardings of a tree whose leaves have rows on axis 0.

        Caches are split over their heads as well. Works on arrays and on their shapes.
        """

        def leaf(x: Any, names: Sequence[str | None]) -> Any:
            names = (*names, *[None] * x.ndim)[: x.ndim]
            heads = x.shape[1] if len(names) > 1 else 1
            return self.sharding(self.tensor("", x.shape, names, heads, draft))

        def node(x: Any) -> Any:
            if not isinstance(x, KVCache):
                return leaf(x, ("batch",))
            buffers = {"keys": x.keys, "values": x.values}
            split = jax.tree.map(lambda one: leaf(one, CACHE), buffers)
            return x._replace(length=leaf(x.length, ("batch",)), **split)

        return jax.tree.map(node, tree, is_leaf=lambda x: isinstance(x, KVCache))

    def state(self, state: Any) -> Any:
        """Returns the shardings of a `DecodeState`, its drafter's state included."""
        own = self.rows(state.drafter_state, draft=True)
        return self.rows(state)._replace(drafter_state=own)

    def pin(self, state: Any) -> Any:
        """Returns a `DecodeState` that lies where it should; for use under jit."""
        return jax.lax.with_sharding_constraint(state, self.state(state))

    def shapes(self, state: Any) -> Any:
        """Returns the shapes of a `DecodeState` with its shardings, to compile for."""
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            state,
            self.state(state),
        )

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of what every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, tree: PyTree) -> PyTree:
        """Returns a tree that every device has whole; for use under jit."""
        return jax.lax.with_sharding_constraint(tree, self.everywhere)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        names: Sequence[str | None],
        groups: int = 1,
        draft: bool = False,
    ) -> Placed:
        """Decides for each axis of a tensor, by its logical name.

        Heads are divided in `groups`, whatever their size.
        """
        rules = DRAFT_RULES[self.draft] if draft else RULES
        spec: list[str | None] = []
        undivided = []
        for size, axis in zip(shape, names, strict=True):
            over = rules.get(axis)
            units = groups if axis in ("heads", "kv_heads") else size
            if over is not None and units % self.mesh.shape[over]:
                undivided.append(str(axis))
                over = None
            spec.append(over)
        while spec and spec[-1] is None:
            spec.pop()
        return Placed(name, tuple(shape), PartitionSpec(*spec), tuple(undivided))


def check(placement: Placement, placed: Iterable[Placed], name: str) -> None:
    """Warns once of all that the mesh does not divide.

    Args:
      placement: Where the tensors lie.
      placed: The target's parameters.
      name: What messages call the target.

    Raises:
      ValueError: The mesh has several devices along `model`, and nothing is split.
    """
    all_ = list(placed)
    over = placement.mesh.shape[MODEL]
    whole = [one for one in all_ if one.undivided]
    if over == 1 or not all_:
        return
    if not any(MODEL in one.spec for one in all_):
        raise ValueError(
            f"model={over} divides nothing of {name} (neither its key/value heads nor "
            "its MLP nor its vocabulary); use a smaller model axis, or data alone"
        )
    if whole:
        axes = sorted({axis for one in whole for axis in one.undivided})
        sizes = {one.name: math.prod(one.shape) for one in all_}
        share = sum(sizes[one.name] for one in whole) / sum(sizes.values())
        warnings.warn(
            f"model={over} does not divide {', '.join(axes)} of {name}: "
            f"{len(whole)} tensors, {share:.0%} of its weights, are whole on every "
            "device (`specdec info --mesh` lists them)",
            stacklevel=2,
        )


def read_shards(sharding: NamedSharding, shape: Sequence[int], read: Any) -> jax.Array:
    """Makes a sharded array from its parts; no more of it is read than lies here.

    Args:
      sharding: Where it lies.
      shape: Of the whole array.
      read: Returns a part as a NumPy array, from a tuple of slices.
    """
    shape = tuple(shape)
    devices: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        pairs = zip(index or (), shape, strict=True)
        bounds = tuple(one.indices(size)[:2] for one, size in pairs)
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, owners in devices.items():
        part = read(tuple(slice(*one) for one in bounds))
        arrays += [jax.device_put(part, device) for device in owners]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _path(path: Sequence[Any]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)

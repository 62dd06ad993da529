"""The key/value cache: one padded buffer a layer, one length a row.

    slot      0    1    2    3    4    5    6    7
    row 0   [ a    b    c    d    .    .    .    . ]   length 4
    row 1   [ a    .    .    .    .    .    .    . ]   length 1

Invariants:

*   What lies at or above a row's length is never read, so **rolling back is setting a
    smaller length**: no data moves, and what was rejected is overwritten before it can
    be seen.
*   Each row writes at its own length. Rows never share a leaf, rows are axis 0 of every
    leaf, so that `jax.tree.map` can take and insert rows.
*   No index is ever out of range: JAX clamps or drops such writes in silence, and
    otherwise when sharded. Whoever makes the cache gives it room for the longest row
    plus one block.

Buffers are laid out [B, heads, head_dim, T], positions last. Accelerators pad the two
minor axes of an array to tiles of (8, 128): with [heads, head_dim] minor, three heads
of 64 would cost five times their size, and attention would transpose them in each step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SLOT_BLOCK = 128
"""Attention reads the cache in blocks of this many slots; capacities are multiples."""


class KVCache(NamedTuple):
    """Keys and values of all layers; satisfies `base.Cache`."""

    length: Int[Array, " B"]
    """Valid slots of each row."""
    keys: tuple[Float[Array, "B H E T"], ...]
    """One buffer a layer: heads H, head size E, slots T. Keys are already rotated."""
    values: tuple[Float[Array, "B H E T"], ...]

    @property
    def capacity(self) -> int:
        """Slots of a row, T."""
        return self.keys[0].shape[-1]

    def rewind(self, length: Int[Array, " B"]) -> "KVCache":
        """Returns the same cache with another length; no data moves."""
        return self._replace(length=length)

    def commit(self, start: Int[Array, " B"], path: Int[Array, "B P"]) -> "KVCache":
        """Moves slot `start + path[b, i]` to slot `start + i`; keeps `length`.

        This makes a chain of the accepted nodes of a tree. All slots are read before
        any is written. Entries of `path` that mean nothing may have any value: they
        move garbage into slots that the caller's length leaves out.

        Args:
          start: Slot of the tree's first node; `start + P <= capacity`.
          path: Nodes to keep, in order, as offsets from `start`.
        """
        source = jnp.clip(start[:, None] + path, 0, self.capacity - 1)

        def move(buffer: Array) -> Array:
            kept = jnp.take_along_axis(
                buffer, source[:, None, None, :], axis=3, mode="promise_in_bounds"
            )
            return write(buffer, kept, start)

        return self._replace(
            keys=tuple(move(buffer) for buffer in self.keys),
            values=tuple(move(buffer) for buffer in self.values),
        )


def allocate(
    num_layers: int,
    batch_size: int,
    num_heads: int,
    head_dim: int,
    capacity: int,
    dtype: Any,
) -> KVCache:
    """Returns an empty cache with at least `capacity` slots a row.

    Example:
      >>> allocate(2, 1, 4, 8, 100, "float32").capacity
      128
    """
    slots = -(-capacity // SLOT_BLOCK) * SLOT_BLOCK
    shape = (batch_size, num_heads, head_dim, slots)
    return KVCache(
        length=jnp.zeros(batch_size, jnp.int32),
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def write(
    buffer: Float[Array, "B H E T"],
    chunk: Float[Array, "B H E S"],
    start: Int[Array, " B"],
) -> Float[Array, "B H E T"]:
    """Writes `chunk` into slots `start .. start + S` of each row, in place under jit.

    Batching the update over rows makes one scatter with a batch dimension: compiled
    code updates the buffer where it is, and a batch-sharded buffer stays local.
    """

    def write_row(row: Array, piece: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, piece, at, axis=2)

    return jax.vmap(write_row)(buffer, chunk, start)


def read(
    buffer: Float[Array, "B H E T"], start: Int[Array, " B"], size: int
) -> Float[Array, "B H E {size}"]:
    """Returns slots `start .. start + size` of each row."""

    def read_row(row: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, at, size, axis=2)

    return jax.vmap(read_row)(buffer, start)

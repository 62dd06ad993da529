"""The key/value cache: ragged writes, rollback by length, committing a tree path."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import base
from specdec_jax.cache import SLOT_BLOCK, KVCache, allocate, write

START = jnp.asarray([0, 5, 120], jnp.int32)


def _numbered(batch: int = 3, slots: int = SLOT_BLOCK) -> KVCache:
    """A cache of one layer in which every entry is its own number."""
    cache = allocate(1, batch, 2, 4, slots, "float32")
    shape = cache.keys[0].shape
    numbers = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return cache._replace(keys=(numbers,), values=(-numbers,))


def test_capacity_is_rounded_up_to_whole_blocks():
    for capacity, slots in (1, 128), (128, 128), (129, 256), (4096, 4096):
        assert allocate(2, 1, 1, 1, capacity, "float32").capacity == slots


def test_it_is_a_cache_to_the_loop():
    cache = allocate(2, 3, 1, 4, 10, "bfloat16")
    assert isinstance(cache, base.Cache)
    leaves = jax.tree.leaves(cache)
    assert all(leaf.shape[0] == 3 and not leaf.weak_type for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_each_row_is_written_at_its_own_length():
    buffer = _numbered().keys[0]
    ramp = jnp.arange(1, 4, dtype=jnp.float32)
    chunk = jnp.broadcast_to(-ramp[None, None, None], (3, 2, 4, 3))
    expected = np.array(buffer)
    for row, start in enumerate(START.tolist()):
        expected[row, :, :, start : start + 3] = chunk[row]
    np.testing.assert_array_equal(write(buffer, chunk, START), expected)


def test_rewinding_changes_the_length_alone():
    cache = _numbered()
    back = cache.rewind(START)
    assert back.length is START
    assert back.keys is cache.keys and back.values is cache.values


def test_committing_a_path_makes_it_a_chain():
    # Row 1: nodes 1, 4 and 6 of the tree at slot 5 move to slots 5, 6 and 7.
    path = jnp.asarray([[0, 1, 2], [1, 4, 6], [2, 3, 7]], jnp.int32)
    cache = _numbered()
    moved = cache.commit(START, path)
    expected = np.array(cache.keys[0])
    for row, start in enumerate(START.tolist()):
        slots = start + np.asarray(path[row])
        expected[row, :, :, start : start + 3] = cache.keys[0][row][:, :, slots]
    np.testing.assert_array_equal(moved.keys[0], expected)
    np.testing.assert_array_equal(moved.values[0], -expected)
    np.testing.assert_array_equal(moved.length, cache.length)


def test_meaningless_path_entries_touch_no_slot_before_the_start():
    cache = _numbered()
    path = jnp.asarray([[-1, 99999], [-7, -7], [3, -2147483648]], jnp.int32)
    moved = cache.commit(START, path)
    slots = np.arange(cache.capacity)[None] - np.asarray(START)[:, None]
    outside = np.broadcast_to(
        ((slots < 0) | (slots >= 2))[:, None, None], cache.keys[0].shape
    )
    np.testing.assert_array_equal(moved.keys[0][outside], cache.keys[0][outside])
    assert np.isfinite(moved.keys[0]).all()


def test_a_batch_sharded_write_needs_no_communication():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    buffer, chunk = jnp.zeros((8, 2, 4, 128)), jnp.ones((8, 2, 4, 3))
    start = jnp.arange(8, dtype=jnp.int32)
    arguments = [jax.device_put(x, rows) for x in (buffer, chunk, start)]
    compiled = jax.jit(write, donate_argnums=0).lower(*arguments).compile()
    assert not {"all-gather", "all-reduce", "all-to-all"} & set(
        compiled.as_text().replace("(", " ").split()
    )
    expected = write(buffer, chunk, start)
    found = compiled(*arguments)
    assert found.sharding == rows
    np.testing.assert_array_equal(found, expected)

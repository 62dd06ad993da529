"""Noise is a function of its place, the same in every batch, and nothing is shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import rng
from specdec_jax.audit.statistics import goodness_of_fit

VOCAB = 8


@pytest.fixture
def keys(key):
    return rng.request_keys(key, 5)


def test_a_requests_key_is_its_place_folded_in(key, keys):
    assert (keys[3] == jax.random.fold_in(key, 3)).all()
    later = rng.request_keys(key, 2, first=3)
    assert (later == keys[3:]).all()
    assert (rng.request_keys(keys, 5) == keys).all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: jax.random.PRNGKey(0), "typed key"),
        (lambda: jax.random.key(0, impl="rbg"), "threefry"),
        (lambda: jax.random.split(jax.random.key(0), 3), "one key or one a row"),
    ],
)
def test_other_keys_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        rng.request_keys(wrong(), 5)


def noises(keys):
    length = jnp.arange(5, dtype=jnp.int32) + 3
    return {
        "draft": rng.RoundNoise.at(keys, length, rng.DRAFT),
        "accept": rng.RoundNoise.at(keys, length, rng.ACCEPT),
        "next round": rng.RoundNoise.at(keys, length + 1, rng.DRAFT),
        "child": rng.RoundNoise.at(keys, length, rng.DRAFT).child(0),
        "other child": rng.RoundNoise.at(keys, length, rng.DRAFT).child(1),
        "position": rng.PositionNoise(keys, length),
    }


def test_streams_and_offsets_and_rows_all_differ(keys):
    seen = set()
    for noise in noises(keys).values():
        for offset in range(3):
            seen |= set(np.asarray(noise.gumbel(offset, VOCAB)).ravel().tolist())
            seen |= set(np.asarray(noise.uniform(offset)).tolist())
    assert len(seen) == 6 * 3 * 5 * (VOCAB + 1)


def test_a_row_has_the_same_noise_alone_in_a_batch_and_inside_vmap(keys):
    for name, noise in noises(keys).items():
        together = noise.gumbel(2, VOCAB)
        alone = noises(keys)[name]
        alone = jax.tree.map(lambda leaf: leaf[3:4], alone)
        np.testing.assert_array_equal(alone.gumbel(2, VOCAB)[0], together[3])
        mapped = jax.vmap(lambda row: row.gumbel(2, VOCAB))(noise)
        np.testing.assert_array_equal(mapped, together)
        assert together.dtype == noise.uniform(0).dtype == jnp.float32


def test_position_noise_is_one_stream_however_it_is_reached(keys):
    noise = rng.PositionNoise(keys, jnp.full((5,), 3, jnp.int32))
    later = rng.PositionNoise(keys, jnp.full((5,), 5, jnp.int32))
    np.testing.assert_array_equal(noise.gumbel(2, VOCAB), later.gumbel(0, VOCAB))
    moved = noise.child(7, shift=2)
    np.testing.assert_array_equal(moved.gumbel(0, VOCAB), later.gumbel(0, VOCAB))


def test_draws_have_the_law_and_never_an_impossible_token(key):
    law = np.array([0.0, 0.7, 0.25, 0.05, 0.0])
    with np.errstate(divide="ignore"):
        row = jnp.asarray(np.log(law), jnp.float32)
    rows = 200_000
    noise = rng.PositionNoise(
        rng.request_keys(key, rows), jnp.zeros((rows,), jnp.int32)
    )
    tokens = jax.jit(
        lambda noise: rng.draw(jnp.broadcast_to(row, (rows, 5)), noise, 0)
    )(noise)
    counts = np.bincount(np.asarray(tokens), minlength=5)
    assert counts[0] == counts[4] == 0
    assert goodness_of_fit(counts, law) > 1e-6
    assert tokens.dtype == jnp.int32

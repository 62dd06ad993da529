"""Weights lie as the compiler wants them: the same texts, whatever it wants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental.layout import Format, Layout

from specdec_jax import SpeculativeDecoder
from specdec_jax.networks import layers
from specdec_jax.text.layouts import lay_out

PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save_checkpoint(tmp_path_factory.mktemp("layouts") / "target")


def texts(decoder):
    results = decoder.generate(PROMPTS, max_new_tokens=12)
    return [result.token_ids for result in results]


def transposed(leaf):
    order = tuple(range(leaf.ndim))[::-1]
    return jax.device_put(leaf, Format(Layout(order), leaf.sharding))


@pytest.mark.parametrize("mesh", [None, "data=1,model=2"])
def test_texts_do_not_depend_on_layouts(mesh, checkpoint):
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, checkpoint, mesh=mesh)
    found = texts(decoder)
    plan = decoder.plan(PROMPTS, max_new_tokens=12)
    decoder.engine = lay_out(decoder.engine, plan, batch_size=4)
    assert texts(decoder) == found
    # Each program is compiled for the weights as they lie.
    params = jax.tree.map(transposed, decoder.engine.params)
    decoder.engine = decoder.engine._replace(params=params)
    assert texts(decoder) == found
    kernel = decoder.engine.params.target["params"]["layers_0"]["mlp"]["up_proj"]
    assert kernel["kernel"].format.layout.major_to_minor[0] != 0


def test_a_decoder_lays_its_weights_out_once(checkpoint, monkeypatch):
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, "ngram")
    calls = []

    def count(engine, plan, *, batch_size):
        calls.append(batch_size)
        return lay_out(engine, plan, batch_size=batch_size)

    monkeypatch.setattr("specdec_jax.text.decoder.lay_out", count)
    found = texts(decoder)
    assert calls == []  # a CPU takes weights as they come
    decoder._lies_well = False
    assert texts(decoder) == texts(decoder) == found
    assert calls == [3]


@pytest.mark.parametrize("size", [7, layers.MOST_SLICES + 1])
def test_slices_are_the_rows_that_a_gather_gives(size):
    table = jax.random.normal(jax.random.key(0), (11, 6))
    ids = jax.random.randint(jax.random.key(1), (1, size), -2, 14)

    def look_up(sliced):
        module = layers.Embedding(11, 6, jnp.float32, sliced=sliced)
        return module.apply({"params": {"embedding": table}}, ids)

    np.testing.assert_array_equal(look_up(True), look_up(False))
    np.testing.assert_array_equal(look_up(True), table[np.clip(ids, 0, 10)])

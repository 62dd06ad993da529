"""The decoder: cached equals uncached, trees equal chains, garbage changes nothing."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import base
from specdec_jax.networks import Decoder, DecoderConfig, Rotary

FREQUENCIES = tuple(float(f) for f in 100.0 ** -np.arange(0, 1, 0.25))
LLAMA = DecoderConfig(
    vocab_size=48,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    max_positions=512,
    rotary=Rotary(FREQUENCIES),
    tied=True,
    qk_norm=True,
    windows=(None, 5),
)
GPT2 = DecoderConfig(
    vocab_size=48,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    max_positions=512,
    activation="gelu_tanh",
    gated=False,
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
TILED = dataclasses.replace(LLAMA, vocab_size=64, width=64, head_dim=16, mlp_width=128)
MODELS = {
    "llama": Decoder(LLAMA),
    "gpt2": Decoder(GPT2),
    "tiled": Decoder(TILED, tiled=True),
}
LENGTH = 24
TOKENS = jax.random.randint(jax.random.key(1), (3, LENGTH), 0, 48)


def _random(model: Decoder):
    """Variables in which every tensor is random, norms and biases included."""
    cache = jax.eval_shape(lambda: model.init_cache(1, 8))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS[:1], cache)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return tree.unflatten(
        (0.4 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    )


VARIABLES = {name: _random(model) for name, model in MODELS.items()}


@partial(jax.jit, static_argnames=("model", "hidden_layers"))
def _read(variables, tokens, cache, block, *, model, hidden_layers=()):
    return model.apply(
        variables, tokens, cache, block=block, hidden_layers=hidden_layers
    )


def read(name, tokens, cache, block=None):
    return _read(VARIABLES[name], tokens, cache, block, model=MODELS[name])


@pytest.fixture(scope="module", params=MODELS)
def whole(request):
    """A model's name, and its logits and cache after all tokens in one block."""
    output, cache = read(
        request.param, TOKENS, MODELS[request.param].init_cache(3, LENGTH + 8)
    )
    return request.param, output.logits, cache


def test_tiles_change_the_layout_of_weights_and_nothing_else():
    model, variables = MODELS["tiled"], VARIABLES["tiled"]

    def whole(path, leaf):
        if leaf.ndim < 3:
            return leaf
        kernel = leaf.transpose(1, 0, 2).reshape(leaf.shape[1], -1)
        return kernel.T if "embedding" in str(path) else kernel

    assert sum(leaf.ndim == 3 for leaf in jax.tree.leaves(variables)) == 2 * 5 + 1
    flat = jax.tree_util.tree_map_with_path(whole, variables)
    cache = model.init_cache(3, LENGTH)
    expected, _ = Decoder(TILED).apply(flat, TOKENS, cache)
    found, _ = model.apply(variables, TOKENS, cache)
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-5)


def test_the_decoder_is_a_language_model_that_hashes_by_value():
    model = MODELS["llama"]
    assert isinstance(model, base.LanguageModel)
    assert model == Decoder(LLAMA) and hash(model) == hash(Decoder(LLAMA))
    assert model.vocab_size == 48


@pytest.mark.parametrize("size", [1, 2, 5])
def test_cached_equals_uncached(size, whole):
    name, expected, cache = whole
    for start in range(LENGTH - 4 * size, LENGTH, size):
        # Lowering the length is the rollback: what lies above it stays where it is.
        tokens = TOKENS[:, start : start + size]
        output, after = read(name, tokens, cache.rewind(jnp.full(3, start, jnp.int32)))
        np.testing.assert_allclose(
            output.logits, expected[:, start : start + size], atol=2e-5
        )
        np.testing.assert_array_equal(after.length, start + size)


def test_what_was_rejected_leaves_no_trace(whole):
    name, expected, cache = whole
    wrong = (TOKENS[:, :5] + 1) % 48
    _, cache = read(name, wrong, cache.rewind(jnp.asarray([4, 9, 14], jnp.int32)))
    output, _ = read(
        name,
        jnp.stack([TOKENS[row, at : at + 5] for row, at in enumerate((4, 9, 14))]),
        cache.rewind(jnp.asarray([4, 9, 14], jnp.int32)),
    )
    for row, at in enumerate((4, 9, 14)):
        np.testing.assert_allclose(
            output.logits[row], expected[row, at : at + 5], atol=2e-5
        )


@pytest.mark.parametrize("garbage", [np.nan, 1e9, -np.inf])
def test_garbage_above_the_length_changes_nothing(garbage, whole):
    name, _, cache = whole
    length = jnp.asarray([0, 7, 19], jnp.int32)
    slots = jnp.arange(cache.capacity)[None] >= length[:, None]

    def spoil(buffer):
        return jnp.where(slots[:, None, None], jnp.float32(garbage), buffer)

    clean, spoilt = cache.rewind(length), cache.rewind(length)
    spoilt = spoilt._replace(
        keys=tuple(map(spoil, cache.keys)), values=tuple(map(spoil, cache.values))
    )
    outputs = [read(name, TOKENS[:, :5], c)[0].logits for c in (clean, spoilt)]
    np.testing.assert_array_equal(*outputs)


def test_capacity_and_longer_rows_change_nothing_bitwise(whole):
    name, _, cache = whole
    length = jnp.asarray([3, 11, 19], jnp.int32)
    wide = MODELS[name].init_cache(3, 300)

    def widen(small, large):
        return large.at[..., : small.shape[-1]].set(small)

    wide = jax.tree.map(widen, cache._replace(length=length), wide)
    near, _ = read(name, TOKENS[:, :5], cache.rewind(length))
    far, _ = read(name, TOKENS[:, :5], wide)
    np.testing.assert_array_equal(near.logits, far.logits)
    # A row of three slot blocks makes the others walk through two they do not see.
    mixed, _ = read(name, TOKENS[:, :5], wide.rewind(length.at[2].set(290)))
    np.testing.assert_array_equal(near.logits[:2], mixed.logits[:2])
    assert np.isfinite(mixed.logits).all()


def test_a_row_alone_equals_the_row_in_a_batch(whole):
    name, _, cache = whole
    cache = cache.rewind(jnp.asarray([3, 11, 19], jnp.int32))
    together, _ = read(name, TOKENS[:, :5], cache)
    for row in range(3):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], cache)
        alone, _ = read(name, TOKENS[row : row + 1, :5], one)
        np.testing.assert_allclose(alone.logits[0], together.logits[row], atol=1e-5)


# The tree 0 -> (1 -> 3 -> 4, 2), breadth first: parents of nodes 1 to 4.
PARENTS = (-1, 0, 0, 1, 3)
PATH = (0, 1, 3, 4)


def _tree(batch: int) -> base.Block:
    depth, ancestors = np.zeros(5, np.int32), np.eye(5, dtype=bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        depth[node] = depth[parent] + 1
        ancestors[node] |= ancestors[parent]
    return base.Block(
        jnp.asarray(np.repeat(depth[None], batch, 0)),
        jnp.asarray(np.repeat(ancestors[None], batch, 0)),
    )


def test_a_tree_gives_each_node_the_logits_of_its_chain(whole):
    name, _, cache = whole
    length = jnp.asarray([3, 11, 19], jnp.int32)
    cache, nodes = cache.rewind(length), TOKENS[:, 10:15]
    tree, after = read(name, nodes, cache, _tree(3))
    # Chains of five as well, so that all share a program; the last tokens are padding.
    chain, expected = read(name, nodes[:, jnp.asarray((*PATH, 0))], cache)
    for i, node in enumerate(PATH):
        np.testing.assert_allclose(tree.logits[:, node], chain.logits[:, i], atol=2e-5)
    sibling, _ = read(name, nodes[:, jnp.asarray([0, 2, 0, 0, 0])], cache)
    np.testing.assert_allclose(tree.logits[:, 2], sibling.logits[:, 1], atol=2e-5)
    # Committed, the path is a chain, and reading on cannot tell them apart.
    path = jnp.broadcast_to(jnp.asarray(PATH, jnp.int32)[None], (3, 4))
    after = after.commit(length, path).rewind(length + 4)
    expected, on = expected.rewind(length + 4), TOKENS[:, :2]
    np.testing.assert_allclose(
        read(name, on, after)[0].logits, read(name, on, expected)[0].logits, atol=2e-5
    )


def test_a_tree_read_level_by_level_is_the_tree_read_at_once(whole):
    name, _, cache = whole
    length = jnp.asarray([3, 11, 19], jnp.int32)
    nodes, tree = TOKENS[:, 10:15], _tree(3)
    once, after = read(name, nodes, cache.rewind(length), tree)
    cache = cache.rewind(length)
    for start, stop in ((0, 1), (1, 3), (3, 4), (4, 5)):
        so_far = base.Block(tree.depth[:, :stop], tree.ancestors[:, :stop, :stop])
        part, cache = read(name, nodes[:, start:stop], cache, so_far)
        np.testing.assert_allclose(part.logits, once.logits[:, start:stop], atol=2e-5)
    np.testing.assert_array_equal(cache.length, after.length)


def test_hidden_layers_are_inputs_of_layers_and_of_the_head():
    model, variables = MODELS["llama"], VARIABLES["llama"]
    cache = model.init_cache(3, 8)
    output, _ = _read(
        variables, TOKENS[:, :5], cache, None, model=model, hidden_layers=(-1, 1, 0)
    )
    head, _, first = output.hidden
    np.testing.assert_allclose(
        model.apply(variables, head, method="logits"), output.logits, atol=1e-5
    )
    np.testing.assert_array_equal(
        model.apply(variables, TOKENS[:, :5], method="embedding"), first
    )
    with pytest.raises(ValueError, match="hidden layer 2.*2 layers"):
        model.apply(variables, TOKENS[:, :5], cache, hidden_layers=(2,))


def test_a_model_cut_short_reads_on_the_whole_models_cache(whole):
    name, _, cache = whole
    if name != "gpt2":
        return
    config = DecoderConfig(**(vars(GPT2) | {"num_layers": 1}))
    short, start = Decoder(config), jnp.full(3, 9, jnp.int32)
    _, after = _read(
        VARIABLES[name], TOKENS[:, 9:14], cache.rewind(start), None, model=short
    )
    np.testing.assert_array_equal(after.keys[1], cache.keys[1])
    np.testing.assert_allclose(
        after.keys[0][..., :14], cache.keys[0][..., :14], atol=1e-5
    )


def test_bfloat16_models_compute_and_store_in_bfloat16():
    model = Decoder(LLAMA, jnp.bfloat16)
    variables, cache = _random(model), model.init_cache(3, 8)
    output, cache = _read(variables, TOKENS[:, :5], cache, None, model=model)
    kinds = {leaf.dtype for leaf in jax.tree.leaves((variables, output, cache[1:]))}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
    exact = read("llama", TOKENS[:, :5], MODELS["llama"].init_cache(3, 8))[0].logits
    np.testing.assert_allclose(output.logits.astype(jnp.float32), exact, atol=0.5)


def test_float32_products_ask_for_the_highest_precision(whole):
    name, _, cache = whole
    with jax.default_matmul_precision("bfloat16"):
        text = str(
            jax.make_jaxpr(MODELS[name].apply)(VARIABLES[name], TOKENS[:, :2], cache)
        )
    products = text.count("dot_general[")
    assert products >= 2 * (4 + 4 + 2) + 1
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


def _while_body_copies(text: str, shapes: set[str]) -> list[str]:
    """Lines of compiled text, outside the entry, that copy arrays of these shapes."""
    computation, found = "", []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line
        if computation.startswith("ENTRY"):
            continue
        match = re.search(r"= (\w+\[[\d,]*\])\S* (copy|transpose)\(", line)
        if match and match[1] in shapes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize(("name", "size"), [("llama", 1), ("llama", 5), ("gpt2", 5)])
def test_a_compiled_loop_copies_neither_cache_nor_weights(name, size):
    model, variables = MODELS[name], VARIABLES[name]

    def run(variables, cache, tokens):
        def step(carry):
            tokens, cache = carry
            output, after = model.apply(variables, tokens, cache)
            tokens = output.logits.argmax(-1).astype(jnp.int32)
            return tokens, after.rewind(cache.length + 1)

        return jax.lax.while_loop(
            lambda carry: carry[1].length.max() < 100, step, (tokens, cache)
        )

    cache = model.init_cache(3, 256)
    text = (
        jax.jit(run, donate_argnums=1)
        .lower(variables, cache, TOKENS[:, :size])
        .compile()
        .as_text()
    )
    leaves = jax.tree.leaves((variables, cache.keys))
    shapes = {
        f"f32[{','.join(map(str, leaf.shape))}]" for leaf in leaves if leaf.ndim > 1
    }
    assert "while" in text
    assert not _while_body_copies(text, shapes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "4 query heads cannot share 3"),
        ({"windows": (None,)}, "windows lists 1 layers"),
        ({"head_dim": 6}, "4 rotary pairs do not fit into a head of 6"),
    ],
)
def test_configs_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(vars(LLAMA) | changes))

"""What the compiled program may not do: copy caches or weights, compile again."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import decode
from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.base import Params
from specdec_jax.drafters import (
    EarlyExit,
    ModelDrafter,
    Nested,
    NgramDrafter,
    NoDrafter,
    Staged,
    first_layers,
)
from specdec_jax.networks import Decoder, DecoderConfig
from specdec_jax.sampling import Sampling

VOCAB = 97


def decoder(num_layers, width, vocab_size=VOCAB, tiled=False):
    config = DecoderConfig(
        vocab_size=vocab_size, width=width, num_layers=num_layers, num_heads=4,
        num_kv_heads=2, head_dim=width // 4, mlp_width=3 * width, max_positions=4096,
        tied=tiled,
    )  # fmt: skip
    return Decoder(config, tiled=tiled)


TARGET, DRAFT = decoder(3, 40), decoder(2, 24)
TILED = decoder(3, 128, vocab_size=192, tiled=True)


def variables(model):
    tokens = jnp.zeros((1, 3), jnp.int32)
    return model.init(jax.random.key(0), tokens, model.init_cache(1, 8))


def start(drafter, temperature, batch=2, target=TARGET, pair=False):
    draft = variables(DRAFT)
    params = Params(variables(target), ((draft, None), None) if pair else draft)
    state = decode.init(
        params, jax.random.key(0), jnp.ones((batch, 20), jnp.int32),
        jnp.full((batch,), 5, jnp.int32), target=target, drafter=drafter,
        max_new_tokens=100, sampling=Sampling(temperature=temperature),
    )  # fmt: skip
    return params, state


def loop_text(drafter, rule, temperature, target=TARGET, **options):
    """The compiled text of a whole run, and the shapes of caches and weights in it."""
    params, state = start(drafter, temperature, target=target, **options)
    run = partial(decode.run, target=target, drafter=drafter, rule=rule)
    text = jax.jit(run, donate_argnums=1).lower(params, state).compile().as_text()
    caches = (state.cache, state.drafter_state)
    large = [x for x in jax.tree.leaves((params, caches)) if x.size > 900]
    return text, {",".join(map(str, x.shape)) for x in large}


def moved(text, shapes):
    """Instructions outside the entry that move a whole cache or weight."""
    found, inside_entry = [], False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside_entry = line.startswith("ENTRY")
        match = re.search(r"= \w+\[([\d,]*)\]\S* (copy|transpose|convert)\(", line)
        if match and match[1] in shapes and not inside_entry:
            found.append(line.strip()[:100])
    return found


@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    "drafter",
    [
        NoDrafter(), ModelDrafter(DRAFT, 3), NgramDrafter(3),
        EarlyExit(first_layers(TARGET, 2), 3),
    ],
    ids=["none", "model", "ngram", "early exit"],
)  # fmt: skip
def test_a_round_copies_no_cache_and_no_weight(drafter, rule):
    text, shapes = loop_text(drafter, rule, 0.9)
    assert len(shapes) > 5
    assert moved(text, shapes) == []


def test_rounds_inside_a_draft_copy_no_cache_and_no_weight():
    drafter = Staged((Nested(DRAFT, NgramDrafter(2), 3), NgramDrafter(1)))
    text, shapes = loop_text(drafter, Rejection(), 0.9, pair=True)
    assert len(shapes) > 5
    assert moved(text, shapes) == []


def test_a_round_puts_no_tiles_together():
    text, shapes = loop_text(NgramDrafter(3), Rejection(), 0.9, TILED)
    assert any(shape.startswith("6,128,64") for shape in shapes)
    assert moved(text, shapes | {"128,192", "192,128", "128,384", "384,128"}) == []


def test_a_copied_cache_would_be_seen():
    """A conditional that writes the cache makes XLA copy it: the finder must say so."""
    model, params = TARGET, variables(TARGET)
    cache = model.init_cache(2, 256)

    def body(carry):
        i, cache = carry
        tokens = jnp.ones((2, 1), jnp.int32) * i
        cache = jax.lax.cond(
            i % 2 == 0,
            lambda c: model.apply(params, tokens, c)[1],
            lambda c: model.apply(params, jnp.concatenate([tokens, tokens], 1), c)[1],
            cache,
        )
        return i + 1, cache

    def run(cache):
        return jax.lax.while_loop(lambda c: c[0] < 9, body, (jnp.int32(0), cache))

    text = jax.jit(run, donate_argnums=0).lower(cache).compile().as_text()
    assert moved(text, {",".join(map(str, cache.keys[0].shape))})


def test_values_never_compile_again():
    """Twenty settings, seeds, prompts, lengths and budgets: one program."""
    compiled = []
    drafter = ModelDrafter(DRAFT, 3)
    params, _ = start(drafter, 0.9)

    @jax.jit
    def run(params, keys, tokens, lengths, budget, rows):
        return decode.generate(
            params, keys, tokens, lengths, target=TARGET, drafter=drafter,
            rule=Rejection(), max_new_tokens=budget, capacity=150, sampling=rows,
        ).length  # fmt: skip

    def once(i):
        lengths = jnp.array([1 + i, 30 - i], jnp.int32)
        rows = Sampling(temperature=[0.5 + i / 10, 0.0], top_p=[0.99 - i / 50, 0.5])
        tokens = (jnp.arange(60, dtype=jnp.int32).reshape(2, 30) * (i + 1)) % VOCAB
        return run(
            params, jax.random.split(jax.random.key(i), 2), tokens, lengths,
            jnp.array([3 + i, 5], jnp.int32), rows.rows(2, VOCAB),
        )  # fmt: skip

    once(0).block_until_ready()
    size = run._cache_size()
    for i in range(1, 21):
        compiled.append(once(i))
    assert run._cache_size() == size == 1
    assert len({int(lengths[0]) for lengths in compiled}) > 10


def test_a_run_reuses_no_key():
    with jax.debug_key_reuse(True):
        for drafter in (NoDrafter(), ModelDrafter(DRAFT, 2)):
            params, state = start(drafter, 0.9)
            step = partial(
                decode.step, target=TARGET, drafter=drafter, rule=Rejection()
            )
            state, _ = jax.jit(step)(params, state)
            assert (state.length > 5).all()


def test_rebuilt_equal_parts_compile_nothing():
    run = jax.jit(
        decode.run, static_argnames=("target", "drafter", "rule"), donate_argnums=1
    )
    for _ in range(3):
        drafter = ModelDrafter(decoder(2, 24), 2)
        params, state = start(drafter, 0.0)
        run(params, state, target=decoder(3, 40), drafter=drafter, rule=Rejection())
    assert run._cache_size() == 1

"""Drafts that cost little: their laws by enumeration, and the loop that runs them."""

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_jax import decode
from specdec_jax.acceptance import RULES, Coupled, Rejection
from specdec_jax.audit import faults
from specdec_jax.audit.exact import exact_law
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE, loop_law
from specdec_jax.audit.planted.parts import DropsUnlikely
from specdec_jax.base import Draft, Params, RoundContext, Verdict
from specdec_jax.drafters import (
    Adaptive,
    EarlyExit,
    LookupTable,
    ModelDrafter,
    NgramCounts,
    NgramDrafter,
    NoDrafter,
    Stop,
    first_layers,
    fit_bigram,
    fit_unigram,
    frequent_ids,
)
from specdec_jax.networks import Decoder, DecoderConfig, Rotary, remap, trim
from specdec_jax.sampling import Sampling
from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.vocabulary import shared_tokens

VOCAB, K = 3, 3
PROMPT = (2, 0, 1, 2, 0, 2)
MODEL = toy.TableModel(VOCAB)
CHAINS = np.array(list(itertools.product(range(VOCAB), repeat=K)), np.int32)
LOSSLESS = {
    name: rule
    for name, rule in RULES.items()
    if rule.lossless and "none" in rule.siblings
}


def tables(seed, scale=1.3):
    return toy.table(jax.random.key(seed), VOCAB, scale, jnp.float64)


class Forced(NamedTuple):
    """Noise that makes each row draw a chain of its own."""

    chains: Any

    def gumbel(self, offset, vocab_size):
        wanted = jax.lax.dynamic_index_in_dim(self.chains, offset, 1)
        every = jnp.arange(vocab_size, dtype=jnp.int32)[None]
        return jnp.where(wanted == every, 1e9, 0.0)

    def uniform(self, offset):
        raise AssertionError("drafters here draw by Gumbels")

    def child(self, index, shift=0):
        return self


def proposals(drafter, params, temperature=1.0):
    """Returns the draft of every chain there is, one a row, in float64."""
    batch = len(CHAINS)
    length = jnp.full((batch,), len(PROMPT), jnp.int32)
    tokens = (
        jnp.zeros((batch, 16), jnp.int32)
        .at[:, : len(PROMPT)]
        .set(jnp.array(PROMPT, jnp.int32)[None])
    )

    @jax.jit
    def propose(params, tokens):
        state = drafter.init(params, batch, 16)
        cache = MODEL.init_cache(batch, 16)
        output, cache = MODEL.apply(params.target, tokens[:, : len(PROMPT)], cache)
        read = length - 1
        state = drafter.prefill(
            params, state, tokens[:, : len(PROMPT)], jnp.zeros_like(read), read, output
        )
        context = RoundContext(
            params=params,
            tokens=tokens,
            length=length,
            max_draft=jnp.full((batch,), K, jnp.int32),
            sampling=Sampling(temperature=temperature).rows(batch, VOCAB),
            noise=Forced(jnp.asarray(CHAINS)),
            target_cache=cache.rewind(read),
        )
        return drafter.draft(state, context)[0]

    return jax.device_get(propose(params, tokens))


def emitted_law(drafter, params, rule, told=None):
    """Returns the joint law of K + 1 tokens of one round, completed by the target.

    Each row stands for its chain's beginning that was kept, [0, num_valid), which it
    shares with the V^(K - num_valid) rows that go on otherwise. What was told of a
    place must be the law it was drawn from, or the sum is not the target's law; `told`
    is told instead.
    """
    draft = proposals(drafter, params)
    places = np.arange(K)[None]
    valid = places < draft.num_valid[:, None]
    chosen = np.take_along_axis(draft.log_probs, CHAINS[..., None], 2)[..., 0]
    drawn = np.where(valid, np.exp(np.where(valid, chosen, 0)), 1 / VOCAB).prod(1)
    impossible = (valid & (draft.tokens != CHAINS)).any(1)
    assert (drawn[impossible] == 0).all()  # another token was drawn than was wanted
    target = target_rows(params.target)
    along = np.stack([target[d][tuple(CHAINS[:, :d].T)] for d in range(1, K + 1)], 1)
    root = np.broadcast_to(target[0], along[:, :1].shape)
    rows = np.concatenate([root, along], 1)
    told = draft.log_probs if told is None else told
    batch = Draft(CHAINS, draft.num_valid, told.astype(np.float64))
    stop, following = _law(batch, rows, rule=rule)
    cases = np.where(drawn[:, None, None] > 0, stop[..., None] * following, 0)
    cases = cases * drawn[:, None, None]
    total = np.zeros((VOCAB,) * (K + 1))
    for n in range(K + 1):
        emitted = cases[:, n].reshape((VOCAB,) * (K + 1)).sum(tuple(range(n, K)))
        for later in target[n + 1 :]:
            emitted = emitted[..., None] * np.exp(later)
        total += emitted
    return total, draft


@partial(jax.jit, static_argnames="rule")
def _law(draft, rows, *, rule):
    return jax.vmap(rule.law)(draft, rows)


def target_rows(variables):
    """Returns the target's policy rows by depth, after the prompt."""
    rows = []
    for depth in range(K + 1):
        tails = itertools.product(range(VOCAB), repeat=depth)
        contexts = [(*PROMPT, *tail) for tail in tails]
        probs = toy.softmax(toy.next_logits(MODEL, variables, contexts))
        rows.append(np.log(probs).reshape((VOCAB,) * (depth + 1)))
    return rows


def total_variation(drafter, params, rule, told=None):
    law, draft = emitted_law(drafter, params, rule, told)
    right = np.ones(())
    for rows in target_rows(params.target):
        right = right[..., None] * np.exp(rows)
    return np.abs(law - right).sum() / 2, draft


CORPUS = [0, 1, 2, 2, 0, 1, 1, 2, 0, 0, 2, 1, 2, 2]


def subjects():
    """Returns drafters and their variables, in float64."""
    small = tables(2)
    trimmed = trim(MODEL, small, [0, 2])
    mapped = remap(MODEL, small, np.array([2, 0, 1]), np.array([2, -1, 1]))
    both = trim(*mapped, [2, 1])

    def model(pair, **options):
        return ModelDrafter(pair[0], K, VOCAB, **options), pair[1]

    return {
        "model": model((MODEL, small)),
        "stop before": model((MODEL, small), stop=Stop(entropy=0.9)),
        "stop after": model((MODEL, small), stop=Stop(below=0.3)),
        "stop by both": model((MODEL, small), stop=Stop(below=0.25, entropy=0.95)),
        "early exit": (EarlyExit(toy.Softer(VOCAB), K), None),
        "early exit that stops": (
            EarlyExit(toy.Softer(VOCAB), K, Stop(below=0.4)),
            None,
        ),
        "trimmed": model(trimmed),
        "another tokenizer": model(mapped),
        "both": model(both),
        "bigram": model((LookupTable(VOCAB), fit_bigram(CORPUS, VOCAB, top=2))),
        "unigram": model((LookupTable(VOCAB), fit_unigram(CORPUS, VOCAB))),
        "ngram counts": model((NgramCounts(VOCAB, 2, 3), None)),
        "adaptive": (Adaptive(ModelDrafter(MODEL, K, VOCAB), start=2), small),
    }


NAMES = (
    "model", "stop before", "stop after", "stop by both", "early exit",
    "early exit that stops", "trimmed", "another tokenizer", "both", "bigram",
    "unigram", "ngram counts", "adaptive",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_round_has_the_targets_law_exactly(name):
    """Enumerated over every chain: what is told is the law that was drawn from."""
    with jax.enable_x64(True):
        drafter, small = subjects()[name]
        params = Params(tables(1), small)
        for rule in LOSSLESS.values():
            found, draft = total_variation(drafter, params, rule)
            assert found < 2e-7, rule
    # The draft has a law in this place, and is not the target's.
    valid = np.arange(K)[None] < draft.num_valid[:, None]
    sums = np.exp(draft.log_probs).sum(-1)
    np.testing.assert_allclose(sums[valid], 1, atol=1e-6)
    if "stop" in name:
        assert 0 < valid.sum() < valid.size


def test_dropping_the_token_that_triggered_the_stop_is_seen():
    with jax.enable_x64(True):
        params = Params(tables(1), tables(2))
        wrong = DropsUnlikely(MODEL, K, VOCAB, least=0.3)
        right = ModelDrafter(MODEL, K, VOCAB, stop=Stop(below=0.3))
        biased, dropped = total_variation(wrong, params, Rejection())
        exact, kept = total_variation(right, params, Rejection())
    assert biased > 0.1 and exact < 1e-12
    assert (kept.num_valid >= dropped.num_valid).all()


def test_a_trimmed_draft_that_tells_its_whole_law_is_seen():
    with jax.enable_x64(True):
        target, small = tables(1), tables(2)
        whole = proposals(ModelDrafter(MODEL, K), Params(target, small)).log_probs
        model, variables = trim(MODEL, small, [0, 2])
        found, _ = total_variation(
            ModelDrafter(model, K), Params(target, variables), Rejection(), whole
        )
    assert found > 0.02


def network(num_layers=2, vocab_size=97, width=32, tied=True, tiled=False):
    config = DecoderConfig(
        vocab_size=vocab_size, width=width, num_layers=num_layers, num_heads=4,
        num_kv_heads=2, head_dim=8, mlp_width=48, max_positions=512, tied=tied,
        rotary=Rotary((1.0, 0.3, 0.1, 0.03)), windows=(None, 7)[:num_layers],
    )  # fmt: skip
    return Decoder(config, tiled=tiled)


def random_variables(model, seed=0):
    """Weights large enough that greedy text is not one token over and over."""
    tokens, cache = jnp.zeros((1, 1), jnp.int32), model.init_cache(1, 8)
    shapes = jax.eval_shape(partial(model.init), jax.random.key(0), tokens, cache)
    draw = np.random.default_rng(seed)

    def weight(path, leaf):
        if "scale" in str(path[-1]):
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray(draw.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(weight, shapes)


ROWS = ((5, 9, 1.0), (1, 14, 0.0), (8, 1, 0.8), (3, 11, 0.0))
"""Prompt length, budget and temperature of each row."""


@partial(jax.jit, static_argnames=("target", "drafter", "rule"))
def _decode(params, tokens, lengths, budgets, rows, *, target, drafter, rule):
    return decode.generate(
        params, jax.random.key(3), tokens, lengths, target=target, drafter=drafter,
        rule=rule, max_new_tokens=budgets, capacity=140, sampling=rows,
    )  # fmt: skip


def run(target, params, drafter, rule=Rejection()):
    lengths, budgets, temperatures = zip(*ROWS, strict=True)
    tokens = np.random.default_rng(1).integers(0, target.vocab_size, (4, 8))
    settings = Sampling(temperature=list(temperatures)).rows(4, target.vocab_size)
    return _decode(
        params, jnp.asarray(tokens, jnp.int32), jnp.array(lengths, jnp.int32),
        jnp.array(budgets, jnp.int32), settings,
        target=target, drafter=drafter, rule=rule,
    )  # fmt: skip


def texts(state):
    spans = zip(state.tokens, state.prompt_length, state.length, strict=True)
    return [np.asarray(tokens[a:b]).tolist() for tokens, a, b in spans]


TARGET = network()


@pytest.fixture(scope="module")
def plain():
    params = Params(random_variables(TARGET))
    return params, run(TARGET, params, NoDrafter(), Coupled())


def network_drafters():
    small = network(1)
    trimmed, kept = trim(small, random_variables(small, 1), range(0, 97, 2))
    return {
        "early exit": (EarlyExit(first_layers(TARGET, 1), 3), None),
        "trimmed": (ModelDrafter(trimmed, 3, stop=Stop(0.3, 4.0)), kept),
    }


@pytest.mark.parametrize("name", ["early exit", "trimmed"])
def test_text_of_a_network_is_plain_text(name, plain):
    """Ragged budgets, greedy rows beside sampled ones, a window in one layer."""
    params, expected = plain
    drafter, variables = network_drafters()[name]
    params = params._replace(draft=variables)
    state = run(TARGET, params, drafter, Coupled())
    assert texts(state) == texts(expected)
    assert (state.counts.num_drafted[jnp.array([0, 1, 3])] > 0).all()
    assert [len(text) for text in texts(state)] == [budget for _, budget, _ in ROWS]
    if name == "early exit":
        _check_cache(state.cache, expected.cache)
        own = texts(run(TARGET, params, drafter, Rejection()))
        assert [own[1], own[3]] == [texts(expected)[1], texts(expected)[3]]


def _check_cache(cache, plain):
    """What an early exit wrote was written again by all layers."""
    np.testing.assert_array_equal(cache.length, plain.length)
    live = np.arange(plain.capacity) < np.asarray(plain.length)[:, None]
    pairs = zip(cache.keys + cache.values, plain.keys + plain.values, strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(
            np.asarray(one).transpose(0, 3, 1, 2)[live],
            np.asarray(other).transpose(0, 3, 1, 2)[live],
            atol=1e-5,
        )


def test_early_exit_of_nearly_all_layers_is_nearly_the_target():
    """Its law is read from the target's own cache: a hole in it would show."""
    params = Params(random_variables(TARGET))
    quiet = {
        name: jax.tree.map(lambda x: 0 * x, leaf) if name == "layers_1" else leaf
        for name, leaf in params.target["params"].items()
    }
    params = Params({"params": quiet})  # the last layer adds nothing
    state = run(TARGET, params, EarlyExit(first_layers(TARGET, 1), 3))
    np.testing.assert_array_equal(state.counts.num_accepted, state.counts.num_drafted)
    assert state.counts.num_drafted.sum() > 12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_trimmed_head_scores_as_the_whole_one(tied, tiled):
    model = network(1, vocab_size=192, width=64, tied=tied, tiled=tiled)
    variables = random_variables(model)
    ids = np.random.default_rng(0).permutation(192)[:128]
    small, cut = trim(model, variables, ids)
    assert cut["map"]["head"].shape == ((2, 64, 64) if tiled else (64, 128))
    tokens = jnp.array([[3, 191, 7]], jnp.int32)
    cache = model.init_cache(1, 8)
    whole = jax.jit(model.apply)(variables, tokens, cache)[0].logits
    output = jax.jit(partial(small.apply, hidden_layers=(0,)))(cut, tokens, cache)[0]
    kept = np.isin(np.arange(192), ids)
    np.testing.assert_allclose(output.logits[..., kept], whole[..., kept], rtol=2e-5)
    assert (np.asarray(output.logits[..., ~kept]) == -np.inf).all()
    assert len(output.hidden) == 1
    # The whole head is not multiplied.
    text = jax.jit(small.apply).lower(cut, tokens, cache).compile().as_text()
    assert "192" in jax.jit(model.apply).lower(variables, tokens, cache).as_text()
    assert not [line for line in text.splitlines() if "dot" in line and "192]" in line]


def test_a_draft_whose_ids_are_all_banned_proposes_nothing():
    """Its policy row is no law: plain steps, in a batch with rows that draft."""
    model, variables = trim(MODEL, toy.table(jax.random.key(2), VOCAB), [0])
    params = Params(toy.table(jax.random.key(1), VOCAB), variables)
    settings = Sampling(temperature=1.0, banned_tokens=((0,), ()))
    state = jax.jit(
        partial(
            decode.generate, target=MODEL, drafter=ModelDrafter(model, K),
            rule=Rejection(), max_new_tokens=12,
        )
    )(
        params, jax.random.key(0), jnp.array([[1, 2], [2, 1]]), jnp.array([2, 2]),
        sampling=settings.rows(2, VOCAB),
    )  # fmt: skip
    assert (state.finish == decode.LENGTH).all()
    assert 0 not in state.tokens[0, 2:14]
    assert state.counts.num_drafted[0] == 0 and state.counts.num_drafted[1] > 0


def test_counts_say_what_followed():
    model = NgramCounts(7, max_ngram=2, sharpness=10)
    tokens = jnp.array([[1, 2, 3, 5, 2, 3, 6, 1, 2], [4, 4, 0, 0, 0, 0, 0, 0, 0]])
    apply = jax.jit(model.apply)
    cache = model.init_cache(2, 12)
    output, cache = apply(None, tokens, cache)
    # After `1 2`: `1 2` was followed by 3 once, and a lone 2 by 3 once.
    probs = jax.nn.softmax(output.logits[0, 8])
    np.testing.assert_allclose(probs, np.eye(7)[3], atol=1e-6)
    # After `2 3`, the second time: `2 3` was followed by 5.
    np.testing.assert_allclose(jax.nn.softmax(output.logits[0, 5]), np.eye(7)[5])
    # Rolled back to `1 2 3 5 2`, then 9 unseen: nothing to say.
    back = cache.rewind(jnp.array([5, 1]))
    output, _ = apply(None, jnp.array([[6], [4]]), back)
    assert (output.logits[0, 0] == -jnp.inf).all()
    np.testing.assert_allclose(jax.nn.softmax(output.logits[1, 0]), np.eye(7)[4])
    one = model.apply(
        None, jnp.array([[2, 1, 2, 2, 0, 2, 1, 2]]), model.init_cache(1, 9)
    )
    # After `1 2`: followed by 2 once (10^2); a lone 2 by 1, 2, 0 and 1 (10 each).
    expected = np.array([10, 20, 100, 0, 0, 0, 0]) / 130
    np.testing.assert_allclose(jax.nn.softmax(one[0].logits[0, 7]), expected, atol=1e-6)
    with pytest.raises(ValueError, match="too much"):
        NgramCounts(7, 8, 16).init_cache(1, 9)


def test_a_table_keeps_what_it_can_and_sums_to_one():
    ids = np.random.default_rng(0).zipf(1.5, 4000) % 11
    whole = np.zeros((11, 11))
    np.add.at(whole, (ids[:-1], ids[1:]), 1)
    unigram = (np.bincount(ids, minlength=11) + 1) / (len(ids) + 11)
    whole = (whole + 2 * unigram) / (whole.sum(1, keepdims=True) + 2)
    model = LookupTable(11)
    every = jnp.arange(11, dtype=jnp.int32)[None]

    def laws(variables):
        output, _ = model.apply(variables, every, model.init_cache(1, 12))
        return np.exp(np.asarray(output.logits[0], np.float64))

    np.testing.assert_allclose(laws(fit_bigram(ids, 11, smoothing=2.0)), whole, 2e-5)
    short = laws(fit_bigram(ids, 11, smoothing=2.0, top=3))
    np.testing.assert_allclose(short.sum(1), 1, 1e-5)
    best = np.argsort(-whole, axis=1)[:, :3]
    rows = np.arange(11)[:, None]
    np.testing.assert_allclose(short[rows, best], whole[rows, best], 2e-5)
    np.testing.assert_allclose(
        laws(fit_unigram(ids, 11)), np.tile(unigram, (11, 1)), 1e-5
    )
    size = sum(x.nbytes for x in jax.tree.leaves(fit_bigram(ids, 49152)))
    assert size < 14e6
    for wrong in ([], [11], [-1]):
        with pytest.raises(ValueError, match="corpus"):
            fit_bigram(wrong, 11)


def test_adaptive_length_follows_acceptance():
    drafter = Adaptive(NgramDrafter(8), start=3)
    length, _ = drafter.init(None, 5, 64)
    valid = jnp.array([3, 3, 0, 1, 2], jnp.int32)
    accepted = jnp.array([3, 1, 0, 0, 2], jnp.int32)
    draft, verdict = Draft(None, valid), Verdict(accepted, None, None)
    state = (jnp.array([3, 3, 3, 1, 7], jnp.int32), ())
    state = drafter.update(None, state, None, draft, None, verdict)
    assert length.tolist() == [3] * 5
    assert state[0].tolist() == [5, 2, 3, 1, 8]


def test_what_cannot_be_drafted_with_is_refused_in_words():
    with pytest.raises(ValueError, match="give 1 to 1"):
        first_layers(TARGET, 2)
    with pytest.raises(ValueError, match="no config that counts them"):
        first_layers(MODEL, 1)
    with pytest.raises(ValueError, match="threshold"):
        Stop()
    with pytest.raises(ValueError, match="probability"):
        Stop(below=1.5)
    with pytest.raises(ValueError, match="at least 1"):
        EarlyExit(TARGET, 0)
    with pytest.raises(ValueError, match="least"):
        Adaptive(NgramDrafter(3), least=0)
    with pytest.raises(ValueError, match="none of the ids"):
        trim(MODEL, tables32(), [7])
    assert frequent_ids([4, 4, 1], 6, 3).tolist() == [0, 1, 4]


def tables32():
    return toy.table(jax.random.key(0), VOCAB)


CORPUS_TEXT = "hello world, the cat sat on the mat and the dog sat on the log. " * 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target, a draft whose tokenizer has two ids exchanged, and a text."""
    folder = tmp_path_factory.mktemp("pair")
    corpus = folder / "corpus.txt"
    corpus.write_text(CORPUS_TEXT)
    other = tiny.make_tokenizer(swapped=True)
    return (
        tiny.save_checkpoint(folder / "target", num_layers=2),
        tiny.save_checkpoint(folder / "draft", seed=1, num_layers=1, tokenizer=other),
        str(corpus),
    )


PROMPTS = ["the cat sat on the mat and the", "hello", "the dog"]


@pytest.fixture(scope="module")
def greedy_ids(checkpoints):
    decoder = SpeculativeDecoder.from_pretrained(checkpoints[0], None)
    results = decoder.generate(PROMPTS, max_new_tokens=[9, 14, 3])
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    "name",
    [
        "early_exit:layers=1,adaptive=2",
        "bigram:corpus={corpus},below=0.05",
        "{draft}:tokenizer=shared,vocab=128,corpus={corpus},entropy=9",
    ],
)
def test_drafts_by_name_give_plain_greedy_text(name, checkpoints, greedy_ids):
    target, draft, corpus = checkpoints
    name = name.format(draft=draft, corpus=corpus)
    told = pytest.warns(match="drafts 100%") if draft in name else nullcontext()
    with told:
        decoder = SpeculativeDecoder.from_pretrained(target, name, num_draft_tokens=3)
    results = decoder.generate(PROMPTS, max_new_tokens=[9, 14, 3])
    assert [result.token_ids for result in results] == greedy_ids
    assert sum(result.num_drafted for result in results) > 3


@pytest.mark.slow
def test_early_exit_of_the_bundled_target_gives_its_plain_text():
    prompts = ["def read_lines(path):\n", "import os\nimport"]
    plain, exits = (
        SpeculativeDecoder.from_pretrained("pystd-5m", draft, num_draft_tokens=3)
        for draft in (None, "early_exit")
    )
    found = exits.generate(prompts, max_new_tokens=24)
    expected = plain.generate(prompts, max_new_tokens=24)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(one.num_drafted for one in found) > 20


@pytest.mark.parametrize(
    "name, message",
    [
        ("early_exit:layers=2", "layer 2 of 2"),
        ("early_exit:below=x", "below is 'x'"),
        ("ngram:below=0.5", "no option 'below'"),
        ("bigram", "bigram:corpus=FILE"),
        ("{draft}", "tokenizer=shared"),
        ("{target}:vocab=0", "vocab is 0"),
        ("{target}:corpus={corpus}", "corpus goes with vocab"),
        ("{target}:tokenizer=mine", "offered is shared"),
        ("ngram:adaptive=0", "least"),
    ],
)
def test_options_that_make_no_draft_are_refused(name, message, checkpoints):
    target, draft, corpus = checkpoints
    name = name.format(target=target, draft=draft, corpus=corpus)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder.from_pretrained(target, name)
    with pytest.raises(FileNotFoundError, match="no corpus"):
        SpeculativeDecoder.from_pretrained(target, "bigram:corpus=nowhere")


@pytest.mark.parametrize(
    "drafts, compose, message",
    [
        (["{target}:layers=1", "early_exit"], "nested", "for the target alone"),
        (["{target}:below=0.4", "ngram"], "nested", "cannot stop early"),
        (["{target}:adaptive=3", "ngram"], "nested", "must be models"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(
    drafts, compose, message, checkpoints
):
    drafts = [draft.format(target=checkpoints[0]) for draft in drafts]
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder.from_pretrained(checkpoints[0], drafts, compose=compose)


def test_tokens_are_shared_by_their_bytes():
    ours, swapped = tiny.make_tokenizer(), tiny.make_tokenizer(swapped=True)
    size = len(ours.get_vocab())
    found = shared_tokens(ours, swapped, tiny.VOCAB_SIZE, tiny.VOCAB_SIZE)
    assert found.share == 1
    a, b = ours.convert_tokens_to_ids(["a", "b"])
    assert (found.column[a], found.column[b]) == (b, a)
    np.testing.assert_array_equal(found.column[size:], -1)
    rest = [i for i in range(size) if i not in (a, b)]
    np.testing.assert_array_equal(found.column[rest], rest)
    # Pieces that write a space in another way, and lone bytes as <0x..>.
    pieces = _pieces_tokenizer()
    found = shared_tokens(ours, pieces, size, 40)
    vocab, theirs = ours.get_vocab(), pieces.get_vocab()
    for one, other in (("Ġthe", "▁the"), ("Ċ", "<0x0A>"), ("c", "c"), ("</s>", "<e>")):
        assert found.column[vocab[one]] == theirs[other], one
    lacking = vocab["Ġmat"]
    assert found.column[lacking] == -1
    assert found.read[lacking] == theirs["t"]  # its last piece there
    with pytest.raises(ValueError, match="share 4 tokens"):
        shared_tokens(ours, _pieces_tokenizer(strange=True), size, 400)


def _pieces_tokenizer(strange=False):
    words = ["<u>", "<e>", "▁the", "▁", *"catmdhesong", "<0x0A>", "▁cat"]
    words = list(dict.fromkeys(words))
    if strange:
        words = ["<u>", "<e>", "▁the", "c", "<0x0A>", *(f"#{i}" for i in range(300))]
    scores = [(word, -float(i)) for i, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", unk_token="<u>"
    )


def test_the_audit_knows_whose_law_an_early_exit_has():
    """It is told of a shared cache and shared variables, through an adaptive length."""
    subject = faults.right_subject()
    drafter = Adaptive(EarlyExit(toy.Softer(faults.VOCAB_SIZE), 3), start=2)
    subject = subject._replace(drafter=drafter)
    assert exact_law(subject, faults.PROMPTS, faults.SAMPLED, num_contexts=8).lossless
    found = loop_law(subject, faults.PROMPTS[:2], faults.SAMPLED, num_samples=4096)
    assert found.lossless
    assert found.draft_deviation < DRAFT_TOLERANCE


def test_contexts_without_a_law_are_no_objection():
    subject = faults.right_subject()
    counts = ModelDrafter(NgramCounts(faults.VOCAB_SIZE), 3)
    subject = subject._replace(drafter=counts)
    found = exact_law(subject, [[1, 2, 1, 2, 3, 1]], faults.SAMPLED)
    assert found.lossless and 0 < found.num_contexts < 5

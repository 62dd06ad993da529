"""Policy rows against transformers, against sorting, and against themselves."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.sampling import (
    History,
    Sampling,
    SamplingRows,
    filters,
    is_greedy,
    policy,
)

VOCAB, BATCH, DEPTH = 40, 4, 4
EOS = np.tile(np.array([[3, 17, -1]], np.int32), (BATCH, 1))
PROMPT = np.array([1, 3, 5, 8], np.int32)
LENGTH = np.array([6, 7, 9, 12], np.int32)
MINIMUM = np.array([0, 9, 11, 14], np.int32)
run = jax.jit(policy)

# Every setting at once, other values in each row, some of them neutral.
EVERYTHING = dict(
    temperature=[1.5, 1.0, 1.6, 0.0],
    top_k=[5, None, 9, 5],
    top_p=[0.8, 0.8, None, 0.5],
    min_p=[0.01, 0.15, 0.0, 0.2],
    typical_p=[0.9, None, 0.7, 0.5],
    repetition_penalty=[1.3, 1.0, 0.8, 1.5],
    presence_penalty=[0.0, 0.5, -0.3, 1.0],
    frequency_penalty=[0.2, 0.0, 0.4, 0.3],
    logit_bias=[{1: 2.0}, {2: -1.5, 5: 3.0}, {}, {0: 1.0}],
    banned_tokens=[[0], [], [7, 8], [39]],
    no_repeat_ngram_size=[2, 3, 0, 1],
)


def random_block(seed, rows=DEPTH + 1, vocab=VOCAB, words=6):
    """Logits, and a history of few distinct tokens so that n-grams do repeat."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, rows, vocab)).astype(np.float32) * 3
    tokens = rng.integers(0, words, (BATCH, 16)).astype(np.int32)
    drafts = rng.integers(0, words, (BATCH, rows - 1)).astype(np.int32)
    return jnp.asarray(logits), tokens, drafts


def chain(tokens, drafts):
    return History.chain(jnp.asarray(tokens), jnp.asarray(LENGTH), jnp.asarray(drafts))


def make_rows(options, batch=BATCH, vocab=VOCAB, **batch_arguments):
    arguments = dict(prompt_length=PROMPT, eos_token_ids=EOS) | batch_arguments
    return Sampling(**options).rows(batch, vocab, **arguments)


def one(options, row):
    """The options of one row of a batch, neutral ones included."""
    return {
        name: value[row] if isinstance(value, list) else value
        for name, value in options.items()
    }


# --- transformers as reference -------------------------------------------------------


def hugging_face(logits, ids, options, min_length=0):
    """One processed row, by the list that transformers itself builds, in its order."""
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin

    options = {
        name: value for name, value in options.items() if value not in (None, ())
    }
    config = GenerationConfig(
        do_sample=options.get("temperature", 0.0) > 0,
        top_k=options.get("top_k", 0),
        min_length=min_length,
        sequence_bias={(i,): b for i, b in (options.get("logit_bias") or {}).items()}
        or None,
        suppress_tokens=list(options.get("banned_tokens", ())) or None,
        **{
            name: options[name]
            for name in (
                "top_p",
                "min_p",
                "typical_p",
                "repetition_penalty",
                "no_repeat_ngram_size",
            )
            if name in options
        },
    )
    if config.do_sample:
        config.temperature = options["temperature"]
    config._eos_token_tensor = torch.tensor([i for i in EOS[0] if i >= 0])
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda processors, _: processors,
    )
    processors = GenerationMixin._get_logits_processor(
        model, config, len(ids), encoder_input_ids=torch.tensor([ids])
    )
    scores = processors(torch.tensor([ids]), torch.tensor(np.asarray(logits))[None])
    if not config.do_sample:
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, best, 0.0)[0].numpy()
    return torch.log_softmax(scores, -1)[0].numpy()


def assert_equals_hugging_face(options, seed, min_length=None, neutral=None):
    logits, tokens, drafts = random_block(seed)
    rows = make_rows(options, min_length=min_length)._replace(**neutral or {})
    ours = np.asarray(run(logits, rows, chain(tokens, drafts)))
    for b in range(BATCH):
        for s in range(DEPTH + 1):
            ids = [*tokens[b, : LENGTH[b]].tolist(), *drafts[b, :s].tolist()]
            least = 0 if min_length is None else int(min_length[b])
            theirs = hugging_face(logits[b, s], ids, one(options, b), least)
            np.testing.assert_array_equal(np.isneginf(ours[b, s]), np.isneginf(theirs))
            np.testing.assert_allclose(ours[b, s], theirs, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=[0.5, 1.0, 0.0, 2.0]),
        dict(temperature=1.0, top_k=[1, 3, 39, None]),
        dict(temperature=1.0, top_p=[0.1, 0.5, 0.95, None]),
        dict(temperature=1.0, min_p=[0.01, 0.2, 1.0, None]),
        dict(temperature=1.0, typical_p=[0.1, 0.5, 0.95, None]),
        dict(temperature=1.0, repetition_penalty=[0.5, 1.0, 1.2, 3.0]),
        dict(temperature=1.0, no_repeat_ngram_size=[1, 2, 3, 0]),
        dict(temperature=1.0, banned_tokens=[[1], [], [2, 3], [0, 39]]),
        dict(temperature=1.0, logit_bias=[{0: 5.0}, {}, {39: -2.0, 1: 1.0}, None]),
    ],
    ids=lambda options: list(options)[-1],
)
def test_one_setting_equals_transformers(options):
    assert_equals_hugging_face(options, seed=1)


def test_minimum_length_equals_transformers():
    options = dict(temperature=[1.0, 0.0, 1.0, 1.0])
    assert_equals_hugging_face(options, 2, MINIMUM)


def test_all_settings_together_equal_the_list_and_order_of_transformers():
    # The two that it lacks are present and neutral, in the program of all settings.
    lacking = ("presence_penalty", "frequency_penalty")
    options = {k: v for k, v in EVERYTHING.items() if k not in lacking}
    none = jnp.zeros(BATCH, jnp.float32)
    neutral = {k: none for k in lacking} | {"prompt_length": jnp.asarray(PROMPT)}
    for seed in range(3, 9):
        assert_equals_hugging_face(options, seed, MINIMUM, neutral)


def test_presence_and_frequency_count_generated_tokens_only():
    logits = jnp.zeros((1, 3, 4))
    history = History.chain(
        jnp.array([[1, 1, 2, 2, 9]]), jnp.array([4]), jnp.array([[3, 2]])
    )
    settings = Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    rows = settings.rows(1, 4, prompt_length=jnp.array([3]))
    law = run(logits, rows, history)
    # Slot 3 is generated (token 2), then come the drafts 3 and 2.
    loss = np.array([[0, 0, 0.75, 0], [0, 0, 0.75, 0.75], [0, 0, 1.0, 0.75]])
    expected = jax.nn.log_softmax(-loss, axis=-1)
    np.testing.assert_allclose(law[0], expected, atol=1e-6)


# --- sorting as reference ------------------------------------------------------------


def sorted_set(key, mass, limit):
    """The definition: highest keys first, lower index first, until the limit."""
    order = np.argsort(-key, kind="stable")
    reached = np.cumsum(mass[order])
    size = min(int(np.sum(reached < limit)) + 1, len(key))
    kept = np.zeros(len(key), bool)
    kept[order[:size]] = True
    slack = np.min(np.abs(reached - limit))
    return kept, slack


@pytest.fixture(scope="module")
def many_rows():
    """3,000 rows, a third of them full of exact ties, a third rounded as by bf16."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3000, 1, 33)).astype(np.float32) * 2
    logits[:1000] = np.round(logits[:1000])
    logits[1000:2000] = np.asarray(jnp.asarray(logits[1000:2000], jnp.bfloat16))
    return logits


def test_top_k_is_the_sorted_set_ties_included(many_rows):
    k = np.random.default_rng(0).integers(1, 36, len(many_rows)).astype(np.int32)
    kept = np.asarray(jax.jit(filters.top_k)(jnp.asarray(many_rows), jnp.asarray(k)))
    for row, size, ours in zip(many_rows[:, 0], k, kept[:, 0], strict=True):
        expected, _ = sorted_set(row, np.ones(len(row)), size)
        np.testing.assert_array_equal(ours, expected)
        assert ours.sum() == min(size, len(row))


def test_top_p_is_the_sorted_set_ties_included(many_rows):
    share = np.random.default_rng(1).uniform(0, 1, len(many_rows)).astype(np.float32)
    weight = np.exp(many_rows - many_rows.max(-1, keepdims=True))
    kept = jax.jit(filters.top_mass)(
        jnp.asarray(many_rows), jnp.asarray(weight), jnp.asarray(share)
    )
    assert_mass_sets(many_rows, weight, share, kept)


def test_typical_p_is_the_sorted_set_ties_included(many_rows):
    share = np.random.default_rng(2).uniform(0, 1, len(many_rows)).astype(np.float32)
    log_probs = jax.nn.log_softmax(jnp.asarray(many_rows), axis=-1)
    kept = jax.jit(filters.typical)(log_probs, jnp.asarray(share))
    log_probs = np.asarray(log_probs, np.float64)
    probs = np.exp(log_probs)
    entropy = -np.sum(probs * log_probs, -1, keepdims=True)
    # In float32 a pair on both sides of the entropy may tie or change places.
    distance = np.abs(-log_probs - entropy)
    gaps = np.diff(np.sort(distance, axis=-1), axis=-1)
    clear = np.all((gaps > 1e-5) | (gaps < 1e-12), axis=(1, 2))
    assert clear.sum() > 1500
    assert_mass_sets(-distance, probs, share, kept, clear)


def assert_mass_sets(key, weight, share, kept, clear=None):
    compared = 0
    for b, ours in enumerate(np.asarray(kept)[:, 0]):
        mass = weight[b, 0].astype(np.float64) / weight[b, 0].sum(dtype=np.float64)
        expected, slack = sorted_set(key[b, 0], mass, float(share[b]))
        if slack > 1e-6 and (clear is None or clear[b]):
            compared += 1
            np.testing.assert_array_equal(ours, expected)
    assert compared > len(key) * 0.5


def test_a_share_that_is_reached_exactly_needs_no_further_token():
    weight = jnp.full((1, 1, 8), 1.0)
    for share, size in [(0.125, 1), (0.5, 4), (0.5001, 5), (1.0, 8)]:
        kept = jax.jit(filters.top_mass)(weight, weight, jnp.array([share]))[0, 0]
        assert kept.tolist() == [True] * size + [False] * (8 - size)


def test_a_large_vocabulary_keeps_the_sorted_set():
    logits = np.random.default_rng(7).normal(size=(1, 5, 49152)).astype(np.float32) * 3
    rows = Sampling(temperature=1.0, top_k=2000, top_p=0.8).rows(1, 49152)
    history = History.chain(*(jnp.zeros(s, jnp.int32) for s in [(1, 4), 1, (1, 4)]))
    kept = np.isfinite(run(jnp.asarray(logits), rows, history))
    for row, ours in zip(logits[0], kept[0], strict=True):
        first, _ = sorted_set(row, np.ones(len(row)), 2000)
        mass = np.where(first, np.exp(row.astype(np.float64)), 0)
        expected, slack = sorted_set(row, mass / mass.sum(), float(np.float32(0.8)))
        assert slack < 1e-6 or np.array_equal(ours, expected)


# --- edges ---------------------------------------------------------------------------


def test_edges_of_the_truncations():
    logits, tokens, drafts = random_block(11)
    history = chain(tokens, drafts)
    best = np.asarray(logits).argmax(-1)
    plain = run(logits, make_rows(dict(temperature=1.0)), history)

    narrow = dict(temperature=1.0, top_p=[1e-9, None, None, None])
    law = np.asarray(run(logits, make_rows(narrow), history))
    assert np.array_equal(law[0].argmax(-1), best[0])
    assert np.array_equal(np.isfinite(law[0]).sum(-1), [1] * (DEPTH + 1))
    np.testing.assert_array_equal(law[1:], plain[1:])  # top_p = 1 keeps all, bitwise

    narrow = dict(temperature=1.0, top_k=[1, VOCAB, VOCAB + 9, None])
    law = np.asarray(run(logits, make_rows(narrow), history))
    assert np.array_equal(law[0].argmax(-1), best[0])
    np.testing.assert_array_equal(law[0].max(-1), 0.0)
    np.testing.assert_array_equal(law[1:], plain[1:])


def test_tied_logits_are_kept_by_index_and_a_negative_zero_is_a_zero():
    logits = jnp.array([[[-0.0, 1.0, 0.0, 1.0, -0.0]]])
    history = History.plain(jnp.array([[0]]), jnp.array([1]))
    for k, kept in [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])]:
        rows = Sampling(temperature=1.0, top_k=k).rows(1, 5)
        assert np.flatnonzero(np.isfinite(run(logits, rows, history))).tolist() == kept


def test_a_greedy_row_is_one_hot_at_the_lowest_index_of_a_tie():
    logits = jnp.array([[[1.0, 2.0, 2.0]], [[2.0, 2.0, 1.0]]], jnp.bfloat16)
    history = History.plain(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    law = run(logits, Sampling().rows(2, 3), history)
    assert law.dtype == jnp.float32
    inf = np.inf
    np.testing.assert_array_equal(law[:, 0], [[-inf, 0, -inf], [0, -inf, -inf]])


def test_penalties_and_bans_change_a_greedy_choice():
    logits = jnp.array([[[3.0, 2.0, 1.0, 0.5]]] * 4)
    history = History.plain(jnp.zeros((4, 1), jnp.int32), jnp.ones(4, jnp.int32))
    sampling = Sampling(
        repetition_penalty=[2.0, 1.0, 1.0, 1.0],
        banned_tokens=[[], [0, 1], [], []],
        logit_bias=[{}, {}, {3: 9.0}, {}],
    )
    rows = sampling.rows(
        4,
        4,
        eos_token_ids=np.array([[-1], [-1], [-1], [0]]),
        min_length=np.array([0, 0, 0, 2]),
        prompt_length=np.ones(4, int),
    )
    assert is_greedy(rows)
    assert run(logits, rows, history).argmax(-1)[:, 0].tolist() == [1, 2, 3, 1]


def test_a_typical_policy_may_drop_the_likeliest_token_but_greedy_does_not():
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]] * 2))
    history = History.plain(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    rows = Sampling(temperature=[1.0, 0.0], typical_p=0.3).rows(2, 4)
    law = np.isfinite(run(logits, rows, history))[:, 0]
    assert law.tolist() == [[False, True, False, False], [True, False, False, False]]


def test_low_precision_logits_give_float32_rows():
    logits, tokens, drafts = random_block(12)
    rows, history = make_rows(EVERYTHING, min_length=MINIMUM), chain(tokens, drafts)
    low = logits.astype(jnp.bfloat16)
    law = run(low, rows, history)
    assert law.dtype == jnp.float32
    np.testing.assert_array_equal(law, run(low.astype(jnp.float32), rows, history))


def test_rows_are_normalised_and_finite_at_the_extremes():
    logits, tokens, drafts = random_block(13)
    logits = logits * jnp.array([1e-30, 1.0, 100.0, 3e30])[:, None, None]
    options = dict(temperature=[1e-3, 1e-3, 1.0, 1e6], top_p=[0.9, 0.9, 0.5, 0.3])
    law = np.asarray(run(logits, make_rows(options), chain(tokens, drafts)))
    assert not np.isnan(law).any() and (law <= 1e-6).all()
    np.testing.assert_allclose(np.exp(law.astype(np.float64)).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_nan_throughout_and_its_neighbours_are_not(bad):
    logits, tokens, drafts = random_block(14)
    options = dict(temperature=[0.0, 1.0, 1.0, 0.0], top_k=5, top_p=0.9)
    broken = np.zeros((BATCH, DEPTH + 1), bool)
    broken[0, 1] = broken[1, 2] = True
    law = run(logits.at[0, 1, 7].set(bad).at[1, 2, 7].set(bad),
              make_rows(options), chain(tokens, drafts))  # fmt: skip
    np.testing.assert_array_equal(np.isnan(law).all(-1), broken)
    np.testing.assert_array_equal(np.isnan(law).any(-1), broken)


def test_a_row_with_every_token_forbidden_by_its_history_is_nan():
    logits = jnp.zeros((2, 1, 2))
    history = History.plain(jnp.array([[0, 1], [0, 0]]), jnp.array([2, 2]))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, no_repeat_ngram_size=1)
        law = run(logits, sampling.rows(2, 2), history)
        assert np.isnan(law).all(-1)[:, 0].tolist() == [True, False]


def test_ids_outside_the_vocabulary_are_ignored_in_the_history():
    logits = jnp.zeros((1, 2, 3))
    tokens, drafts = jnp.array([[-1, 7, 0]]), jnp.array([[9]])
    history = History.chain(tokens, jnp.array([3]), drafts)
    sampling = Sampling(temperature=1.0, frequency_penalty=5, no_repeat_ngram_size=1)
    law = run(logits, sampling.rows(1, 3, prompt_length=np.zeros(1, int)), history)
    half = np.log(np.float32(0.5))
    np.testing.assert_allclose(law[0], [[-np.inf, half, half]] * 2, rtol=1e-6)


# --- rows against rows ---------------------------------------------------------------


def test_each_row_of_a_mixed_batch_is_bitwise_the_row_alone():
    logits, tokens, drafts = random_block(21)
    history = chain(tokens, drafts)
    rows = make_rows(EVERYTHING, min_length=MINIMUM)
    together = run(logits, rows, history)
    for b in range(BATCH):
        same = jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], (logits, rows, history))
        np.testing.assert_array_equal(run(*same)[0], together[b])
        if b % 2 == 0:
            continue  # two programs show that absent is neutral
        alone = Sampling(**one(EVERYTHING, b)).rows(
            1,
            VOCAB,
            prompt_length=PROMPT[b : b + 1],
            eos_token_ids=EOS[b : b + 1],
            min_length=MINIMUM[b : b + 1],
        )
        np.testing.assert_array_equal(run(same[0], alone, same[2])[0], together[b])


def test_every_verified_row_is_bitwise_the_row_with_its_drafts_committed():
    logits, tokens, drafts = random_block(22)
    rows = make_rows(EVERYTHING, min_length=MINIMUM)
    block = run(logits, rows, chain(tokens, drafts))
    for s in range(DEPTH + 1):
        committed = tokens.copy()
        for b in range(BATCH):
            committed[b, LENGTH[b] : LENGTH[b] + s] = drafts[b, :s]
        history = History.plain(jnp.asarray(committed), jnp.asarray(LENGTH + s))
        row = run(logits[:, s : s + 1], rows, history)
        np.testing.assert_array_equal(row[:, 0], block[:, s])
    # Control: the mask of the first row is not the mask of the others.
    stale = chain(tokens, drafts)
    stale = stale._replace(tail_length=jnp.zeros_like(stale.tail_length))
    assert not np.array_equal(run(logits, rows, stale)[:, 1:], block[:, 1:])


def test_no_order_of_summation_shows():
    """XLA sums 1,000 floats in another order for one row than for five."""
    logits = jax.random.normal(jax.random.key(1), (3, 5, 1000)) * 3
    tokens, length = jnp.zeros((3, 8), jnp.int32), jnp.full(3, 4, jnp.int32)
    history = History.chain(tokens, length, jnp.zeros((3, 4), jnp.int32))
    rows = Sampling(temperature=0.8, top_p=0.9).rows(3, 1000)
    block = run(logits, rows, history)
    for s in range(5):
        row = run(logits[:, s : s + 1], rows, History.plain(tokens, length))
        np.testing.assert_array_equal(row[:, 0], block[:, s])
    expected = jax.nn.log_softmax(jnp.where(np.isfinite(block), logits / 0.8, -np.inf))
    np.testing.assert_allclose(block, expected, atol=2e-6)


def test_sums_are_exact_to_the_last_digit_of_a_large_vocabulary():
    rng = np.random.default_rng(3)
    for size, scale in [(1000, 1), (262144, 1), (262144, 30)]:
        values = np.exp(-scale * rng.exponential(size=(1, 1, size))).astype(np.float32)
        values[0, 0, 5] = 1.0
        total = filters.order_free_sum(jnp.asarray(values))[0, 0]
        np.testing.assert_allclose(total, values.sum(dtype=np.float64), rtol=3e-7)


def test_a_tree_row_sees_its_own_path_only():
    history = History(
        tokens=jnp.array([[4, 0]]),
        length=jnp.array([1]),
        tail=jnp.array([[[0, 0], [1, 0], [2, 0], [1, 3]]]),
        tail_length=jnp.array([[0, 1, 1, 2]]),
    )
    rows = Sampling(temperature=1.0, no_repeat_ngram_size=1).rows(1, 5)
    law = run(jnp.zeros((1, 4, 5)), rows, history)
    banned = [np.flatnonzero(np.isneginf(row)).tolist() for row in law[0]]
    assert banned == [[4], [1, 4], [2, 4], [1, 3, 4]]


def test_no_draft_of_a_block_repeats_the_one_before_it():
    """A processor that depends on the last token must move along the block."""
    tokens = jnp.array([[0, 1, 0, 2]])
    history = History.chain(tokens, jnp.array([4]), jnp.array([[0, 1]]))
    rows = Sampling(no_repeat_ngram_size=2, temperature=1.0).rows(1, 3)
    law = np.isneginf(run(jnp.zeros((1, 3, 3)), rows, history))[0]
    # After 2 nothing; after 2 0 the pairs 0 1 and 0 2; after 2 0 1 the pair 1 0.
    assert law.tolist() == [[False] * 3, [False, True, True], [True, False, False]]


# --- programs ------------------------------------------------------------------------


def test_settings_neutral_in_all_rows_are_absent():
    assert make_rows({}) == SamplingRows()
    neutral = dict(
        temperature=1.0, top_k=[None, VOCAB, 99, None], top_p=1.0, min_p=0.0,
        typical_p=1.0, banned_tokens=[[], [], [], []], logit_bias={3: 0.0},
    )  # fmt: skip
    rows = make_rows(neutral, min_length=PROMPT)
    assert [n for n, leaf in rows._asdict().items() if leaf is not None] == [
        "temperature"
    ]
    greedy = make_rows(dict(top_k=3, top_p=0.5, min_p=0.1, typical_p=0.2))
    assert is_greedy(greedy) and greedy == SamplingRows()
    half = make_rows(dict(temperature=[0.0, 1.0, 0.0, 1.0], top_p=[0.5, 1.0, 0.5, 1.0]))
    assert half.top_p is None and half.temperature is not None


def test_leaves_have_rows_first_fixed_dtypes_and_no_weak_types():
    rows = make_rows(EVERYTHING, min_length=MINIMUM)
    for name, leaf in rows._asdict().items():
        assert leaf.shape[0] == BATCH and not leaf.weak_type, name
        assert leaf.dtype in (jnp.int32, jnp.float32), name
    pointers = [leaf.unsafe_buffer_pointer() for leaf in rows]
    assert len(set(pointers)) == len(pointers)  # the state is donated


def test_twenty_values_compile_once():
    logits, tokens, drafts = random_block(31)
    history, compiled = chain(tokens, drafts), []

    def listen(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def settings(i):
        return make_rows(
            dict(temperature=0.5 + i / 20, top_k=i + 2, top_p=0.5 + i / 50,
                 repetition_penalty=1.1 + i, no_repeat_ngram_size=i + 1,
                 banned_tokens=[i])
        )  # fmt: skip

    once = jax.jit(lambda *arguments: policy(*arguments))
    once(logits, settings(0), history)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rows = [settings(i) for i in range(1, 21)]
        laws = [once(logits, r, history).block_until_ready() for r in rows]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [] and once._cache_size() == 1
    assert len({np.asarray(law).tobytes() for law in laws}) == 20


def test_no_program_sorts_and_a_greedy_one_has_no_exponential():
    logits, tokens, drafts = random_block(32)
    everything = make_rows(EVERYTHING, min_length=MINIMUM)
    text = str(jax.make_jaxpr(policy)(logits, everything, chain(tokens, drafts)))
    assert not re.search(r"\b(sort|top_k|approx_top_k)\b", text)
    assert re.search(r"\bexp\b", text)
    greedy = make_rows(EVERYTHING | dict(temperature=0.0), min_length=MINIMUM)
    text = str(jax.make_jaxpr(policy)(logits, greedy, chain(tokens, drafts)))
    assert not re.search(r"\b(exp|log)\b", text)


def test_rows_can_be_made_of_traced_lengths():
    @jax.jit
    def law(logits, tokens, prompt_length):
        sampling = Sampling(temperature=1.0, presence_penalty=1.0)
        rows = sampling.rows(
            1,
            3,
            prompt_length=prompt_length,
            eos_token_ids=jnp.array([[0]]),
            min_length=prompt_length + 2,
        )
        return policy(logits, rows, History.plain(tokens, prompt_length + 1))

    row = law(jnp.zeros((1, 1, 3)), jnp.array([[0, 1]]), jnp.array([1]))[0, 0]
    expected = jax.nn.log_softmax(jnp.array([-jnp.inf, -1.0, 0.0]))
    np.testing.assert_allclose(row, expected, atol=1e-6)


def test_float64_stays_float64_and_agrees_with_float32():
    logits, tokens, drafts = random_block(33)
    single = run(
        logits, make_rows(EVERYTHING, min_length=MINIMUM), chain(tokens, drafts)
    )
    with jax.enable_x64(True):
        rows = make_rows(EVERYTHING, min_length=MINIMUM)
        assert {leaf.dtype.name for leaf in rows} == {"int32", "float32"}
        wide = jnp.asarray(np.asarray(logits, np.float64))
        double = run(wide, rows, chain(tokens, drafts))
        assert double.dtype == jnp.float64
        total = np.exp(np.asarray(double)).sum(-1)
    np.testing.assert_allclose(total, 1, atol=1e-14)
    np.testing.assert_allclose(single, double, atol=2e-5)


# --- what a user writes --------------------------------------------------------------


def test_settings_hash_by_value_and_survive_replace():
    first = Sampling(temperature=[0.5, np.float32(1.0)], top_k=np.array([3, 4]))
    again = Sampling(temperature=(0.5, 1), top_k=[3, 4])
    assert first == again and hash(first) == hash(again)
    full = Sampling(
        logit_bias=[{1: 2}, None], banned_tokens=[[3], []], no_repeat_ngram_size=2
    )
    assert dataclasses.replace(full) == full and hash(full) is not None
    warmer = dataclasses.replace(full, temperature=1.0)
    assert warmer.banned_tokens == ((3,), ()) and warmer.logit_bias == ({1: 2.0}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.temperature = 1.0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=-1.0), "temperature is -1.0; it must be 0 for greedy"),
        (dict(temperature=1e-5), "temperature is 1e-05; it must be 0 for greedy"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(temperature="hot"), "temperature is 'hot'"),
        (dict(temperature=None), "temperature is None"),
        (dict(temperature=[0.5, True]), "temperature is True"),
        (dict(top_k=0), "top_k is 0; it must be a whole number, at least 1, or None"),
        (dict(top_k=2.5), "top_k is 2.5"),
        (dict(top_k=2**31), "top_k is 2147483648"),
        (dict(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1, or None"),
        (dict(top_p=1.1), "top_p is 1.1"),
        (dict(top_p=1e-50), "top_p is 1e-50"),
        (dict(min_p=-0.1), "min_p is -0.1; it must be between 0 and 1"),
        (dict(min_p=[0.1, 2.0]), "min_p is 2.0"),
        (dict(typical_p=0.0), "typical_p is 0.0"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0; it must be above 0"),
        (dict(presence_penalty=float("nan")), "presence_penalty is nan"),
        (dict(frequency_penalty=1e39), r"frequency_penalty is 1e\+39"),
        (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size is -1"),
        (dict(logit_bias={1: float("inf")}), "logit_bias of token 1 is inf"),
        (dict(logit_bias={"a": 1.0}), "logit_bias has the token 'a'"),
        (dict(logit_bias=3.0), "logit_bias is 3.0; it must map token ids"),
        (dict(banned_tokens=5), "banned_tokens is 5; it must be a sequence"),
        (dict(banned_tokens=[1.5]), "banned_tokens has the token 1.5"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_what_is_needed(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    "options, arguments, message",
    [
        (
            dict(temperature=[1.0] * 3),
            {},
            "temperature has 3 values, but the batch has 2",
        ),
        (dict(banned_tokens=[[1]]), {}, "banned_tokens has 1 values"),
        (dict(logit_bias=[{}] * 3), {}, "logit_bias has 3 values"),
        (dict(banned_tokens=[5]), {}, "token 5, but the ids of this model are 0 to 4"),
        (dict(logit_bias={-1: 1.0}), {}, "logit_bias has the token -1"),
        (dict(banned_tokens=range(5)), {}, "all 5 tokens of row 0 are forbidden"),
        (dict(banned_tokens=[[], [0, 1, 2, 3, 4]]), {}, "all 5 tokens of row 1 are"),
        (
            dict(banned_tokens=[1, 2, 3, 4]),
            dict(eos_token_ids=[[0], [-1]], min_length=[3, 3]),
            "all 5 tokens of row 0 are forbidden",
        ),
        (dict(presence_penalty=1.0), {}, "give prompt_length, one number a row"),
        (
            {},
            dict(prompt_length=[1]),
            r"prompt_length has shape \(1,\); it must be \[2\]",
        ),
        ({}, dict(eos_token_ids=[1, 2]), r"eos_token_ids has shape \(2,\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_batch_is_refused(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options).rows(2, 5, **arguments)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "topp",
            r"unknown sampling option 'topp' \(did you mean 'top_p'\?\); offered are",
        ),
        ("temprature", "did you mean 'temperature'"),
        ("qqqq", "unknown sampling option 'qqqq'; offered are temperature, top_k"),
        ("top_h", "'top_h' is not offered: use top_p"),
        ("epsilon_cutoff", "not offered"),
        ("eta_cutoff", "not offered"),
        ("num_beams", "not offered: beam search"),
        ("penalty_alpha", "not offered: contrastive search"),
    ],
)
def test_options_by_name_are_offered_or_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        Sampling.from_options({"temperature": 0.5, name: 1})
    assert Sampling.from_options({"temperature": 0.5, name: None}).temperature == 0.5

"""The loop on an exact table model: laws, identities, contracts and planted faults."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from throwaway import HiddenReader, Scheduled

from specdec_jax import decode, rng
from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.audit.statistics import goodness_of_fit, joint_counts
from specdec_jax.base import Params
from specdec_jax.drafters import (
    Adaptive,
    EarlyExit,
    ModelDrafter,
    Nested,
    NgramCounts,
    NgramDrafter,
    NoDrafter,
    Staged,
    Stop,
    TreeDrafter,
)
from specdec_jax.sampling import Sampling

VOCAB = 4
TARGET = toy.TableModel(VOCAB)
TABLE = toy.table(jax.random.key(1), VOCAB)
DRAFT_TABLE = toy.mix(TABLE, toy.table(jax.random.key(2), VOCAB), 0.7)
OTHER_TABLE = toy.mix(TABLE, toy.table(jax.random.key(3), VOCAB), 0.4)

PROMPTS = jnp.array(
    [[1, 2, 3, 1, 2], [3, 0, 0, 0, 0], [2, 2, 0, 0, 0], [0, 1, 2, 0, 0]]
)
LENGTHS = jnp.array([5, 1, 2, 3])


def model(num_draft_tokens, **options):
    return ModelDrafter(TARGET, num_draft_tokens, **options)


DRAFTERS = {
    "none": (NoDrafter(), None),
    "model-1": (model(1), DRAFT_TABLE),
    "model-3": (model(3), DRAFT_TABLE),
    "model-8": (model(8), DRAFT_TABLE),
    "ngram": (NgramDrafter(3), None),
    "scheduled": (Scheduled(model(4), (4, 0, 0, 4)), DRAFT_TABLE),
    "staged": (
        Staged((model(2), NgramDrafter(2), model(1))),
        (DRAFT_TABLE, None, OTHER_TABLE),
    ),
    "nested": (Nested(TARGET, model(1), 4), (DRAFT_TABLE, OTHER_TABLE)),
    "cascade": (
        Staged(
            (NgramDrafter(1), Nested(TARGET, Nested(TARGET, NgramDrafter(1), 2), 3))
        ),
        (None, (DRAFT_TABLE, (OTHER_TABLE, None))),
    ),
    "early exit": (EarlyExit(toy.Softer(VOCAB), 3, Stop(below=0.3)), None),
    "counts": (Adaptive(ModelDrafter(NgramCounts(VOCAB), 3), start=1), None),
    "hidden reader": (HiddenReader(TARGET), None),
    "tree": (TreeDrafter(TARGET, (-1, -1, 0, 0, 1)), DRAFT_TABLE),
}
CHAINS = [name for name in DRAFTERS if name != "tree"]


@partial(jax.jit, static_argnames=("drafter", "rule", "capacity", "target", "options"))
def _run(
    params, keys, prompts, lengths, budget, settings, *, drafter, rule, capacity,
    target=TARGET, options=(),
):  # fmt: skip
    state = decode.init(
        params, keys, prompts, lengths, target=target, drafter=drafter,
        max_new_tokens=budget, capacity=capacity,
        **{"sampling": settings, **dict(options)},
    )  # fmt: skip
    state = decode.prefill(params, state, target=target, drafter=drafter, chunk=4)
    return decode.run(params, state, target=target, drafter=drafter, rule=rule)


def run(
    drafter, draft_table=None, rule=Rejection(), *, temperature=1.0, prompts=PROMPTS,
    lengths=LENGTHS, keys=None, budget=12, target=TARGET, **options,
):  # fmt: skip
    """Runs the loop; a sequence of temperatures gives one a row."""
    batch = len(prompts)
    keys = rng.request_keys(jax.random.key(5), batch) if keys is None else keys
    budget = jnp.broadcast_to(jnp.int32(budget), (batch,))
    settings = None
    if temperature is not None:
        settings = Sampling(temperature=temperature).rows(batch, VOCAB)
    return _run(
        Params(TABLE, draft_table), keys, prompts, lengths, budget, settings,
        drafter=drafter, rule=rule, capacity=40, target=target,
        options=tuple(options.items()),
    )  # fmt: skip


def texts(state):
    return [
        np.asarray(tokens[start:stop]).tolist()
        for tokens, start, stop in zip(
            state.tokens, state.prompt_length, state.length, strict=True
        )
    ]


MIXED = (1.0, 0.9, 0.0, 0.9)
"""A greedy row beside sampled ones, in one program."""


@pytest.fixture(scope="module")
def plain():
    return texts(run(NoDrafter(), temperature=MIXED))


def check_counts(state):
    """The identities that hold for any run; returns nothing, or raises."""
    counts = jax.tree.map(np.asarray, state.counts)
    emitted = np.asarray(state.length - state.prompt_length)
    origin = np.asarray(state.origin)
    drafted_last = np.zeros(len(emitted), int)
    for row, (start, stop) in enumerate(
        zip(np.asarray(state.prompt_length), np.asarray(state.length), strict=True)
    ):
        span = origin[row, start:stop]
        assert (span > decode.PROMPT).all()
        assert (span == decode.ACCEPTED).sum() == counts.num_accepted[row]
        drafted_last[row] = span[-1] == decode.ACCEPTED if len(span) else 0
        tokens = np.asarray(state.tokens)[row, start:stop]
        ends = np.isin(tokens, np.asarray(state.eos_token_ids)[row])
        assert not ends[:-1].any(), "tokens after EOS"
    assert (np.asarray(state.length) <= np.asarray(state.limit)).all(), "budget"
    depth = counts.histogram.shape[1]
    np.testing.assert_array_equal(counts.histogram.sum(1), counts.rounds)
    np.testing.assert_array_equal(
        counts.histogram @ np.arange(depth), counts.num_accepted
    )
    np.testing.assert_array_equal(
        emitted, counts.num_accepted + counts.rounds - drafted_last
    )
    assert (counts.num_accepted <= counts.num_drafted).all()


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_text_is_plain_text(name, plain):
    drafter, table = DRAFTERS[name]
    state = run(drafter, table, Coupled(), temperature=MIXED)
    assert texts(state) == plain
    check_counts(state)


@pytest.mark.parametrize("name", CHAINS)
def test_rejection_rows_do_not_depend_on_their_batch(name, plain):
    drafter, table = DRAFTERS[name]
    keys = rng.request_keys(jax.random.key(5), 4)
    together = run(drafter, table, temperature=MIXED)
    check_counts(together)
    # The greedy row is plain decoding's, whatever the rule.
    assert texts(together)[2] == plain[2]
    # Other company, other slots, other budgets.
    order = jnp.array([2, 0, 1, 0])
    moved = run(
        drafter,
        table,
        temperature=tuple(MIXED[i] for i in order.tolist()),
        prompts=PROMPTS[order],
        lengths=LENGTHS[order],
        keys=keys[order],
        budget=jnp.array([3, 12, 12, 1]),
    )
    for slot, row in ((1, 0), (2, 1)):
        assert texts(moved)[slot] == texts(together)[row]
        np.testing.assert_array_equal(
            moved.counts.histogram[slot], together.counts.histogram[row]
        )


def test_a_row_alone_is_the_row_in_a_batch():
    together = run(*DRAFTERS["model-3"], temperature=MIXED)
    alone = run(
        *DRAFTERS["model-3"],
        temperature=MIXED[1:2],
        prompts=PROMPTS[1:2],
        lengths=LENGTHS[1:2],
        keys=rng.request_keys(jax.random.key(5), 4)[1:2],
    )
    assert texts(alone) == [texts(together)[1]]


def test_plain_text_is_one_text_under_every_rule(plain):
    assert texts(run(NoDrafter(), rule=Coupled(), temperature=MIXED)) == plain


def test_log_probs_are_those_of_the_emitted_tokens():
    state = run(model(3), DRAFT_TABLE, temperature=(0.5, 1.0, 1.0, 1.0))
    for row in (0, 1):
        tokens = np.asarray(state.tokens[row]).tolist()
        start, stop = int(state.prompt_length[row]), int(state.length[row])
        contexts = [tuple(tokens[:i]) for i in range(start, stop)]
        logits = toy.next_logits(TARGET, TABLE, contexts)
        emitted = np.arange(stop - start), tokens[start:stop]
        np.testing.assert_allclose(
            state.log_probs[row, start:stop],
            np.log(toy.softmax(logits)[emitted]),
            atol=1e-5,
        )
        temperature = (0.5, 1.0)[row]
        np.testing.assert_allclose(
            state.policy_log_probs[row, start:stop],
            np.log(toy.softmax(logits / temperature)[emitted]),
            atol=1e-5,
        )


def test_self_draft_is_accepted_whole():
    for drafter in (model(1), model(4), Scheduled(model(4), (4, 0, 0, 4))):
        state = run(drafter, TABLE, Rejection(), budget=20)
        np.testing.assert_array_equal(
            state.counts.num_accepted, state.counts.num_drafted
        )
        assert (state.counts.num_drafted > 0).all()
    whole = run(EarlyExit(TARGET, 3), budget=20).counts
    np.testing.assert_array_equal(whole.num_accepted, whole.num_drafted)
    both = run(Staged((model(2), model(1))), (TABLE, TABLE), budget=20)
    np.testing.assert_array_equal(both.counts.num_accepted, both.counts.num_drafted)


@dataclasses.dataclass(frozen=True)
class StaleDraftCache(ModelDrafter):
    """Rolls its cache back by one token too few."""

    def _catch_up(self, cache, context):
        return super()._catch_up(cache, context._replace(length=context.length + 1))


@dataclasses.dataclass(frozen=True)
class WrongPositions(ModelDrafter):
    """Its cache starts one slot late, so every position is off by one."""

    def _apply(self, params, tokens, cache):
        moved = cache.rewind(cache.length + 1)
        logits, cache = super()._apply(params, tokens, moved)
        return logits, cache.rewind(cache.length - 1)


def _hole():
    drafter = model(4)
    object.__setattr__(drafter, "window", 1)  # the constructor would refuse
    return drafter


@pytest.mark.parametrize(
    "drafter",
    [_hole(), StaleDraftCache(TARGET, 4), WrongPositions(TARGET, 4)],
    ids=["hole in the draft cache", "stale draft cache", "wrong draft positions"],
)
def test_self_draft_detects_an_efficiency_fault(drafter):
    state = run(drafter, TABLE, budget=20)
    assert (state.counts.num_accepted < state.counts.num_drafted).any()


ROWS = 200_000
STATISTICS_PROMPT = (2, 0, 1)


def emitted_by_many(drafter, table, rule=Rejection(), target=TARGET, length=4):
    prompts = jnp.broadcast_to(jnp.array(STATISTICS_PROMPT), (ROWS, 3))
    state = _run(
        Params(TABLE, table),
        rng.request_keys(jax.random.key(11), ROWS),
        prompts,
        jnp.full((ROWS,), 3),
        jnp.full((ROWS,), length),
        Sampling(temperature=1.0).rows(ROWS, VOCAB),
        drafter=drafter, rule=rule, capacity=16, target=target,
    )  # fmt: skip
    return state, np.asarray(state.tokens[:, 3 : 3 + length])


@pytest.fixture(scope="module")
def law():
    return toy.joint_law(TARGET, TABLE, STATISTICS_PROMPT, 4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    "name", ["model-2", "ngram", "staged", "nested", "early exit", "counts"]
)
def test_joint_law_over_a_round_boundary(name, rule, law):
    drafter, table = (model(2), DRAFT_TABLE)
    if name != "model-2":
        drafter, table = DRAFTERS[name]
    state, tokens = emitted_by_many(drafter, table, rule)
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) > 1e-6
    if name == "model-2" and isinstance(rule, Rejection):
        # The share of rounds that keep the first draft is sum min(p, q), exactly.
        target, draft = (
            toy.softmax(toy.next_logits(TARGET, variables, [STATISTICS_PROMPT])[0])
            for variables in (TABLE, DRAFT_TABLE)
        )
        alpha = np.minimum(target, draft).sum()
        kept = np.asarray(state.origin[:, 3] == decode.ACCEPTED).mean()
        assert abs(kept - alpha) < 5 * np.sqrt(alpha * (1 - alpha) / ROWS)


@dataclasses.dataclass(frozen=True)
class SeesStaleSlots(toy.TableModel):
    """Attends to two slots beyond what is committed and in the block."""

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        padded = jnp.pad(tokens, ((0, 0), (2, 0)), mode="edge")
        early = cache.rewind(jnp.maximum(cache.length - 2, 0))
        output, _ = super().apply(variables, padded, early)
        _, cache = super().apply(variables, tokens, cache)
        return output._replace(logits=output.logits[:, 2:]), cache


@dataclasses.dataclass(frozen=True)
class WrongRow(Rejection):
    """Judges each draft by the row after its own."""

    def __call__(self, noise, draft, target_log_probs):
        rolled = jnp.roll(target_log_probs, -1, axis=0)
        return super().__call__(noise, draft, rolled)


@pytest.mark.slow
def test_statistics_catch_noise_shared_by_draft_and_coin(law, monkeypatch):
    monkeypatch.setattr(rng, "DRAFT", rng.ACCEPT)
    jax.clear_caches()
    _, tokens = emitted_by_many(model(2), toy.table(jax.random.key(4), VOCAB))
    jax.clear_caches()
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, table, options",
    [
        (model(2), DRAFT_TABLE, {"target": SeesStaleSlots(VOCAB)}),
        (model(2), DRAFT_TABLE, {"rule": WrongRow()}),
    ],
    ids=["stale target cache", "wrong row"],
)
def test_statistics_catch_a_law_fault(drafter, table, options, law):
    _, tokens = emitted_by_many(drafter, table, **options)
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) < 1e-6


def test_hidden_states_reach_the_drafter():
    state = run(HiddenReader(TARGET), None, temperature=0.0, budget=1)
    step = jax.jit(
        partial(
            decode.step, target=TARGET, drafter=HiddenReader(TARGET), rule=Rejection()
        )
    )
    for _ in range(6):
        state = state._replace(
            limit=state.limit + 4, finish=jnp.zeros_like(state.finish)
        )
        last = state.tokens[jnp.arange(4), state.length - 1]
        state, info = step(Params(TABLE), state)
        np.testing.assert_array_equal(info.draft.tokens[:, 0], last)


@pytest.mark.parametrize("name", ["model-3", "tree", "none"])
def test_eos_ends_a_row_and_is_its_last_token(name):
    drafter, table = DRAFTERS[name]
    free = texts(run(drafter, table, Coupled(), temperature=MIXED))
    state = run(
        drafter, table, Coupled(), temperature=MIXED, eos_token_ids=(3, 9)
    )  # fmt: skip
    for row, whole in enumerate(free):
        cut = whole[: whole.index(3) + 1] if 3 in whole else whole
        assert texts(state)[row] == cut
        finish = decode.EOS if 3 in whole else decode.LENGTH
        assert state.finish[row] == finish
    check_counts(state)


def test_length_is_geometric_when_eos_is_common():
    """P(EOS) = .25 in each row: nothing may follow EOS, nothing may replace it."""
    uniform = {"params": {"table": jnp.zeros_like(TABLE["params"]["table"])}}
    rows = 20_000
    state = _run(
        Params(uniform, DRAFT_TABLE),
        rng.request_keys(jax.random.key(2), rows),
        jnp.ones((rows, 2), jnp.int32),
        jnp.full((rows,), 2),
        jnp.full((rows,), 8),
        Sampling(temperature=1.0).rows(rows, VOCAB),
        drafter=model(3), rule=Rejection(), capacity=16,
        options=(("eos_token_ids", (0,)),),
    )  # fmt: skip
    check_counts(jax.tree.map(lambda leaf: leaf[:200], state))
    lengths = np.asarray(state.length) - 2
    geometric = 0.25 * 0.75 ** np.arange(8)
    geometric[-1] = 0.75**7
    assert goodness_of_fit(np.bincount(lengths, minlength=9)[1:], geometric) > 1e-6


def test_min_new_tokens_masks_eos_inside_a_block():
    state = run(
        model(3),
        DRAFT_TABLE,
        temperature=None,
        budget=9,
        sampling=Sampling(temperature=1.0),
        eos_token_ids=(0, 1, 2),
        min_new_tokens=5,
    )
    for text in texts(state):
        assert text[:5] == [3] * 5
        assert len(text) >= 6


def test_budgets_are_per_row_and_exact():
    state = run(model(8), DRAFT_TABLE, budget=jnp.array([1, 2, 7, 12]))
    assert [len(text) for text in texts(state)] == [1, 2, 7, 12]
    check_counts(state)


def start(drafter, rule, table, **options):
    params = Params(TABLE, table)
    state = decode.init(
        params, jax.random.key(5), PROMPTS, LENGTHS, target=TARGET, drafter=drafter,
        max_new_tokens=12, sampling=Sampling(temperature=1.0), **options,
    )  # fmt: skip
    kwargs = {"target": TARGET, "drafter": drafter}
    state = jax.jit(partial(decode.prefill, **kwargs))(params, state)
    return params, state, jax.jit(partial(decode.run, rule=rule, **kwargs))


def test_pieces_of_a_run_make_the_same_run():
    params, state, advance = start(model(3), Rejection(), DRAFT_TABLE)
    whole = advance(params, state, num_rounds=jnp.int32(99))
    for size in (1, 2):
        pieces = state
        while not pieces.done.all():
            pieces = advance(params, pieces, num_rounds=jnp.int32(size))
        assert texts(pieces) == texts(whole)
        np.testing.assert_array_equal(pieces.counts.histogram, whole.counts.histogram)


def test_rows_can_be_taken_inserted_and_frozen():
    params, state, advance = start(model(3), Rejection(), DRAFT_TABLE)
    whole = advance(params, state)
    halfway = advance(params, state, num_rounds=jnp.int32(2))
    # Row 1 starts anew in the slot of row 3 of another batch; nobody notices.
    moved = decode.insert(halfway, jnp.array([3]), decode.take(state, jnp.array([1])))
    moved = decode.freeze(moved, jnp.array([True, False, False, False]))
    after = advance(params, moved)
    expected = texts(whole)
    assert texts(after)[1:] == [expected[1], expected[2], expected[1]]
    assert texts(after)[0] == texts(halfway)[0]
    assert after.finish[0] == decode.STOP
    structure = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert structure == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after)
    for leaf in jax.tree.leaves(after):
        assert leaf.shape[0] == 4 and not getattr(leaf, "weak_type", False)


def test_a_row_with_unusable_logits_ends_and_the_others_go_on():
    broken = TABLE["params"]["table"].at[2, :, :].set(jnp.nan)
    reference = run(NoDrafter(), temperature=0.0)
    params = Params({"params": {"table": broken}}, DRAFT_TABLE)
    for drafter in (NoDrafter(), model(3)):
        state = decode.generate(
            params, jax.random.key(5), PROMPTS, LENGTHS, target=TARGET,
            drafter=drafter, rule=Rejection(), max_new_tokens=12,
        )  # fmt: skip
        for row, text in enumerate(texts(reference)):
            seen = [int(PROMPTS[row, LENGTHS[row] - 1]), *text]
            if 2 in seen:
                assert texts(state)[row] == text[: seen.index(2)]
                assert state.finish[row] == decode.ERROR
            else:
                assert texts(state)[row] == text
        assert (state.finish == decode.ERROR).any()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda result, n, finish: (n + 1, finish),
        lambda result, n, finish: (result.verdict.num_accepted + 1, finish * 0),
        lambda result, n, finish: (n - (n > 1).astype(n.dtype), finish),
    ],
    ids=["budget overrun", "tokens after EOS kept", "emitted and counted differ"],
)
def test_identities_catch_a_bookkeeping_fault(break_it, monkeypatch):
    right = decode._cut

    def wrong(state, result):
        n, finish = break_it(result, *right(state, result))
        return jnp.where(state.done, 0, n), jnp.where(state.done, state.finish, finish)

    params, state, _ = start(model(3), Rejection(), DRAFT_TABLE, eos_token_ids=(3,))
    monkeypatch.setattr(decode, "_cut", wrong)
    step = jax.jit(
        partial(decode.step, target=TARGET, drafter=model(3), rule=Rejection())
    )
    with pytest.raises(AssertionError):  # noqa: PT012
        for _ in range(14):
            state, info = step(params, state)
            kept = jnp.minimum(info.verdict.num_accepted, info.num_emitted)
            check_counts(state)
            last = info.num_emitted - 1
            assert ((info.num_emitted == 0) | (kept <= last) | state.done).all(), (
                "a round that does not end its row ends with the next token"
            )


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one length a row"):
        decode.init(
            Params(TABLE), jax.random.key(0), PROMPTS, jnp.array([1]), target=TARGET,
            drafter=NoDrafter(), max_new_tokens=4,
        )  # fmt: skip
    with pytest.raises(ValueError, match="capacity 3 is below"):
        decode.init(
            Params(TABLE), jax.random.key(0), PROMPTS, LENGTHS, target=TARGET,
            drafter=NoDrafter(), max_new_tokens=4, capacity=3,
        )  # fmt: skip
    with pytest.raises(ValueError, match="threefry"):
        rng.request_keys(jax.random.key(0, impl="rbg"), 2)
    for wrong in (ModelDrafter, NgramDrafter):
        with pytest.raises(ValueError, match="at least 1"):
            wrong(*([TARGET] if wrong is ModelDrafter else []), num_draft_tokens=0)

"""The trace against laws worked out in numpy, and the page that is made of it."""

import re
from functools import partial
from html import unescape

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_text import scripted
from tiny import save_checkpoint

from specdec_jax import SpeculativeDecoder, decode, trace
from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.base import Params
from specdec_jax.drafters import ModelDrafter, NgramDrafter, TreeDrafter
from specdec_jax.sampling import Sampling
from specdec_jax.text.page import page

VOCAB, NEW = 4, 12
TARGET = toy.TableModel(VOCAB)
TABLE = toy.table(jax.random.key(1), VOCAB)
DRAFT_TABLE = toy.mix(TABLE, toy.table(jax.random.key(2), VOCAB), 0.7)
PROMPTS = jnp.array([[1, 2, 3, 1, 2], [3, 0, 0, 0, 0], [2, 2, 0, 0, 0]])
LENGTHS = jnp.array([5, 1, 2])
TEMPERATURE = 0.8

CASES = {
    "model": (ModelDrafter(TARGET, 3), Rejection()),
    "tree": (TreeDrafter(TARGET, (-1, -1, 0, 0, 1), "ranked"), Coupled()),
}


@pytest.fixture(scope="module", params=CASES)
def traced(request):
    """A traced run: (name, final state, trace of numpy arrays)."""
    drafter, rule = CASES[request.param]
    parts = {"target": TARGET, "drafter": drafter}
    params = Params(TABLE, DRAFT_TABLE)
    state = decode.init(
        params,
        jax.random.key(5),
        PROMPTS,
        LENGTHS,
        max_new_tokens=NEW,
        sampling=Sampling(temperature=TEMPERATURE),
        **parts,
    )
    state = jax.jit(partial(decode.prefill, **parts))(params, state)
    plain = jax.jit(partial(decode.run, rule=rule, **parts))(params, state)
    final, rounds = jax.jit(partial(trace.run, rule=rule, num_rounds=NEW, **parts))(
        params, state
    )
    different = jax.tree.map(lambda a, b: bool((a != b).any()), plain, final)
    assert not any(jax.tree.leaves(different._replace(key=False)))
    return request.param, final, jax.tree.map(np.asarray, rounds)


def rounds_of(final, rounds):
    """Yields (row, its tokens, one round) for each round that emitted something."""
    for row in range(len(LENGTHS)):
        for number in np.flatnonzero(rounds.num_emitted[row]):
            own = jax.tree.map(lambda leaf, r=row, n=number: leaf[r, n], rounds)
            yield row, np.asarray(final.tokens[row]).tolist(), own


def path_to(parents, node):
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def law(table, context):
    logits = toy.next_logits(TARGET, table, [tuple(context)])[0]
    return toy.softmax(logits / TEMPERATURE)


def entropy(probs):
    return -(probs * np.log(probs)).sum()


def test_every_round_is_what_the_tables_say(traced):
    name, final, rounds = traced
    emitted = np.zeros(len(LENGTHS), int)
    judged_nodes = 0
    for row, tokens, own in rounds_of(final, rounds):
        start, before = own.start, tokens[: own.start]
        parents = own.parents.tolist()
        assert start == LENGTHS[row] + emitted[row]
        emitted[row] += own.num_emitted
        kept = own.tokens[own.accepted].tolist()
        said = [*kept, own.next_token][: own.num_emitted]
        assert said == tokens[start : start + own.num_emitted]
        assert own.accepted.sum() == own.num_accepted
        for node in np.flatnonzero(own.judged):
            judged_nodes += 1
            path = path_to(parents, parents[node])
            context = before + own.tokens[path].tolist()
            p, token = law(TABLE, context), own.tokens[node]
            q = law(DRAFT_TABLE, context) if name == "model" else np.eye(VOCAB)[token]
            np.testing.assert_allclose(
                own.target_log_prob[node], np.log(p[token]), atol=1e-5
            )
            np.testing.assert_allclose(
                own.draft_log_prob[node], np.log(q[token]), atol=1e-5
            )
            residual = np.maximum(p - q, 0).sum()
            np.testing.assert_allclose(own.residual_mass[node], residual, atol=1e-5)
            spread = entropy(q) if name == "model" else 0.0
            np.testing.assert_allclose(own.draft_entropy[node], spread, atol=1e-5)
        p = law(TABLE, before + kept)
        np.testing.assert_allclose(
            own.next_log_prob, np.log(p[own.next_token]), atol=1e-5
        )
        place = own.num_accepted
        np.testing.assert_allclose(own.target_entropy[place], entropy(p), atol=1e-5)
    assert (emitted == NEW).all()
    assert judged_nodes > 20
    done = rounds.num_emitted == 0
    assert done.any()  # rows end in different rounds


def test_judged_are_the_accepted_and_what_was_refused_after_them(traced):
    name, final, rounds = traced
    for _, _, own in rounds_of(final, rounds):
        valid = np.arange(len(own.tokens)) < own.num_valid
        if name == "tree":  # both roots, unless the first was taken
            assert own.judged[0] == valid[0]
            assert own.judged[1] == (valid[1] and not own.accepted[0])
        else:
            expected = np.arange(len(own.tokens)) <= own.num_accepted
            assert (own.judged == (expected & valid)).all()
        assert (own.accepted <= own.judged).all()
        assert (np.isnan(own.target_log_prob) == ~own.judged).all()


def test_a_blank_trace_has_rows_and_rounds_first():
    rounds = trace.blank(1, 2, NgramDrafter(3))
    assert [leaf.shape[:2] for leaf in rounds] == [(1, 2)] * len(rounds)
    assert rounds.target_entropy.shape == (1, 2, 4)
    assert rounds.tokens.shape == (1, 2, 3)


# Text

PROMPT = [20, 21, 22]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("trace") / "target")
    return SpeculativeDecoder.from_pretrained(
        folder, folder, draft_num_layers=1, num_draft_tokens=3
    )


@pytest.fixture(scope="module")
def results(decoder):
    return decoder.generate(
        ["the <cat> sat & the", "on the"],
        max_new_tokens=[90, 9],
        sampling=Sampling(temperature=[1.0, 0.0]),
        trace=True,
    )


def test_results_are_the_same_with_a_trace(decoder, results):
    plain = decoder.generate(
        ["the <cat> sat & the", "on the"],
        max_new_tokens=[90, 9],
        sampling=Sampling(temperature=[1.0, 0.0]),
    )
    assert plain == results
    assert [one.trace for one in plain] == [None, None]
    for result in results:
        rounds = result.trace
        assert len(rounds.start) == result.rounds
        assert rounds.num_emitted.sum() == result.num_tokens
        assert rounds.num_valid.sum() == result.num_drafted
        assert rounds.accepted.sum() >= result.num_accepted


@pytest.mark.parametrize("looks", [1, 5])
def test_the_trace_does_not_depend_on_how_often_the_host_looks(decoder, results, looks):
    plan = decoder.plan(
        ["the <cat> sat & the", "on the"],
        max_new_tokens=[90, 9],
        sampling=Sampling(temperature=[1.0, 0.0]),
    )
    for piece in decoder.run(plan, rounds_per_look=looks, trace=True):
        if piece.result is not None:
            expected = results[piece.index].trace
            same = jax.tree.map(
                partial(np.array_equal, equal_nan=True),
                expected._replace(judged=0, accepted=0),
                piece.result.trace._replace(judged=0, accepted=0),
            )
            assert all(same)
            assert (expected.judged == piece.result.trace.judged).all()


def test_compile_makes_the_traced_program(decoder, results):
    from specdec_jax.text import running

    plan = decoder.plan(["the dog"], max_new_tokens=5)
    decoder.compile(plan, trace=True)
    before = running._advance._cache_size()
    list(decoder.run(plan, rounds_per_look=None, trace=True))
    assert running._advance._cache_size() - before <= 1


def visible(text):
    """What a page shows of its texts, with rejected drafts hidden."""
    body = re.findall(r'<div class="text">(.*?)</div>', text, re.DOTALL)
    shown = []
    for part in body:
        part = re.sub(r'<span class="tip">.*?</span>', "", part, flags=re.DOTALL)
        part = re.sub(r'<span class="r[^"]*" tabindex="0">[^<]*</span>', "", part)
        part = part.replace('<span class="mark">⏎</span>', "")
        shown.append(unescape(re.sub(r"<[^>]*>", "", part)))
    return shown


def test_the_page_shows_the_text_and_each_decision(decoder, results):
    text = page(results, decoder.tokenizer, title="a <b>", settings={"rule": "x & y"})
    assert visible(text) == [one.prompt + one.text for one in results]
    assert "a &lt;b&gt;" in text
    assert "x &amp; y" in text
    assert "<script" not in text
    assert "http" not in text
    for name in ("accepted", "corrected", "bonus"):
        number = sum(one.origins.count(name) for one in results)
        assert len(re.findall(f'class="t {name}[^"]*" tabindex', text)) == number
    rejected = sum(int((r.trace.judged & ~r.trace.accepted).sum()) for r in results)
    assert len(re.findall('class="r[^"]*" tabindex', text)) == rejected > 5
    first = results[0].trace
    assert f"<dt>p(token)</dt><dd>{np.exp(first.target_log_prob[0, 0]):.4f}" in text


def test_a_stop_string_and_an_eos_end_the_page_too():
    tokens = scripted([]).tokenizer(" the cat sat on the mat").input_ids
    result = scripted(tokens).generate(
        [PROMPT], stop=" sat", max_new_tokens=20, trace=True
    )[0]
    assert result.finish_reason == "stop"
    shown = visible(page([result], scripted([]).tokenizer))[0]
    assert shown.endswith(" the cat sat")
    assert len(result.trace.start) == result.rounds

    ended = scripted([*tokens, 1]).generate([PROMPT], max_new_tokens=20, trace=True)[0]
    assert ended.finish_reason == "eos"
    assert visible(page([ended], scripted([]).tokenizer))[0].endswith("mat</s>")


def test_a_result_without_a_trace_is_refused(decoder):
    result = decoder.generate("the", max_new_tokens=2)
    with pytest.raises(ValueError, match="trace=True"):
        page(result, decoder.tokenizer)

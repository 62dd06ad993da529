"""Composed drafts: what is told of each token, in which order, and who sees what."""

import itertools
import json
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode as loop
import toy
from test_decode import DRAFT_TABLE, LENGTHS, OTHER_TABLE, PROMPTS, TABLE, TARGET, VOCAB
from tiny import save_checkpoint

from specdec_jax import decode, rng
from specdec_jax.acceptance import Coupled, Rejection
from specdec_jax.audit import exact_law, faults, loop_law
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE
from specdec_jax.audit.planted.parts import StagedNearSighted
from specdec_jax.base import Draft, Params
from specdec_jax.cli import main
from specdec_jax.drafters import ModelDrafter, Nested, NgramDrafter, NoDrafter, Staged
from specdec_jax.drafters.children import with_num_draft_tokens, with_window
from specdec_jax.sampling import Sampling
from specdec_jax.text import SpeculativeDecoder

# What must be told of a token of an inner round: enumeration, through the rule's law.

LENGTH = 4
"""Tokens that an outer round emits at the most: inner K 2, a bonus of each level."""


class Tables(NamedTuple):
    """Random laws after every prefix: of the target, the middle and the inner model."""

    target: dict
    middle: dict
    inner: dict

    @classmethod
    def draw(cls, seed):
        random = np.random.default_rng(seed)
        prefixes = [
            p for n in range(LENGTH) for p in itertools.product(range(4), repeat=n)
        ]
        return cls(
            *({p: random.dirichlet(np.ones(4)) for p in prefixes} for _ in range(3))
        )


def laws_of(drafts, log_probs, targets):
    """Returns the rule's law of many rounds at once."""
    count = jnp.int32(drafts.shape[1])

    def one(tokens, told, rows):
        return Rejection().law(Draft(tokens, count, told), rows)

    found = jax.jit(jax.vmap(one))(jnp.asarray(drafts, jnp.int32), log_probs, targets)
    return [np.asarray(part) for part in found]


def log_rows(table, texts):
    return np.log([[table[text[:n]] for n in range(len(text) + 1)] for text in texts])


def inner_rounds(tables):
    """Returns {(tokens, number accepted): probability} of what an inner round makes."""
    drafts = list(itertools.product(range(4), repeat=2))
    rows = log_rows(tables.inner, drafts)[:, :2]
    stop, after = laws_of(np.array(drafts), rows, log_rows(tables.middle, drafts))
    made = {}
    for draft, row, stops, nexts in zip(drafts, rows, stop, after, strict=True):
        drawn = np.exp(row[0, draft[0]] + row[1, draft[1]])
        for n, token in itertools.product(range(3), range(4)):
            key = (*draft[:n], token), n
            made[key] = made.get(key, 0) + drawn * stops[n] * nexts[n, token]
    return made


def told_law(tables, way, text, accepted, place):
    """Returns what the outer rule is told of one token of an inner round."""
    middle, inner = tables.middle[text[:place]], tables.inner[text[:place]]
    kept, left = np.minimum(middle, inner), np.maximum(middle - inner, 0)
    bonus = accepted == 2 and place == 2
    if way == "middle" or bonus:
        return middle
    if place < accepted:
        return {"finer": kept / kept.sum(), "inner": inner}.get(way, middle)
    return middle if way == "inner" else left / left.sum()


def outer_round(tables, way):
    """Returns the joint law of the next tokens, and the chance to keep n drafts."""
    law, kept = np.zeros((4,) * LENGTH), np.zeros(LENGTH)
    made = inner_rounds(tables)
    for size in (1, 2, 3):
        chosen = [key for key in made if len(key[0]) == size]
        texts = [text for text, _ in chosen]
        told = np.log(
            [
                [told_law(tables, way, text, n, place) for place in range(size)]
                for text, n in chosen
            ]
        )
        stop, after = laws_of(np.array(texts), told, log_rows(tables.target, texts))
        for key, stops, nexts in zip(chosen, stop, after, strict=True):
            for n, token in itertools.product(range(size + 1), range(4)):
                mass = made[key] * stops[n] * nexts[n, token]
                emitted = (*key[0][:n], token)
                law[emitted] += mass * continued(tables.target, emitted)
                kept[n] += mass
    return law, kept[::-1].cumsum()[::-1]


def continued(table, text):
    """Returns the joint law of what follows a text, up to LENGTH tokens in all."""
    law = np.ones(())
    for size in range(LENGTH - len(text)):
        tails = itertools.product(range(4), repeat=size)
        rows = np.array([table[(*text, *tail)] for tail in tails])
        law = law[..., None] * rows.reshape(law.shape + (4,))
    return law


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("seed", [0, 1])
def test_only_the_middle_models_own_law_is_right_for_all_tokens(seed):
    """The table of ALGORITHMS B.5 on tables of our own; the law must hold exactly."""
    tables = Tables.draw(seed)
    right = continued(tables.target, ())
    with jax.enable_x64(True):
        found = {
            w: outer_round(tables, w) for w in ("middle", "finer", "left", "inner")
        }
    apart = {way: np.abs(law - right).sum() / 2 for way, (law, _) in found.items()}
    assert apart["middle"] < 1e-14 and apart["finer"] < 1e-14
    assert apart["left"] > 0.01 and apart["inner"] > 0.01
    # A finer description of the same token is right, and it is accepted less often.
    assert found["finer"][1][1] < found["middle"][1][1]


# The order of stages.


def expected_tokens(draft_tables, prompt):
    """Returns 1 + sum over prefixes of prod min(p, q_i): what one round emits."""
    reached, texts, expected = np.ones(1), [tuple(prompt)], 1.0
    for table in draft_tables:
        target, draft = (
            toy.softmax(toy.next_logits(TARGET, one, texts)) for one in (TABLE, table)
        )
        reached = (reached[:, None] * np.minimum(target, draft)).ravel()
        texts = [(*text, token) for text in texts for token in range(VOCAB)]
        expected += reached.sum()
    return expected


def test_the_strongest_stage_goes_first():
    # By rates alone (ALGORITHMS A.5): every product of the first rates is largest.
    strong, weak = [0.8, 0.8, 0.6, 0.6], [0.6, 0.6, 0.8, 0.8]
    assert 1 + np.cumprod(strong).sum() == pytest.approx(3.0544)
    assert 1 + np.cumprod(weak).sum() == pytest.approx(2.4784)
    # By the exact laws of tables, at the same number of steps of each model.
    gains = []
    for seed in range(3, 9):
        poor = toy.table(jax.random.key(seed), VOCAB)
        good, bad = toy.mix(TABLE, poor, 0.8), toy.mix(TABLE, poor, 0.4)
        for prompt in ((1, 2), (3,), (0, 1, 3)):
            first = expected_tokens([good, good, bad, bad], prompt)
            last = expected_tokens([bad, bad, good, good], prompt)
            gains.append(first - last)
    assert min(gains) > 0


def test_a_round_of_the_loop_emits_what_the_laws_of_its_stages_say():
    drafter, rows, prompt = Staged((loop.model(2), loop.model(2))), 40_000, (2, 0, 1)
    parts = {"target": TARGET, "drafter": drafter}

    @jax.jit
    def first_round(params, keys):
        prompts = jnp.broadcast_to(jnp.array(prompt), (rows, len(prompt)))
        state = decode.init(
            params, keys, prompts, jnp.full((rows,), len(prompt)), max_new_tokens=12,
            sampling=Sampling(temperature=1.0).rows(rows, VOCAB), **parts,
        )  # fmt: skip
        state = decode.prefill(params, state, chunk=4, **parts)
        state, _ = decode.step(params, state, rule=Rejection(), **parts)
        return state.counts.num_accepted

    keys, means = rng.request_keys(jax.random.key(3), rows), []
    for tables in ((DRAFT_TABLE, OTHER_TABLE), (OTHER_TABLE, DRAFT_TABLE)):
        accepted = np.asarray(first_round(Params(TABLE, tables), keys))
        expected = expected_tokens(np.repeat(tables, 2), prompt) - 1
        assert abs(accepted.mean() - expected) < 5 * accepted.std() / np.sqrt(rows)
        means.append(accepted.mean())
    assert means[0] > means[1]


# What children see.


@dataclass(frozen=True)
class Witness:
    """A stage that drafts n-grams and keeps what it is told in `update`."""

    inner: NgramDrafter
    siblings: ClassVar[str] = "none"
    hidden_layers: ClassVar[tuple[int, ...]] = ()

    @property
    def num_nodes(self):
        return self.inner.num_nodes

    depth = num_nodes

    def init(self, params, batch_size, capacity, inputs=None):
        zero = jnp.zeros((batch_size,), jnp.int32)
        block = jnp.zeros((batch_size, self.num_nodes), jnp.int32)
        logits = jnp.zeros((batch_size, self.num_nodes + 1, VOCAB), jnp.float32)
        return zero, zero + 0, zero + 0, zero + 0, block, logits

    def prefill(self, params, state, tokens, start, num_valid, target_output):
        return state

    def draft(self, state, context):
        draft, _, cache = self.inner.draft((), context)
        return draft, state, cache

    def update(self, params, state, context, draft, target_output, verdict):
        return (
            context.length,
            draft.num_valid,
            verdict.num_accepted,
            verdict.next_token,
            draft.tokens,
            target_output.logits,
        )


def test_every_stage_is_told_the_truth_about_its_own_tokens():
    drafter = Staged((Witness(NgramDrafter(2)), Witness(NgramDrafter(1, max_ngram=1))))
    parts = {"target": TARGET, "drafter": drafter}
    state = decode.init(
        Params(TABLE), jax.random.key(1), PROMPTS, LENGTHS, max_new_tokens=30,
        sampling=Sampling(temperature=(0.0, 0.0, 0.5, 0.5)).rows(4, VOCAB), **parts,
    )  # fmt: skip
    state = jax.jit(lambda s: decode.prefill(Params(TABLE), s, **parts))(state)
    step = jax.jit(lambda s: decode.step(Params(TABLE), s, rule=Rejection(), **parts))
    seen = set()
    for _ in range(8):
        before = np.asarray(state.length)
        state, info = step(state)
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        accepted = np.asarray(info.verdict.num_accepted)
        for row in np.flatnonzero(length < np.asarray(state.limit)):
            begun = before[row]
            for stage in state.drafter_state.stages:
                start, valid, kept, then, drafted, logits = (
                    np.asarray(leaf)[row] for leaf in stage
                )
                text = tokens[row, : length[row]]
                assert start == begun and 0 <= kept <= valid
                assert text[start : start + kept].tolist() == drafted[:kept].tolist()
                assert text[start + kept] == then
                own = toy.next_logits(TARGET, TABLE, [tuple(text[: start + kept])])
                np.testing.assert_allclose(logits[kept], own[0], atol=1e-5)
                seen.add((int(valid), int(kept)))
                begun += kept
            assert begun == before[row] + accepted[row]
    # Among them: nothing drafted, rejected, and all accepted with another stage behind.
    assert {(0, 0), (1, 0), (1, 1), (2, 2)} <= seen


def test_with_two_tokens_of_window_a_stage_drafts_from_a_cache_with_holes():
    """The self-draft of `test_decode`, which is accepted whole as it should be."""
    drafter = StagedNearSighted((loop.model(2), loop.model(1)))
    counts = loop.run(drafter, (TABLE, TABLE), budget=20).counts
    assert (counts.num_accepted < counts.num_drafted).any()


class NearSighted(Nested):
    """Leaves the inner drafter the window of the loop's own drafter, 2 tokens."""

    def _parts(self, params):
        return self.middle, self.inner, Params(*params.draft)


def test_with_two_tokens_of_window_a_rows_text_depends_on_its_company():
    """Other rows keep inner rounds going, which happen to fill holes; or do not."""
    drafter, tables = NearSighted(TARGET, loop.model(2), 3), (DRAFT_TABLE, OTHER_TABLE)
    keys = rng.request_keys(jax.random.key(5), 4)

    def texts(order):
        rows = jnp.array(order)
        return loop.texts(
            loop.run(
                drafter, tables, temperature=tuple(loop.MIXED[i] for i in order),
                prompts=PROMPTS[rows], lengths=LENGTHS[rows], keys=keys[rows],
                budget=24,
            )
        )  # fmt: skip

    together = texts(range(4))
    among_equals = [texts([row] * 4)[0] for row in range(4)]
    assert among_equals != together


def test_windows_reach_every_cache_inside():
    drafter = Staged((Nested(TARGET, loop.model(1), 2), NgramDrafter(2)))
    wide = with_window(drafter, 9)
    assert wide.stages[0].window == wide.stages[0].inner.window == 9
    assert wide.stages[1] == NgramDrafter(2)
    assert with_window(loop.model(2, window=5), 3) == loop.model(2, window=5)
    shorter = with_num_draft_tokens(drafter, 3)
    assert [stage.num_nodes for stage in shorter.stages] == [2, 1]
    assert with_num_draft_tokens(drafter, 1).stages[0].inner.num_nodes == 1


def test_a_nested_draft_of_the_targets_own_is_accepted_whole():
    drafter = Nested(TARGET, NgramDrafter(2), 4)
    state = loop.run(drafter, (TABLE, None), budget=20)
    np.testing.assert_array_equal(state.counts.num_accepted, state.counts.num_drafted)
    assert (np.asarray(state.counts.histogram)[:, 4] > 0).all()


def test_models_inside_may_have_other_vocabularies():
    inner = ModelDrafter(toy.TableModel(6), 1, VOCAB)
    drafter = Nested(toy.TableModel(3), inner, 2, VOCAB)
    tables = tuple(toy.table(jax.random.key(7), size) for size in (3, 6))
    plain, found = (
        loop.texts(loop.run(*one, Coupled(), temperature=loop.MIXED))
        for one in ((NoDrafter(), None), (drafter, tables))
    )
    assert found == plain


# The audit.


def test_no_level_objects_to_a_right_composition():
    right = faults.right_subject()
    nested = Nested(right.target, NgramDrafter(1), 2)
    params = Params(right.params.target, ((right.params.draft, None), None))
    subject = right._replace(drafter=Staged((nested, NgramDrafter(1))), params=params)
    assert exact_law(subject, faults.PROMPTS, faults.SAMPLED, num_contexts=4).lossless
    found = loop_law(subject, faults.PROMPTS[:2], faults.SAMPLED, num_samples=4096)
    assert found.lossless and found.draft_deviation < DRAFT_TOLERANCE


# What cannot be.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Staged(()), "stages is empty"),
        (lambda: Staged((loop.DRAFTERS["tree"][0],)), "drafts trees"),
        (lambda: Nested(TARGET, loop.DRAFTERS["hidden reader"][0], 2), "hidden states"),
        (lambda: Nested(TARGET, loop.DRAFTERS["tree"][0], 9), "drafts trees"),
        (lambda: Nested(TARGET, NgramDrafter(3), 2), "at least the inner drafter's 3"),
        (lambda: Nested(TARGET, NoDrafter(), 0), "at least 1"),
        (lambda: with_num_draft_tokens(NoDrafter(), 2), "no num_draft_tokens"),
    ],
)
def test_compositions_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Names and the command line.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "target"))


def test_names_become_compositions(folder):
    make = SpeculativeDecoder.from_pretrained
    cut = f"{folder}:layers=1"
    staged = make(folder, [cut, "ngram"], compose="staged", num_draft_tokens=5).engine
    assert [stage.num_nodes for stage in staged.drafter.stages] == [3, 2]
    assert staged.drafter.stages[0].model.config.num_layers == 1
    assert staged.params.draft[1] is None
    nested = make(folder, (cut, folder, "ngram"), compose="nested").engine
    lengths = [nested.drafter, nested.drafter.inner, nested.drafter.inner.inner]
    assert [one.num_draft_tokens for one in lengths] == [4, 3, 2]
    variables = nested.params.draft
    assert len(variables) == 2 and variables[1] == (nested.params.target, None)
    split = make(folder, [cut, "ngram"], compose="nested", num_draft_tokens=(3, 1))
    assert split.drafter.inner == NgramDrafter(1)
    assert make(folder, ["ngram"]).drafter == NgramDrafter(4)
    assert make(folder, ["ngram"], num_draft_tokens=[2]).drafter == NgramDrafter(2)
    both = {"compose": "staged", "num_draft_tokens": 0}
    assert make(folder, ["ngram", cut], **both).drafter == NoDrafter()
    for drafts, message in (
        (["ngram", cut], "number 1 is NgramDrafter"),
        ([cut, "early_exit"], "for the target alone"),
        ([f"{cut},below=0.3", "ngram"], "cannot stop early"),
    ):
        with pytest.raises(ValueError, match=message):
            make(folder, drafts, compose="nested")


def test_a_composition_on_a_mesh_gives_plain_text(folder):
    make = SpeculativeDecoder.from_pretrained
    both = {"compose": "nested", "num_draft_tokens": 2, "mesh": "data=2,model=2"}
    found = [
        decoder.generate(
            [[5, 6, 7, 5, 6], [9, 8]],
            max_new_tokens=10,
            sampling=Sampling(temperature=[0.0, 0.9]),
        )
        for decoder in (
            make(folder),
            make(folder, [f"{folder}:layers=1", "ngram"], rule="coupled", **both),
        )
    ]
    plain, composed = ([result.token_ids for result in one] for one in found)
    assert composed == plain


def test_the_bundled_pair_with_ngrams_gives_plain_greedy_text(capsys):
    def ask(*arguments):
        code = main(["generate", "--json", "--max-new-tokens", "40", *arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        document: Any = json.loads(out)
        return document["requests"][0], document["config"]

    plain, _ = ask("--draft", "none")
    both = ("--draft", "pystd-draft", "--draft", "ngram", "--num-draft-tokens", "3,2")
    for compose in ("staged", "nested"):
        found, config = ask(*both, "--compose", compose)
        assert found["token_ids"] == plain["token_ids"]
        assert found["rounds"] < 0.6 * plain["rounds"]
        assert config["draft"] == ["pystd-draft", "ngram"]
        assert (config["compose"], config["num_draft_tokens"]) == (compose, [3, 2])

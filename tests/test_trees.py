"""Token trees: shapes, what is drawn, exactness on ragged batches, planted faults."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode
import toy
from test_decode import DRAFT_TABLE, OTHER_TABLE, TABLE, TARGET, VOCAB, check_counts

from specdec_jax import SpeculativeDecoder, decode, rng, verify
from specdec_jax.acceptance import Coupled, MultiDraft, Rejection
from specdec_jax.audit import faults
from specdec_jax.audit.loop_law import DRAFT_TOLERANCE, loop_law
from specdec_jax.audit.planted.tree_parts import (
    CommittedAlong,
    PositionIsSlot,
    SeesSiblings,
    Uncommitted,
    WithCache,
)
from specdec_jax.audit.statistics import goodness_of_fit, joint_counts
from specdec_jax.base import Draft, Params, RoundContext
from specdec_jax.cli import main
from specdec_jax.drafters import (
    DynamicTreeDrafter,
    JoinedTrees,
    NoDrafter,
    TreeDrafter,
    branching_parents,
)
from specdec_jax.drafters.siblings import KINDS, choose, lively
from specdec_jax.sampling import Sampling
from specdec_jax.text.page import page
from specdec_jax.text.pairing import find_rule
from specdec_jax.tree_choice import (
    best_tree,
    choose_tree,
    node_acceptance,
    rank_acceptance,
)

PROMPTS = jnp.array(
    [
        [1, 2, 3, 1, 2],
        [3, 0, 0, 0, 0],
        [2, 2, 0, 0, 0],
        [0, 1, 2, 0, 0],
        [3, 3, 1, 0, 0],
    ]
)
LENGTHS = jnp.array([5, 1, 2, 3, 3])
MIXED = (1.0, 0.9, 0.0, 0.5, 0.0)
BUDGET = jnp.array([12, 12, 11, 7, 12])

WIDE, ODD, FORK = branching_parents((3, 2, 1)), (-1, -1, 0, 0, 2), (-1, -1, 0, 1)


def tree(parents=WIDE, siblings="distinct", model=TARGET):
    return TreeDrafter(model, parents, siblings)


TREES = {
    "distinct": (tree(), DRAFT_TABLE),
    "ranked": (tree(ODD, "ranked"), DRAFT_TABLE),
    "dynamic": (DynamicTreeDrafter(TARGET, 9, 3, 3), DRAFT_TABLE),
    "joined": (
        JoinedTrees((tree((-1, 0, 1), "independent"), tree(ODD, "independent"))),
        (DRAFT_TABLE, OTHER_TABLE),
    ),
    "merged": (
        JoinedTrees((tree((-1, 0, 1)), tree(FORK)), merge=True),
        (DRAFT_TABLE, OTHER_TABLE),
    ),
}


def run(drafter, table, rule=Coupled(), *, temperature=MIXED, **options):
    options = {"prompts": PROMPTS, "lengths": LENGTHS, "budget": BUDGET} | options
    return test_decode.run(drafter, table, rule, temperature=temperature, **options)


@pytest.fixture(scope="module")
def plain():
    return test_decode.texts(run(NoDrafter(), None))


@pytest.mark.parametrize("name", TREES)
def test_coupled_text_is_plain_text(name, plain):
    drafter, table = TREES[name]
    state = run(drafter, table)
    assert test_decode.texts(state) == plain
    check_counts(state)
    # Rows took paths of different lengths, so nothing hangs on them being alike.
    assert (np.asarray(state.counts.histogram).sum(0) > 0).sum() >= 3
    # Other temperatures, prompts and budgets are the same program.
    before = test_decode._run._cache_size()
    run(
        drafter, table, temperature=MIXED[::-1], prompts=PROMPTS[::-1],
        lengths=LENGTHS[::-1], budget=BUDGET + 2,
    )  # fmt: skip
    assert test_decode._run._cache_size() == before


JUDGED = {
    "distinct": MultiDraft("distinct"),
    "joined": MultiDraft("independent"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_recursive_rejection_of_a_row_does_not_depend_on_its_batch(name, plain):
    drafter, table = TREES[name]
    together = run(drafter, table, JUDGED[name])
    check_counts(together)
    texts = test_decode.texts(together)
    assert [texts[row] for row in (2, 4)] == [plain[row] for row in (2, 4)]
    # Greedy rows keep as much as under the coupled rule: both look for the argmax.
    coupled = run(drafter, table)
    for row in (2, 4):
        np.testing.assert_array_equal(
            together.counts.histogram[row], coupled.counts.histogram[row]
        )
    order = jnp.array([4, 0, 3, 1, 0])
    keys = rng.request_keys(jax.random.key(5), 5)
    moved = run(
        drafter, table, JUDGED[name], keys=keys[order], prompts=PROMPTS[order],
        lengths=LENGTHS[order], temperature=[MIXED[i] for i in order.tolist()],
        budget=jnp.array([3, 12, 7, 12, 1]),
    )  # fmt: skip
    for slot, row in ((1, 0), (2, 3), (3, 1)):
        assert test_decode.texts(moved)[slot] == texts[row]


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_joint_law_over_a_round_boundary(name):
    law = toy.joint_law(TARGET, TABLE, test_decode.STATISTICS_PROMPT, 4)
    drafter = tree(ODD) if name == "distinct" else TREES[name][0]
    _, tokens = test_decode.emitted_by_many(drafter, TREES[name][1], JUDGED[name])
    assert goodness_of_fit(joint_counts(tokens, VOCAB), law) > 1e-6


def test_the_audit_lets_a_right_tree_pass():
    right = faults.right_subject(on_trees=True)
    found = loop_law(right, faults.PROMPTS[:1], faults.SAMPLED, num_samples=1024)
    assert found.lossless
    assert found.draft_deviation < DRAFT_TOLERANCE


# Faults of the target's side: the text is another one.


@pytest.mark.parametrize(
    "target",
    [
        SeesSiblings(VOCAB),
        PositionIsSlot(VOCAB),
        WithCache(VOCAB, Uncommitted),
        WithCache(VOCAB, CommittedAlong),
    ],
    ids=["siblings seen", "position is slot", "uncommitted", "committed along"],
)
def test_the_text_shows_a_fault_in_the_target(target, plain):
    assert test_decode.texts(run(*TREES["distinct"], target=target)) != plain


# What is drawn, and what is said of it.


def told_laws(drafter, tables):
    """Returns how far the told laws are from the models' own on the nodes' paths.

    Over three rounds, so that caches have seen accepted paths.
    """
    params, parts = Params(TABLE, tables), {"target": TARGET, "drafter": drafter}
    state = decode.init(
        params, jax.random.key(3), PROMPTS, LENGTHS, max_new_tokens=12,
        sampling=Sampling(temperature=list(MIXED)), **parts,
    )  # fmt: skip

    @jax.jit
    def rounds(params, state):
        state = decode.prefill(params, state, **parts)

        def advance(state, _):
            after, info = decode.step(params, state, rule=Coupled(), **parts)
            return after, (state.tokens, state.length, info.draft)

        return jax.lax.scan(advance, state, length=3)[1]

    tokens, lengths, drafts = jax.tree.map(np.asarray, rounds(params, state))
    worst = 0.0
    for r, row in itertools.product(range(3), np.flatnonzero(MIXED)):
        text, draft = tokens[r, row, : lengths[r, row]], drafts.parents[r, row]
        paths = []
        for node, parent in enumerate(draft):
            above = paths[parent] if parent >= 0 else tuple(text)
            paths.append((*above, drafts.tokens[r, row, node]))
            told = np.exp(drafts.log_probs[r, row, node])
            own = []
            for one in tables if isinstance(tables, tuple) else (tables,):
                logits = toy.next_logits(TARGET, one, [above])[0]
                own.append(np.abs(toy.softmax(logits / MIXED[row]) - told).max())
            worst = max(worst, min(own))
    return worst


@dataclasses.dataclass(frozen=True)
class ShortWindow(TreeDrafter):
    """Re-reads two tokens, as a chain may, and trusts scattered slots for the rest."""

    @property
    def reader(self):
        return dataclasses.replace(super().reader, window=2)


@pytest.mark.parametrize(
    "name, drafter, right",
    [
        ("joined", None, True),
        ("distinct", None, True),
        ("distinct", tree(model=SeesSiblings(VOCAB)), False),
        ("distinct", tree(model=PositionIsSlot(VOCAB)), False),
        ("distinct", ShortWindow(TARGET, WIDE), False),
    ],
    ids=["joined", "distinct", "siblings seen", "position is slot", "path not read"],
)
def test_each_node_is_told_the_law_of_its_model_on_its_path(name, drafter, right):
    deviation = told_laws(drafter or TREES[name][0], TREES[name][1])
    assert (deviation < 1e-5) == right


def draft_once(drafter, variables, temperature=MIXED, kind=rng.RoundNoise, rows=1):
    """Returns the first draft of each row of a fresh batch, many keys a row."""
    batch = len(PROMPTS) * rows
    prompts, lengths = jnp.repeat(PROMPTS, rows, 0), jnp.repeat(LENGTHS, rows)

    @jax.jit
    def first(variables):
        params = Params(TABLE, variables)
        settings = Sampling(temperature=list(np.repeat(temperature, rows)))
        state = decode.init(
            params, jax.random.key(3), prompts, lengths, target=TARGET,
            drafter=drafter, max_new_tokens=12, sampling=settings,
        )  # fmt: skip
        state = decode.prefill(params, state, target=TARGET, drafter=drafter)
        noise = rng.RoundNoise.at(state.key, state.length, rng.DRAFT)
        if kind is rng.PositionNoise:
            noise = rng.PositionNoise(state.key, state.length)
        return drafter.draft(
            state.drafter_state,
            RoundContext(
                params, state.tokens, state.length,
                jnp.full((batch,), drafter.depth), state.sampling, noise, state.cache,
            ),
        )[0]  # fmt: skip

    return jax.tree.map(np.asarray, first(variables))


def families(draft):
    """Yields each node's valid children, row by row."""
    for row in range(len(draft.tokens)):
        parents = draft.parents[row, : draft.num_valid[row]]
        for node in range(-1, len(parents)):
            yield row, node, np.flatnonzero(parents == node)


def test_distinct_siblings_differ_and_follow_the_law_they_tell():
    rows = 4000
    draft = draft_once(tree((-1, -1, -1, 0)), DRAFT_TABLE, rows=rows)
    for row, _, children in families(draft):
        tokens = draft.tokens[row, children]
        if draft.log_probs is not None and row < 2 * rows:
            assert len(set(tokens)) == len(tokens)
    law = np.exp(draft.log_probs[0, 0])
    np.testing.assert_array_equal(draft.log_probs[0, 1], draft.log_probs[0, 0])
    first, second = draft.tokens[:rows, 0], draft.tokens[:rows, 1]
    for a, b in itertools.permutations(range(VOCAB), 2):
        chance = law[a] * law[b] / (1 - law[a])
        seen = ((first == a) & (second == b)).mean()
        assert abs(seen - chance) < 5 * np.sqrt(chance / rows) + 1e-4


def test_independent_siblings_are_drawn_anew():
    rows = 4000
    draft = draft_once(tree((-1, -1), "independent"), DRAFT_TABLE, rows=rows)
    law = np.exp(draft.log_probs[0, 0])
    first, second = draft.tokens[:rows, 0], draft.tokens[:rows, 1]
    for a, b in itertools.product(range(VOCAB), repeat=2):
        chance = law[a] * law[b]
        seen = ((first == a) & (second == b)).mean()
        assert abs(seen - chance) < 5 * np.sqrt(chance / rows) + 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rows_take_the_likeliest_each_for_certain(kind):
    law = jnp.log(jnp.array([[[0.2, 0.5, 0.3]]] * 2))
    noise = rng.RoundNoise(jax.random.split(jax.random.key(0), 2))
    greedy = jnp.array([True, False])
    chosen = choose(law, greedy, noise, 0, kind=kind, count=3)
    assert chosen[0, 0].tolist() == [1, 2, 0]
    rows, _ = lively(Sampling(temperature=[0.0, 1.0]).rows(2, 3), 2)
    assert rows.temperature.tolist() == [1.0, 1.0]


def test_noise_by_position_makes_the_first_child_the_coupled_draft():
    options = {"kind": rng.PositionNoise, "rows": 50}
    chain = draft_once(test_decode.model(2), DRAFT_TABLE, **options)
    draft = draft_once(tree((-1, -1, 0), "independent"), DRAFT_TABLE, **options)
    np.testing.assert_array_equal(draft.tokens[:, [0, 2]], chain.tokens)
    # Independent siblings are not all the coupled one.
    assert (draft.tokens[:100, 0] != draft.tokens[:100, 1]).any()


def test_a_dynamic_tree_is_closed_and_holds_the_most_valuable_nodes():
    drafter = DynamicTreeDrafter(TARGET, 7, 3, 2)
    whole = DynamicTreeDrafter(TARGET, 10, 3, 2)
    some, every = (draft_once(d, DRAFT_TABLE) for d in (drafter, whole))

    def valued(draft, row):
        """Returns the probability of each path of a row's tree, by its tokens."""
        start = list(np.asarray(PROMPTS[row, : LENGTHS[row]]))
        paths, found = [], {}
        for node, parent in enumerate(draft.parents[row]):
            assert -1 <= parent < node
            above = paths[parent] if parent >= 0 else ()
            paths.append((*above, int(draft.tokens[row, node])))
            value = 1.0
            for i, token in enumerate(paths[-1]):
                context = [tuple(start) + paths[-1][:i]]
                logits = toy.next_logits(TARGET, DRAFT_TABLE, context)
                temperature = MIXED[row] or 1.0
                value *= toy.softmax(logits[0] / temperature)[token]
            found[paths[-1]] = value
        assert len(found) == len(paths)
        assert [len(path) for path in paths] == sorted(map(len, paths))
        return found

    for row in range(len(PROMPTS)):
        kept, seen = valued(some, row), valued(every, row)
        best = sorted(seen.values(), reverse=True)[:7]
        np.testing.assert_allclose(sorted(kept.values(), reverse=True), best, rtol=1e-5)


def test_a_tree_is_cut_by_depth_and_padding_does_not_count():
    parents = jnp.array([[-1, 0, 1, -1, -1], [-1, -1, 0, 0, 3]])
    draft = Draft(jnp.zeros((2, 5), jnp.int32), jnp.array([3, 5]), parents=parents)
    shape = verify._Tree.of(draft, 3)
    for most, left in ((0, [0, 0]), (1, [1, 2]), (2, [2, 4]), (3, [3, 5])):
        cut = verify._clip(draft, shape, jnp.array([most, most]))
        assert cut.num_valid.tolist() == left


def test_ancestry_of_odd_trees():
    parents = np.array([[-1, -1, 0, 2, 3], [-1, 0, 0, -1, 3]])
    ancestors, depth = verify.ancestry(jnp.asarray(parents))
    for row, node in itertools.product(range(2), range(5)):
        expected, at = {0}, node
        while at >= 0:
            expected.add(at + 1)
            at = parents[row, at]
        assert set(np.flatnonzero(ancestors[row, node + 1])) == expected
        assert depth[row, node + 1] == len(expected) - 1


def test_rejection_refuses_a_tree():
    with pytest.raises(ValueError, match="use the coupled rule"):
        run(*TREES["distinct"], rule=Rejection())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: branching_parents(()), "whole numbers"),
        (lambda: branching_parents((2, 0)), "whole numbers"),
        (lambda: branching_parents((32, 32)), "1056 nodes; at most 1024"),
        (lambda: tree((0,)), "node 0 has parent 0"),
        (lambda: tree((-1, 0, -1)), "breadth first"),
        (lambda: tree(()), "1 to 1024"),
        (lambda: tree(FORK, "sorted"), "offered are independent"),
        (lambda: DynamicTreeDrafter(TARGET, 40, 3, 2), "trees of 3 to 10"),
        (lambda: DynamicTreeDrafter(TARGET, 4, 0, 2), "at least 1"),
        (lambda: JoinedTrees((tree(),)), "independent siblings"),
        (lambda: JoinedTrees(()), "0 trees"),
    ],
)
def test_what_is_no_tree_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# By name.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rule": "rejection", "branching": (3, 2)}, "does not judge trees; use multi"),
        ({"rule": "block", "branching": (3, 2)}, "does not judge trees"),
        ({"branching": (2, 0)}, r"branching is \(2, 0\)"),
        ({"branching": (-1, 1)}, "node 1 has parent 1"),
        ({"branching": (-1, 0, -1)}, "give the nodes breadth first"),
        ({"branching": (1024, 1)}, "2048 nodes; at most 1024"),
        ({"branching": (2,), "draft": "ngram"}, "draft is 'ngram', and trees"),
        ({"branching": (2,), "draft": None}, "draft is 'none', and trees"),
        ({"compose": "tree"}, "takes at least 2"),
        ({"compose": "tree", "draft": ["pystd-draft", "ngram"]}, "draft is 'ngram'"),
        (
            {"compose": "staged", "draft": ["a", "b"], "branching": (2, 1)},
            "use compose tree",
        ),
        (
            {"compose": "tree", "draft": ["a", "b"], "rule": "rejection"},
            "trees of several drafts",
        ),
    ],
)
def test_a_tree_that_cannot_be_is_refused_before_loading(options, message):
    options = {"draft": "pystd-draft"} | options
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder.from_pretrained("no-such-checkpoint", **options)


def test_the_command_line_refuses_what_makes_no_tree(capsys):
    for words in (
        ["--branching", "3,x"],
        ["--branching", "40,40"],
        ["--branching", "2,1", "--draft", "ngram"],
        ["--branching", "2,1", "--rule", "rejection"],
    ):
        for command in ("generate", "bench", "audit"):
            assert main([command, *words]) == 2
            assert "specdec: error: " in capsys.readouterr().err


def test_the_rule_follows_the_siblings():
    kinds = {"none": Rejection(), "ranked": Coupled()}
    for drafter, _ in [*TREES.values(), (test_decode.model(2), None)]:
        expected = kinds.get(drafter.siblings) or MultiDraft(drafter.siblings)
        assert find_rule(None, drafter) == expected
    with pytest.raises(ValueError, match="ranked.*use coupled"):
        find_rule("multi_draft", TREES["ranked"][0])


def test_a_draft_that_does_not_fit_its_buffer_is_refused():
    with pytest.raises(ValueError, match="capacity 20 leaves no room"):
        decode.init(
            Params(TABLE, DRAFT_TABLE), jax.random.key(0), PROMPTS, LENGTHS,
            target=TARGET, drafter=tree(), max_new_tokens=4, capacity=20,
        )  # fmt: skip


def test_the_bundled_pair_says_with_a_tree_what_it_says_without():
    prompts = ["def read_lines(path):\n", "import os\n\n", "class Stack:\n"]
    decoder = SpeculativeDecoder.from_pretrained(
        "pystd-5m", "pystd-draft", branching=(-1, -1, -1, 0, 0, 1)
    )
    found = decoder.generate(prompts, max_new_tokens=[24, 9, 16], trace=True)
    # One forward over each text: every token is the likeliest after those before it.
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in found]
    tokens = jnp.array([text + [0] * (48 - len(text)) for text in texts])
    target, variables = decoder.engine.target, decoder.engine.params.target
    output, _ = jax.jit(target.apply)(variables, tokens, target.init_cache(3, 48))
    best = np.asarray(output.logits.argmax(-1))
    for row, one in enumerate(found):
        start = len(one.prompt_token_ids)
        said = best[row, start - 1 : start - 1 + one.num_tokens]
        assert one.token_ids == said.tolist()
    # Most rounds keep a path to the tree's end.
    assert sum(r.num_tokens for r in found) > 2 * sum(r.rounds for r in found)
    text = page(found, decoder.tokenizer)
    accepted = sum(one.origins.count("accepted") for one in found)
    assert text.count('class="t accepted') == accepted + 1  # and the legend


# Which tree to draft.


def all_trees(size, depth, ranks):
    """Yields every tree of `size` nodes, breadth first, up to a depth and width."""

    def grow(parents, depths):
        if len(parents) == size:
            yield tuple(parents)
            return
        for node in range(-1, len(parents)):
            deep = depths[node] + 1 if node >= 0 else 1
            if parents and (node < parents[-1] or deep < depths[-1]):
                continue
            if deep <= depth and parents.count(node) < ranks:
                yield from grow([*parents, node], [*depths, deep])

    yield from grow([], [])


@pytest.mark.parametrize(
    "acceptance",
    [
        np.array([0.5, 0.3, 0.1]),
        np.array([0.2, 0.5, 0.1]),  # the second sibling is the better one
        np.array([[0.3, 0.2, 0.1], [0.8, 0.1, 0.0], [0.5, 0.5, 0.0]]),
    ],
)
def test_the_best_tree_is_the_best_of_all(acceptance):
    for depth, size in ((1, 3), (2, 5), (3, 6)):
        best, expected = best_tree(acceptance, size, depth)
        found = max(
            1 + node_acceptance(parents, acceptance).sum()
            for number in range(1, size + 1)
            for parents in all_trees(number, depth, 3)
        )
        np.testing.assert_allclose(expected, found)
        np.testing.assert_allclose(
            1 + node_acceptance(best, acceptance).sum(), expected
        )
        tree(best)  # breadth first
        # With a cost, the fastest of all sizes and depths.
        verify_factor = 1 + 0.04 * np.arange(size + 1) ** 1.5
        choice = choose_tree(acceptance, 8.0, verify_factor, depth)
        fastest = max(
            (1 + node_acceptance(parents, acceptance).sum())
            / (verify_factor[number] + levels / 8)
            for levels in range(1, depth + 1)
            for number in range(1, size + 1)
            for parents in all_trees(number, levels, 3)
        )
        np.testing.assert_allclose(choice.speedup, max(fastest, 1.0))


def test_a_tree_that_does_not_pay_is_not_chosen():
    assert choose_tree(np.array([0.1]), 1.0, np.array([1.0, 1.5]), 2).parents == ()
    for wrong in (np.array([0.7, 0.7]), np.array([-0.1]), np.array([np.nan])):
        with pytest.raises(ValueError, match="sum to at most 1"):
            best_tree(wrong, 2, 2)


def test_the_measured_acceptance_foretells_another_tree():
    """Ranks measured on one tree predict the tokens a round of another one."""
    rows = 2000
    prompts = jnp.broadcast_to(PROMPTS[:1], (rows, 5))

    def first_round(parents):
        drafter = tree(parents)
        params, parts = Params(TABLE, DRAFT_TABLE), {
            "target": TARGET, "drafter": drafter,
        }  # fmt: skip
        state = decode.init(
            params, jax.random.key(1), prompts, jnp.full((rows,), 5),
            max_new_tokens=12, sampling=Sampling(temperature=1.0), **parts,
        )  # fmt: skip

        @jax.jit
        def advance(params, state):
            state = decode.prefill(params, state, **parts)
            return decode.step(params, state, rule=Coupled(), **parts)[1]

        return jax.tree.map(np.asarray, advance(params, state))

    wide, narrow = first_round((-1, -1, -1)), first_round((-1, -1))
    accepted = (wide.verdict.path[:, :1] == np.arange(3)) & (
        wide.verdict.num_accepted[:, None] > 0
    )
    rates, offered = rank_acceptance(wide.draft.parents, accepted, wide.draft.num_valid)
    assert offered.tolist() == [rows] * 3
    assert rates[0] > rates[1] > rates[2] > 0
    expected = 1 + node_acceptance((-1, -1), rates).sum()
    # The same keys and noise: the narrow tree's children are the wide one's first two.
    np.testing.assert_allclose(narrow.num_emitted.mean(), expected)

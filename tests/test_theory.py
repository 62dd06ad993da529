"""The closed forms: the papers' numbers, enumeration, limits; and `specdec theory`."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import lambertw

from specdec_jax import theory
from specdec_jax.cli import main

BEST = [  # alpha, c, K*, speedup at K*, K* - 2 and K* + 2, continuous K*
    (0.6, 5, 2, 1.4000, 1.0000, 1.2809, 1.97),
    (0.6, 10, 3, 1.6738, 1.4545, 1.5889, 2.98),
    (0.7, 10, 4, 1.9808, 1.8250, 1.9118, 4.02),
    (0.8, 10, 6, 2.4696, 2.4011, 2.4050, 5.76),
    (0.8, 20, 8, 3.0921, 3.0396, 3.0470, 7.86),
    (0.9, 10, 10, 3.4309, 3.4032, 3.3901, 9.65),
    (0.9, 20, 13, 4.6741, 4.6295, 4.6554, 13.29),
    (0.95, 20, 21, 6.5997, 6.5796, 6.5861, 21.11),
]
PROFILE = jnp.array([0.9, 0.3, 1.0, 0.6])


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def grid(double):
    """Acceptance rates [A, 1] and cost ratios [1, C], dear drafts included."""
    return jnp.linspace(0.02, 0.97, 40)[:, None], jnp.geomspace(0.4, 60, 31)[None]


def curve(alpha, cost_ratio, slope=0.0, longest=theory.MAX_NUM_DRAFT_TOKENS):
    return theory.speedup(
        theory.constant_survival(alpha, longest),
        cost_ratio,
        theory.linear_verify_factor(slope, longest),
    )


def test_law_of_n_is_that_of_enumerated_coins():
    law = np.zeros(5)
    for coins in itertools.product([True, False], repeat=4):
        chance = np.prod(np.where(coins, PROFILE, 1 - PROFILE))
        law[[*coins, False].index(False)] += chance
    found = theory.law(theory.survival(PROFILE))
    np.testing.assert_allclose(found, law, atol=1e-7)
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-6)
    mean = theory.expected_tokens(theory.survival(PROFILE))[-1]
    np.testing.assert_allclose(mean, law @ np.arange(1, 6), rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.999, 1.0])
def test_constant_alpha_gives_the_geometric_law(alpha):
    survival = theory.constant_survival(alpha, 7)
    geometric = [*((1 - alpha) * alpha ** np.arange(7)), alpha**7]
    np.testing.assert_allclose(theory.law(survival), geometric, atol=1e-6)


def test_expected_tokens_of_the_worked_example(double):
    expected = theory.expected_tokens(theory.constant_survival(0.8, 8))
    np.testing.assert_allclose(expected[3], 2.952)
    np.testing.assert_allclose(expected, (1 - 0.8 ** np.arange(1, 10)) / 0.2)
    accepted_share = (expected[1:] - 1) / np.arange(1.0, 9)  # ALGORITHMS C.1
    np.testing.assert_allclose(
        accepted_share[jnp.array([2, 4, 7])], [0.651, 0.538, 0.416], 2e-3
    )


def test_the_stronger_draft_goes_first():
    strong_first = jnp.array([[0.8, 0.8, 0.6, 0.6], [0.6, 0.6, 0.8, 0.8]])
    expected = theory.expected_tokens(theory.survival(strong_first))[:, -1]
    np.testing.assert_allclose(expected, [3.05, 2.48], atol=5e-3)


@pytest.mark.parametrize(
    "alpha, num_draft_tokens, flops, speedup",
    [(0.6, 2, 1.53, 1.96), (0.8, 5, 1.63, 3.69), (0.9, 10, 1.60, 6.86)],
)
def test_a_free_draft_costs_and_gains_what_leviathan_table_1_says(
    alpha, num_draft_tokens, flops, speedup
):
    survival = theory.constant_survival(alpha, num_draft_tokens)
    assert abs(theory.flops_per_token(survival, 0)[-1] - flops) < 0.006
    assert abs(theory.speedup(survival, 1e9)[-1] - speedup) < 0.006


def test_speculation_always_costs_arithmetic(grid):
    alpha, draft_flops = grid
    flops = theory.flops_per_token(theory.constant_survival(alpha, 9), draft_flops)
    assert (flops[..., 0] == 1).all() and (jnp.diff(flops) > 0).all()


@pytest.mark.parametrize("alpha, cost_ratio, best, peak, less, more, continuous", BEST)
def test_best_length_and_its_neighbours(
    double, alpha, cost_ratio, best, peak, less, more, continuous
):
    found = curve(alpha, cost_ratio)
    assert theory.best_num_draft_tokens(found) == best
    np.testing.assert_allclose(
        found[jnp.array([best, best - 2, best + 2])], [peak, less, more], atol=5e-5
    )
    real = theory.continuous_num_draft_tokens(alpha, cost_ratio)
    np.testing.assert_allclose(real, continuous, atol=5e-3)


@pytest.mark.parametrize(
    "alpha, cost_ratio, slope, best, peak",
    [
        (0.8, 20, 0, 8, 3.09),
        (0.8, 20, 0.02, 7, 2.79),
        (0.8, 20, 0.05, 6, 2.47),
        (0.9, 20, 0.05, 10, 3.43),
    ],
)
def test_a_verify_cost_shortens_the_draft(alpha, cost_ratio, slope, best, peak):
    found = curve(alpha, cost_ratio, slope)
    assert theory.best_num_draft_tokens(found) == best
    np.testing.assert_allclose(found[best], peak, atol=5e-3)


def test_a_verify_slope_is_a_dearer_draft(double):
    np.testing.assert_allclose(curve(0.9, 20, 0.05), curve(0.9, 10))
    both = [
        theory.continuous_num_draft_tokens(0.9, *cost) for cost in [(20, 0.05), (10,)]
    ]
    np.testing.assert_allclose(*both)


def test_a_measured_verify_factor_is_a_table(double):
    # A CPU: the second token is dear, the others are nearly free; 1 draft is the worst.
    verify = jnp.array([1.0, 1.5, 1.5, 1.5, 1.5])
    survival = theory.constant_survival(0.8, 4)
    found = theory.speedup(survival, 20.0, verify)
    np.testing.assert_allclose(found[1:3], [1.8 / 1.55, 2.44 / 1.6])
    pays = theory.one_more_pays(theory.constant_survival(0.4, 4), 20.0, verify)
    assert pays.tolist() == [False, True, True, False]  # not to be stopped at the first


def test_the_best_integer_is_a_neighbour_of_the_continuous_one(grid):
    best = theory.best_num_draft_tokens(curve(*grid))
    real = theory.continuous_num_draft_tokens(*grid)
    inside = real < theory.MAX_NUM_DRAFT_TOKENS
    assert inside.mean() > 0.9
    assert (abs(best.astype(real.dtype) - real) < 1)[inside].all()


@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_the_marginal_rule_stops_at_the_best_length(grid, slope):
    longest = theory.MAX_NUM_DRAFT_TOKENS
    pays = theory.one_more_pays(
        theory.constant_survival(grid[0], longest),
        grid[1],
        theory.linear_verify_factor(slope, longest),
    )
    best = theory.best_num_draft_tokens(curve(*grid, slope))
    np.testing.assert_array_equal(pays.sum(axis=-1), best)
    np.testing.assert_array_equal(jnp.cumprod(pays, axis=-1).sum(axis=-1), best)


def test_the_notes_rule_is_not_the_marginal_rule():
    """Continuing while alpha^(k+1) c >= 1 drafts 21 tokens where 10 are best."""
    survival = theory.constant_survival(0.9, theory.MAX_NUM_DRAFT_TOKENS)
    assert (survival * 10 >= 1).sum() == 21
    assert theory.one_more_pays(survival, 10).sum() == 10


def test_no_draft_is_best_exactly_where_alpha_times_c_is_at_most_one(grid):
    alpha, cost_ratio = grid
    found = curve(alpha, cost_ratio)
    none = theory.best_num_draft_tokens(found) == 0
    np.testing.assert_array_equal(none, alpha * cost_ratio <= 1)
    assert (found.max(axis=-1)[none] == 1).all() and 0.1 < none.mean() < 0.9


def test_best_length_grows_with_alpha_and_with_cost_ratio(grid):
    for find in (
        lambda *costs: theory.best_num_draft_tokens(curve(*costs)),
        theory.continuous_num_draft_tokens,
    ):
        found = find(*grid)
        assert (jnp.diff(found, axis=0) >= 0).all()
        assert (jnp.diff(found, axis=1) >= 0).all()


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3])
def test_lambert_w_agrees_with_root_finding(grid, slope):
    closed = theory.continuous_num_draft_tokens(*grid, slope)
    bisected = theory.bisected_num_draft_tokens(*grid, slope)
    np.testing.assert_allclose(closed, bisected, rtol=1e-10, atol=1e-10)
    assert (closed > 0).any() and (closed == 0).any()


def test_lambert_w_agrees_with_scipy(grid):
    alpha, cost_ratio = map(np.asarray, grid)
    found = theory.continuous_num_draft_tokens(*grid)
    argument = -(alpha ** (cost_ratio - 1)) / np.e
    usable = (found > 0) & (argument < -1e-300)  # scipy's argument underflows
    w = lambertw(np.where(usable, argument, -0.1), -1).real
    expected = -cost_ratio + (1 + w) / np.log(alpha)
    np.testing.assert_allclose(found[usable], expected[usable], rtol=1e-8)


@pytest.mark.parametrize(
    "solve", [theory.continuous_num_draft_tokens, theory.bisected_num_draft_tokens]
)
def test_continuous_length_is_a_number_at_every_extreme(solve):
    rng = np.random.default_rng(0)
    alpha = [*rng.random(300), *(1 - 10 ** rng.uniform(-8, -1, 300))]
    alpha = np.float32([*alpha, *(10 ** rng.uniform(-30, 0, 400))])
    cost_ratio = [
        *(1 + 10 ** rng.uniform(-8, 2, 500)),
        *(10 ** rng.uniform(-6, 9, 500)),
    ]
    arguments = jnp.asarray(alpha), jnp.asarray(np.float32(cost_ratio))
    inside = arguments[0] < 1
    found = solve(*arguments)
    assert (found >= 0).all() and jnp.isfinite(found[inside]).all()
    slopes = jax.grad(lambda *both: jnp.where(inside, solve(*both), 0).sum(), (0, 1))
    assert not jnp.isnan(jnp.stack(slopes(*arguments))).any()


def test_limits():
    ones = curve(1.0, 10.0, longest=4)
    np.testing.assert_allclose(ones, np.arange(1, 6) / (1 + np.arange(5) / 10), 1e-6)
    np.testing.assert_allclose(curve(0.0, 10.0, longest=2), [1, 1 / 1.1, 1 / 1.2])
    continuous = theory.continuous_num_draft_tokens
    assert continuous(1.0, 10.0) == jnp.inf
    assert [float(continuous(*a)) for a in [(1.0, 0.9), (0.0, 10.0), (0.5, 1.0)]] == [
        0,
        0,
        0,
    ]
    nothing = theory.constant_survival(0.5, 0)
    assert theory.speedup(nothing, 3.0).tolist() == theory.law(nothing).tolist() == [1]


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 0.5, 0.9, 1 - 1e-6, 1.0])
def test_gradients_are_the_analytic_ones_up_to_both_ends(alpha):
    """E[N] = sum of alpha^k, whose slope is the sum of k alpha^(k-1)."""
    k = np.arange(1, 7)

    def gain(alpha, cost_ratio):
        return theory.speedup(theory.constant_survival(alpha, 6), cost_ratio)[-1]

    found = jax.jit(jax.grad(gain, (0, 1)))(alpha, 10.0)
    tokens, cost = 1 + (alpha**k).sum(), 1.6
    expected = (k * alpha ** (k - 1.0)).sum() / cost, tokens / cost**2 * 6 / 100
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert jnp.isfinite(jax.grad(jax.grad(gain))(alpha, 10.0))


@pytest.mark.parametrize(
    "solve", [theory.continuous_num_draft_tokens, theory.bisected_num_draft_tokens]
)
def test_continuous_length_is_differentiable(double, solve):
    at, step = (0.8, 10.0, 0.02), 1e-6
    found = jax.jit(jax.grad(solve, (0, 1, 2)))(*at)
    for i, slope in enumerate(found):
        ends = [
            solve(*(x + sign * step * (i == j) for j, x in enumerate(at)))
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6)
    # Where drafting does not pay the answer is 0, all around; no NaN may leak in.
    for alpha in (0.0, 1e-9, 0.03):
        assert jax.grad(solve)(alpha, 5.0) == 0
    assert jnp.isfinite(jax.grad(solve)(1 - 1e-9, 5.0))


def test_mapped_equals_batched(double):
    alphas, costs = jnp.array([0.3, 0.8]), jnp.array([4.0, 9.0])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(lambda a, c: theory.speedup(a, c)))(
            theory.constant_survival(alphas, 5), costs
        ),
        theory.speedup(theory.constant_survival(alphas, 5), costs),
    )
    both = [
        f(theory.continuous_num_draft_tokens)(alphas, costs)
        for f in (jax.vmap, lambda solve: solve)
    ]
    np.testing.assert_allclose(*both)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_results_keep_the_dtype(double, dtype):
    alpha = jnp.array([0.8], dtype)
    survival = theory.constant_survival(alpha, 3)
    for one in (
        theory.law(survival),
        theory.speedup(survival, jnp.array([10.0], dtype)),
        theory.speedup(survival, 10),
        theory.flops_per_token(survival, 0.1),
        theory.continuous_num_draft_tokens(alpha, 10.0),
        theory.bisected_num_draft_tokens(alpha, 10.0),
    ):
        assert one.dtype == dtype


def ask(capsys, *arguments):
    code = main(["theory", *arguments])
    return code, *capsys.readouterr()


def test_command_prints_the_documented_json(capsys):
    code, out, err = ask(capsys, "--alpha", ".8", "--cost-ratio", "10", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["best_num_draft_tokens"] == 6
    assert abs(document["speedup"] - 2.4696) < 5e-5
    assert abs(document["continuous_num_draft_tokens"] - 5.7562) < 5e-5
    assert [row["num_draft_tokens"] for row in document["table"]] == list(range(65))
    row = document["table"][3]
    assert row.keys() == {"num_draft_tokens", "expected_tokens", "speedup"}
    assert abs(row["expected_tokens"] - 2.952) < 1e-12
    assert abs(row["speedup"] - 2.27077) < 5e-6
    assert document["config"]["cost_ratio"] == 10


def test_command_uses_every_option(capsys):
    costs = ("--alpha", ".9", "--cost-ratio", "20", "--verify-slope", ".05", "--json")
    document = json.loads(ask(capsys, *costs)[1])
    assert document["best_num_draft_tokens"] == 10
    code, out, _ = ask(capsys, *costs, "--max-num-draft-tokens", "4")
    document = json.loads(out)
    assert document["best_num_draft_tokens"] == len(document["table"]) - 1 == 4
    assert "longer ones may be faster" in document["verdict"]


def test_command_marks_the_best_row_and_says_what_to_do(capsys):
    _, out, _ = ask(capsys, "--alpha", ".8", "--cost-ratio", "10")
    [row] = [line for line in out.splitlines() if "best" in line]
    assert [" 6 ", "3.951", "2.470"] == [
        s for s in (" 6 ", "3.951", "2.470") if s in row
    ]
    assert "Draft 6 tokens a round: 2.47 times" in out
    _, out, _ = ask(capsys, "--alpha", ".1", "--cost-ratio", "5")
    assert "Do not speculate" in out and "1/c + slope = 0.2" in out


def test_command_has_no_infinity_in_json(capsys):
    code, out, _ = ask(capsys, "--alpha", "1", "--cost-ratio", "10", "--json")
    document = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and document["continuous_num_draft_tokens"] is None


@pytest.mark.parametrize(
    "option, value, needed",
    [
        ("--alpha", "1.2", "from 0 to 1"),
        ("--alpha", "-0.1", "from 0 to 1"),
        ("--alpha", "nan", "from 0 to 1"),
        ("--cost-ratio", "0", "positive and finite"),
        ("--cost-ratio", "-3", "positive and finite"),
        ("--cost-ratio", "inf", "positive and finite"),
        ("--cost-ratio", "nan", "positive and finite"),
        ("--verify-slope", "-0.01", "at least 0"),
        ("--verify-slope", "nan", "at least 0"),
        ("--max-num-draft-tokens", "0", "from 1 to"),
        ("--max-num-draft-tokens", "1000000", "from 1 to"),
        ("--alpha", "high", "valid"),
    ],
)
def test_bad_input_is_a_message_and_code_2(capsys, option, value, needed):
    good = {"--alpha": "0.8", "--cost-ratio": "10"} | {option: value}
    code, out, err = ask(capsys, *itertools.chain(*good.items()))
    assert (code, out) == (2, "")
    assert needed in err and "Traceback" not in err

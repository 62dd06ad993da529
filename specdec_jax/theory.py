"""What a round of speculative decoding yields and costs: closed forms, no model.

Two things decide whether speculation pays: how far drafts survive, and what a round
costs. Survival S_k is the chance that the first k drafts are all accepted; with a
constant acceptance rate alpha it is alpha^k (Leviathan et al., arXiv:2211.17192), but
nothing below needs that. A round then emits N tokens, 1 to K + 1, and costs, in plain
steps of the target,

    E[N] = 1 + S_1 + ... + S_K        T(K) = v(K) + K / c        speedup = E[N] / T(K)

c is the cost ratio, a target step over a draft step: c = 10 means that the draft is ten
times cheaper (Leviathan's c is the inverse). v(K) is the verify factor: the time of the
target's pass over K + 1 tokens over that of a plain step. v(0) = 1, and whatever else a
speculative round costs belongs in it.

Curves hold every draft length from 0 on in their last axis, so that their best entry
can be 0: do not speculate. All functions are pure, broadcast scalars and arrays as
numpy does, and can be jitted, mapped and differentiated.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Real = Float[Array, "*#B"] | float | int

MAX_NUM_DRAFT_TOKENS = 64
"""How far the search for the best draft length goes, unless told otherwise."""


def survival(acceptance: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """Returns S_1..S_K, the chances that the first k drafts are all accepted.

    Args:
      acceptance: Chance that draft k is accepted, given that those before it were.

    Example:
      >>> survival(jnp.array([0.9, 0.5])).round(2).tolist()
      [0.8999999761581421, 0.44999998807907104]
    """
    return jnp.cumprod(acceptance, axis=-1)


def constant_survival(
    alpha: Real, num_draft_tokens: int
) -> Float[Array, "*B {num_draft_tokens}"]:
    """Returns S_k = alpha^k for k = 1..K: every draft is accepted with chance alpha.

    Args:
      alpha: Acceptance rate, between 0 and 1.
      num_draft_tokens: K.

    Example:
      >>> constant_survival(0.5, 3).tolist()
      [0.5, 0.25, 0.125]
    """
    alpha = _real(alpha)[..., None]
    return survival(jnp.broadcast_to(alpha, (*alpha.shape[:-1], num_draft_tokens)))


def law(survival: Float[Array, "*B K"]) -> Float[Array, "*B K+1"]:
    """Returns P(N = 1), ..., P(N = K + 1): the law of the tokens that a round emits.

    N = n has chance S_{n-1} - S_n: n - 1 drafts survive, and the next one does not. At
    n = K + 1 there is no next one.

    Example:
      >>> law(constant_survival(0.5, 2)).tolist()
      [0.5, 0.25, 0.25]
    """
    reach = _reach(survival)
    return -jnp.diff(reach, append=jnp.zeros_like(reach[..., :1]))


def expected_tokens(survival: Float[Array, "*B K"]) -> Float[Array, "*B K+1"]:
    """Returns E[N], in tokens a round, of each draft length from 0 to K.

    With S_k = alpha^k it is (1 - alpha^(K+1)) / (1 - alpha), Leviathan et al. eq. 1;
    as a sum it holds at alpha = 1 too, and so do its derivatives.

    Example:
      >>> expected_tokens(constant_survival(0.5, 2)).tolist()
      [1.0, 1.5, 1.75]
    """
    return jnp.cumsum(_reach(survival), axis=-1)


def linear_verify_factor(
    slope: Real, num_draft_tokens: int
) -> Float[Array, "*B {num_draft_tokens}+1"]:
    """Returns v(k) = 1 + slope * k, in plain steps, for k = 0..K.

    Example:
      >>> linear_verify_factor(0.25, 2).tolist()
      [1.0, 1.25, 1.5]
    """
    return 1 + _multiples(slope, num_draft_tokens)


def round_cost(
    cost_ratio: Real,
    num_draft_tokens: int,
    verify_factor: Float[Array, "*#B {num_draft_tokens}+1"] | None = None,
) -> Float[Array, "*#B {num_draft_tokens}+1"]:
    """Returns T(k) = v(k) + k / c, in plain steps, for k = 0..K.

    Args:
      cost_ratio: c, a target step over a draft step.
      num_draft_tokens: K.
      verify_factor: v(0..K), measured or linear; None is free verification, v = 1.

    Example:
      >>> round_cost(4, 2).tolist()
      [1.0, 1.25, 1.5]
    """
    drafting = _multiples(1 / _real(cost_ratio), num_draft_tokens)
    if verify_factor is None:
        return 1 + drafting
    return jnp.add(*jnp.broadcast_arrays(drafting, verify_factor))


def speedup(
    survival: Float[Array, "*#B K"],
    cost_ratio: Real,
    verify_factor: Float[Array, "*#B K+1"] | None = None,
) -> Float[Array, "*#B K+1"]:
    """Returns plain time over speculative time a token, of each draft length 0..K.

    Leviathan et al. theorem 3.8, with v(K) and any survival; without drafts it is 1.

    Args:
      survival: S_1..S_K.
      cost_ratio: c, a target step over a draft step.
      verify_factor: v(0..K); None is free verification.

    Example:
      >>> f"{speedup(constant_survival(0.8, 6), 10)[6]:.3f}"
      '2.470'
    """
    cost = _round_cost_like(survival, cost_ratio, verify_factor)
    return jnp.divide(*jnp.broadcast_arrays(expected_tokens(survival), cost))


def flops_per_token(
    survival: Float[Array, "*#B K"], draft_flops: Real
) -> Float[Array, "*#B K+1"]:
    """Returns expected operations a token over those of plain decoding, k = 0..K.

    Leviathan et al. theorem 3.11: (k * draft_flops + k + 1) / E[N]. It is never below
    1: speculation buys time with arithmetic, and loses where arithmetic is the limit.

    Args:
      survival: S_1..S_K.
      draft_flops: Operations of the draft a token over the target's (their c-hat, so
        that 0.1 is a draft ten times smaller).

    Example:
      >>> flops_per_token(constant_survival(0.5, 1), 0.25).tolist()
      [1.0, 1.5]
    """
    draft_flops = jnp.asarray(draft_flops, survival.dtype)
    spent = 1 + _multiples(1 + draft_flops, survival.shape[-1])
    return jnp.divide(*jnp.broadcast_arrays(spent, expected_tokens(survival)))


def one_more_pays(
    survival: Float[Array, "*#B K"],
    cost_ratio: Real,
    verify_factor: Float[Array, "*#B K+1"] | None = None,
) -> Bool[Array, "*#B K"]:
    """Returns whether k + 1 drafts are faster than k, for k = 0..K-1.

    One more draft pays iff it adds relatively more to the tokens than to the time:
    S_{k+1} / E[N](k) > (T(k+1) - T(k)) / T(k). With constant alpha and free
    verification that is alpha^(k+1) c > speedup(k); at k = 0, alpha c > 1. The best
    length is the number of leading Trues where v(K) is convex; where it has steps, the
    first False need not be the end.

    Example:
      >>> one_more_pays(constant_survival(0.6, 4), 5).tolist()
      [True, True, False, False]
    """
    cost = _round_cost_like(survival, cost_ratio, verify_factor)
    gained = survival / expected_tokens(survival)[..., :-1]
    spent = jnp.diff(cost) / cost[..., :-1]
    return jnp.greater(*jnp.broadcast_arrays(gained, spent))


def best_num_draft_tokens(speedup: Float[Array, "*B M"]) -> Int[Array, "*B"]:
    """Returns the fastest draft length; of equals the shortest, 0 for no speculation.

    Args:
      speedup: Of each of the M draft lengths from 0 on.

    Example:
      An accurate draft and a poor one, both five times cheaper:

      >>> survival = constant_survival(jnp.array([0.6, 0.1]), MAX_NUM_DRAFT_TOKENS)
      >>> best_num_draft_tokens(speedup(survival, 5)).tolist()
      [2, 0]
    """
    return jnp.argmax(speedup, axis=-1)


def continuous_num_draft_tokens(
    alpha: Real, cost_ratio: Real, verify_slope: Real = 0.0
) -> Float[Array, "*B"]:
    """Returns the real K that maximises the speedup at constant alpha.

    Where the derivative vanishes alpha^(K+1) (1 + (c+K) L) = 1 with L = ln(1/alpha), so

        K* = -c - (1 + W_{-1}(-alpha^(c-1) / e)) / L

    A slope of the verify factor, v = 1 + slope * K, is a dearer draft: 1/c + slope
    takes the place of 1/c. The best integer is one of K*'s two neighbours.

    Args:
      alpha: Acceptance rate, between 0 and 1.
      cost_ratio: c, a target step over a draft step.
      verify_slope: Plain steps that one more token in the verified block costs.

    Returns:
      K*; 0 where the speedup falls from K = 0 on, infinite at alpha = 1 if the draft is
      cheaper than the target. A K* between 0 and 1 may mean 0: whole drafts pay iff
      alpha > 1/c + slope.

    Example:
      >>> f"{continuous_num_draft_tokens(0.8, 10):.4f}"
      '5.7562'
    """
    return _where_it_pays(_by_lambert_w, alpha, cost_ratio, verify_slope)


def bisected_num_draft_tokens(
    alpha: Real, cost_ratio: Real, verify_slope: Real = 0.0
) -> Float[Array, "*B"]:
    """Returns the same as `continuous_num_draft_tokens`, by bisection.

    Example:
      >>> f"{bisected_num_draft_tokens(0.8, 10):.4f}"
      '5.7562'
    """
    return _where_it_pays(_by_bisection, alpha, cost_ratio, verify_slope)


def _where_it_pays(
    solve: Callable[[Array, Array], Array],
    alpha: Real,
    cost_ratio: Real,
    verify_slope: Real,
) -> Float[Array, "*B"]:
    """Returns `solve(L, c)` where the speedup rises at K = 0; else 0, or infinity."""
    alpha, cost_ratio, verify_slope = jnp.broadcast_arrays(
        _real(alpha), _real(cost_ratio), _real(verify_slope)
    )
    cost_ratio = 1 / (1 / cost_ratio + verify_slope)
    inside = (alpha > 0) & (alpha < 1)
    rate = -jnp.log(jnp.where(inside, alpha, 0.5))
    pays = inside & (rate < jnp.log1p(cost_ratio * rate))
    # Any values at which solving is safe: a gradient must not meet the others.
    solved = solve(jnp.where(pays, rate, 0.5), jnp.where(pays, cost_ratio, 10.0))
    endless = (alpha >= 1) & (cost_ratio > 1)
    solved = jnp.maximum(solved, 0)  # rounding
    return jnp.where(pays, solved, jnp.where(endless, jnp.inf, 0.0))


def _by_lambert_w(rate: Array, cost_ratio: Array) -> Array:
    """Solves the stationary equation with W_{-1}(-exp(-1 - u)) = -1 - t.

    t - ln(1 + t) = u is solved instead of W e^W = ..., whose argument underflows. From
    the upper bound u + sqrt(2u) (Chatzigeorgiou, arXiv:1601.04895) Newton's steps fall
    to the root without a test. Only the last one is differentiated, which is exact.
    Then K* = t / L - c = ln(1 + t) / L - 1, and the latter cancels for no c.
    """
    u = (cost_ratio - 1) * rate

    def newton(t: Array) -> Array:
        return t - (t - jnp.log1p(t) - u) * (1 + t) / t

    t = u + jnp.sqrt(2 * u)
    for _ in range(4):
        t = newton(t)
    t = newton(lax.stop_gradient(t))
    return jnp.log1p(t) / rate - 1


def _by_bisection(rate: Array, cost_ratio: Array) -> Array:
    """Solves the logarithm of the stationary equation, which falls with K.

    ln(1 + y) <= sqrt(y) bounds the root. A last step of Newton carries the gradient,
    which halving would lose.
    """

    def slope(k: Array) -> Array:
        return jnp.log1p((cost_ratio + k) * rate) - (k + 1) * rate

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        rises = slope(middle) > 0
        return jnp.where(rises, middle, low), jnp.where(rises, high, middle)

    high = 1 / rate + jnp.sqrt((cost_ratio - 1) / rate)
    low, _ = lax.fori_loop(0, 64, halve, (jnp.zeros_like(high), high))
    k = lax.stop_gradient(low)
    return k - slope(k) / (rate / (1 + (cost_ratio + k) * rate) - rate)


def _round_cost_like(
    survival: Float[Array, "*#B K"],
    cost_ratio: Real,
    verify_factor: Float[Array, "*#B K+1"] | None,
) -> Float[Array, "*#B K+1"]:
    """Returns the cost of rounds of up to K drafts, in the dtype of the survival."""
    cost_ratio = jnp.asarray(cost_ratio, survival.dtype)
    return round_cost(cost_ratio, survival.shape[-1], verify_factor)


def _real(value: Real) -> Float[Array, "*B"]:
    return jnp.asarray(value) * 1.0


def _reach(survival: Float[Array, "*B K"]) -> Float[Array, "*B K+1"]:
    """Returns S_0..S_K; S_0 = 1."""
    one = jnp.ones((*survival.shape[:-1], 1), survival.dtype)
    return jnp.concatenate([one, survival], axis=-1)


def _multiples(step: Real, count: int) -> Float[Array, "*B {count}+1"]:
    """Returns 0, step, ..., count * step along a new last axis."""
    step = _real(step)[..., None]
    shape = (*step.shape[:-1], count + 1)
    return step * lax.broadcasted_iota(step.dtype, shape, len(shape) - 1)

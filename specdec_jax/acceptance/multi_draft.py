"""Recursive rejection: several drafted tokens at one place, tested one by one.

The children x_1 .. x_m of a node are tested in the order drawn. x_j is kept with
probability min(1, p_j(x_j) / q_j(x_j)); if it is not, p_{j+1} is proportional to
max(0, p_j - q_j), and after the last child the next token is drawn from what is left of
the target. Given that x_1 was rejected, the rest is the same problem with one child
less: so each place has the target's law.

*   independent: each child has a row of its own, drawn from with replacement, perhaps
    by another model (SpecInfer's multi-step sampling, arXiv:2305.09781). A duplicate
    is tested again, against what its first test left.
*   distinct: one row, drawn from without replacement; q_{j+1} is q_j without x_j
    (Sequoia, arXiv:2402.12374; EAGLE-1; recursive speculative decoding,
    arXiv:2402.14160). As many children as q has tokens are never all rejected.

A child that its own law cannot have drawn (beyond the tokens that a cut or greedy law
leaves) is passed over: it was not drawn, so it says nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.acceptance.rejection import residual, residual_one_hot
from specdec_jax.base import Draft, Noise, Verdict
from specdec_jax.rng import draw

KINDS = ("independent", "distinct")
"""Kinds of siblings that have a law."""

Row = Float[Array, " V"]


@dataclass(frozen=True)
class MultiDraft:
    """Recursive rejection over trees of drawn tokens. Lossless; a chain is rejection.

    A draft without `log_probs` is deterministic: its children are tested against the
    target without those tested before, which is the membership rule.

    Args:
      kind: How siblings were drawn: "distinct" or "independent", see `base.SIBLINGS`.
    """

    kind: str = "distinct"
    lossless: ClassVar[bool] = True
    needs_log_probs: ClassVar[bool] = False
    noise: ClassVar[str] = "round"

    def __post_init__(self):
        """Refuses siblings that have no law."""
        if self.kind not in KINDS:
            raise ValueError(
                f"kind is {self.kind!r}; recursive rejection judges siblings that are "
                f"{' or '.join(KINDS)}; for others use the coupled rule"
            )

    @property
    def siblings(self) -> tuple[str, ...]:
        """Chains, and trees of its kind."""
        return ("none", self.kind)

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict; see `base.AcceptanceRule.law`."""
        parents, valid = self._nodes(draft)
        if len(parents) == 0:
            return jnp.ones_like(target_log_probs[:, 0]), jnp.exp(target_log_probs)
        tokens = jnp.clip(draft.tokens, 0, target_log_probs.shape[1] - 1)

        def judge(node, carry):
            reach, rows, rejected = carry
            slot, token = parents[node] + 1, tokens[node]
            row, gone = rows[slot], rejected[slot]
            proposal = self._proposal(draft, node, token, gone)
            drawn = valid[node] & (proposal[token] > -jnp.inf)
            ratio = self._log_ratio(target_log_probs[slot], row, proposal, token)
            keep = jnp.where(drawn, jnp.exp(jnp.minimum(ratio, 0)), 0)
            left = self._left(target_log_probs[slot], row, proposal, draft, token)
            reach = reach.at[node + 1].set(reach[slot] * keep)
            reach = reach.at[slot].multiply(1 - keep)
            rows = rows.at[slot].set(jnp.where(drawn, left, row))
            return reach, rows, rejected.at[slot, token].max(drawn)

        # What is left of each slot's reach, once its children were tested: its stop.
        reach = jnp.zeros_like(target_log_probs[:, 0]).at[0].set(1)
        # None yet, and no constant: XLA would fold it for seconds at V = 4,096.
        rejected = target_log_probs > jnp.inf
        stop, rows, _ = jax.lax.fori_loop(
            0, len(tokens), judge, (reach, target_log_probs, rejected)
        )
        return stop, jax.nn.softmax(rows, axis=-1)

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict. Node i uses uniform i; one place's Gumbels are used."""
        parents, valid = self._nodes(draft)
        num_nodes = len(parents)
        slots = jnp.arange(num_nodes, dtype=jnp.int32)
        if num_nodes == 0:
            zero = jnp.zeros((), jnp.int32)
            return Verdict(zero, draw(target_log_probs[0], noise, 0), slots)
        tokens = jnp.clip(draft.tokens, 0, target_log_probs.shape[1] - 1)
        nobody = jnp.zeros(target_log_probs.shape[1:], bool)

        def child_after(node: Int[Array, ""], child: Int[Array, ""]) -> Int[Array, ""]:
            """Returns the node's next child to test; num_nodes if there is none."""
            later = valid & (parents == node) & (slots > child)
            return jnp.where(later, slots, num_nodes).min()

        def test(carry):
            child, node, row, gone, depth, path = carry
            token, target_row = tokens[child], target_log_probs[node + 1]
            proposal = self._proposal(draft, child, token, gone)
            drawn = proposal[token] > -jnp.inf
            ratio = self._log_ratio(target_row, row, proposal, token)
            coin = jnp.asarray(noise.uniform(child), row.dtype)
            # Strict: a coin of exactly 0 must not accept a token of probability 0.
            keep = drawn & (jnp.log(coin) < ratio)
            left = self._left(target_row, row, proposal, draft, token)
            row = jnp.where(drawn, left, row)
            row = jnp.where(keep, target_log_probs[child + 1], row)
            gone = jnp.where(keep, nobody, gone.at[token].max(drawn))
            path = jnp.where(keep, path.at[depth].set(child), path)
            node = jnp.where(keep, child, node)
            depth = depth + keep.astype(jnp.int32)
            return child_after(node, child), node, row, gone, depth, path

        root = jnp.full((), -1, jnp.int32)
        start = (child_after(root, root), root, target_log_probs[0], nobody)
        _, _, row, _, depth, path = jax.lax.while_loop(
            lambda carry: carry[0] < num_nodes,
            test,
            (*start, jnp.zeros((), jnp.int32), slots),
        )
        return Verdict(depth, draw(row, noise, depth), path)

    def _nodes(self, draft: Draft) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
        """Returns each node's parent, and whether it is to be tested."""
        slots = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
        parents = slots - 1 if draft.parents is None else draft.parents
        return parents, slots < draft.num_valid

    def _proposal(
        self, draft: Draft, node: Int[Array, ""], token: Int[Array, ""], gone: Array
    ) -> Row:
        """Returns the law that a child was drawn from, given its rejected siblings."""
        if draft.log_probs is None:
            hit = jnp.arange(gone.shape[0], dtype=jnp.int32) == token
            return jnp.where(hit, 0.0, -jnp.inf)
        row = draft.log_probs[node]
        if self.kind == "independent":
            return row
        left = jnp.where(gone, -jnp.inf, row)
        mass = jax.nn.logsumexp(left)
        # The first child's law is the row itself, bit for bit.
        return jnp.where(gone.any() & (mass > -jnp.inf), left - mass, left)

    def _log_ratio(
        self, target_row: Row, row: Row, proposal: Row, token: Int[Array, ""]
    ) -> Float[Array, ""]:
        """Returns log p_j(x) - log q_j(x); `row` is p_j, `target_row` p_1."""
        drawn = proposal[token] > -jnp.inf
        return row[token] - jnp.where(drawn, proposal[token], 0)

    def _left(
        self,
        target_row: Row,
        row: Row,
        proposal: Row,
        draft: Draft,
        token: Int[Array, ""],
    ) -> Row:
        """Returns p_{j+1}, normalised; p_j where rounding leaves nothing of it."""
        if draft.log_probs is None:
            left = residual_one_hot(row, token)
        else:
            left = residual(row, proposal)
        return left - jax.nn.logsumexp(left)

"""Protocols and pytrees that every part of the library shares.

Axes, used throughout:

    B  rows (requests)        T  slots of a buffer        S  tokens in a block
    K  draft length           N  tree nodes (N = K for a chain)
    V  vocabulary             D  width

A *policy row* is a normalised row of float32 log-probabilities in nats, `-inf`
where a token is impossible; at temperature 0 it is 0.0 at the lowest-index argmax
and `-inf` elsewhere. `sampling.policy` alone makes them.

A *block* is the S tokens that one forward pass reads on top of a cache. In a round
it is `[last committed token, drafted tokens]`.

Everything else imports this module.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

Variables = Any
"""A linen variables dict, `{"params": ...}`."""

PyTree = Any


class Block(NamedTuple):
    """How the tokens of a block hang together, when they are not a chain.

    Slot s of the block sits at cache slot `length + s` and at position
    `length + depth[s]`; it sees all slots below `length` and its ancestors.

    A tree may be read in several calls, its parents first. Then `length` in what is
    said here is that of the first call, M counts the slots read so far and in this
    call, and the call's S tokens are the last S of them. What the target verifies is
    always one call, M = S; only a model that drafts trees needs more.
    """

    depth: Int[Array, "B M"]
    """Distance from the block's first token, which has depth 0."""
    ancestors: Bool[Array, "B M M"]
    """`[b, s, t]` is true where t is s itself or an ancestor of s."""


class ModelOutput(NamedTuple):
    """What one forward pass returns."""

    logits: Float[Array, "B S V"]
    """Row s scores the token that follows block token s; in the compute dtype."""
    hidden: tuple[Float[Array, "B S D"], ...] = ()
    """One array for each layer asked for, in the order asked."""


class Inputs(NamedTuple):
    """What an encoder reads: right-padded tokens and their lengths."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


@runtime_checkable
class Cache(Protocol):
    """What the loop knows of a cache: a pytree whose leaves have rows on axis 0."""

    length: Int[Array, " B"]
    """Valid slots of each row. Whatever lies at or above it is unreachable."""

    def rewind(self, length: Int[Array, " B"]) -> "Cache":
        """Returns the same cache with another length; no data moves."""
        ...

    def commit(self, start: Int[Array, " B"], path: Int[Array, "B P"]) -> "Cache":
        """Moves slot `start + path[b, i]` to slot `start + i`; keeps `length`."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over a cache; a linen module satisfies it as it is.

    It is static under jit, so it must hash by value. A token's logits may depend on
    its block-mates through attention only.
    """

    vocab_size: int

    def init_cache(self, batch_size: int, capacity: int) -> Cache:
        """Returns an empty cache that holds at least `capacity` slots a row."""
        ...

    def apply(
        self,
        variables: Variables,
        tokens: Int[Array, "B S"],
        cache: Cache,
        *,
        block: Block | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[ModelOutput, Cache]:
        """Reads S tokens on top of the cache.

        Args:
          variables: The linen dict `{"params": ...}`.
          tokens: Token s goes to slot `cache.length + s`.
          cache: Lowering its `length` undoes everything after it.
          block: Depths and ancestors; None is a chain.
          hidden_layers: Layers whose inputs are wanted: l >= 0 is the input of layer
            l, -1 the input of the LM head (after the final norm).

        Returns:
          The output, and the cache with `length + S`.
        """
        ...


class Params(NamedTuple):
    """Variables of the target and of the drafter."""

    target: Variables
    draft: Variables = None
    """A variables dict, a tuple of them for a composed drafter, or None."""


SIBLINGS = ("none", "independent", "distinct", "ranked")
"""How a drafter chooses the children of one node.

*   none: there is one at the most, as in a chain.
*   independent: each is drawn from its own row of `log_probs`, given the path alone.
*   distinct: drawn in order from one row, without those drawn before.
*   ranked: in any other way (the likeliest, pruned, merged): they have no law.
"""


class Draft(NamedTuple):
    """What a drafter proposes for one round."""

    tokens: Int[Array, "B N"]
    num_valid: Int[Array, " B"]
    """Valid nodes, counted from the front; the rest is padding of any value."""
    log_probs: Float[Array, "B N V"] | None = None
    """Row i is the very array node i was drawn from (the law at its parent before any
    sibling was removed). None: the tokens are deterministic (one-hot) or ranked."""
    parents: Int[Array, "B N"] | None = None
    """Parent node of each node, -1 for the last committed token; None is a chain.
    Nodes are breadth first, siblings in the order drawn."""


class Verdict(NamedTuple):
    """What a rule decides about one draft. Leaves carry B when batched."""

    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]
    """The corrected or bonus token that follows the accepted ones."""
    path: Int[Array, "*B N"]
    """Accepted nodes in order; entries from `num_accepted` on mean nothing."""


@runtime_checkable
class Noise(Protocol):
    """Random numbers as a function of the place they are used at; leaves are [B].

    With leaves of shape [] (inside a vmap) the results lose their first axis.
    """

    def gumbel(self, offset: Any, vocab_size: int) -> Any:
        """Returns float32 Gumbel noise [B, V] for the token at `length + offset`."""
        ...

    def uniform(self, offset: Any) -> Any:
        """Returns float32 uniforms [B] in [0, 1) for slot `offset` of the draft."""
        ...

    def child(self, index: Any, shift: Any = 0) -> "Noise":
        """Returns noise for an inner use that must not equal this one's."""
        ...


class RoundContext(NamedTuple):
    """All that a drafter may see; all of it is known before this round's coins."""

    params: Params
    tokens: Int[Array, "B T"]
    """Committed tokens, `[:length]` of each row; the rest is garbage."""
    length: Int[Array, " B"]
    max_draft: Int[Array, " B"]
    """The most tokens (tree depth) worth drafting: clip(budget left - 1, 0, depth)."""
    sampling: PyTree
    """The draft's own policy settings, a `sampling.SamplingRows`."""
    noise: Noise
    target_cache: Any
    """Slots >= length - 1 are free to write; None in `update`."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. A frozen dataclass: static, hashable by value, composable.

    The state must be right for every `length` not above the last one seen; nothing
    but the tokens below `length` may be trusted.
    """

    @property
    def num_nodes(self) -> int:
        """Slots of a draft, N."""
        ...

    @property
    def depth(self) -> int:
        """Longest path of a draft; equals N for a chain."""
        ...

    @property
    def siblings(self) -> str:
        """How children of one node are chosen, one of `SIBLINGS`; "none" for chains."""
        ...

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs `update` and `prefill` want to see."""
        ...

    def init(
        self,
        params: Params,
        batch_size: int,
        capacity: int,
        inputs: Inputs | None = None,
    ) -> PyTree:
        """Returns an empty state; rows are axis 0 of every array leaf."""
        ...

    def prefill(
        self,
        params: Params,
        state: PyTree,
        tokens: Int[Array, "B S"],
        start: Int[Array, " B"],
        num_valid: Int[Array, " B"],
        target_output: ModelOutput,
    ) -> PyTree:
        """Reads one chunk of the prompts; a row with num_valid 0 must not move."""
        ...

    def draft(
        self, state: PyTree, context: RoundContext
    ) -> tuple[Draft, PyTree, Cache]:
        """Proposes; hands back the target cache, whose free slots it may write."""
        ...

    def update(
        self,
        params: Params,
        state: PyTree,
        context: RoundContext,
        draft: Draft,
        target_output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        """Learns from the round; hidden row 0 is the last token, row 1 + i node i."""
        ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides how much of a draft to keep. A frozen dataclass, written for one row.

    The loop vmaps it: inside, `draft.tokens` is [N], `draft.log_probs` [N, V] or None.
    """

    @property
    def lossless(self) -> bool:
        """Whether the output keeps the target's law exactly."""
        ...

    @property
    def needs_log_probs(self) -> bool:
        """Whether it refuses drafts without `log_probs`."""
        ...

    @property
    def siblings(self) -> tuple[str, ...]:
        """The kinds of `SIBLINGS` whose drafts it can judge."""
        ...

    @property
    def noise(self) -> str:
        """Returns "round" or "position": the kind of noise it is to be given."""
        ...

    def law(
        self, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
        """Returns the exact law of the verdict, for enumeration.

        `stop[0]` is the probability that nothing is accepted and `stop[i + 1]` that
        node i is the deepest accepted one (M = N + 1); row j of the second array is
        the law (probabilities) of the next token in case j.
        """
        ...

    def __call__(
        self, noise: Noise, draft: Draft, target_log_probs: Float[Array, "M V"]
    ) -> Verdict:
        """Draws the verdict; row 0 judges the roots, row i + 1 node i's children."""
        ...

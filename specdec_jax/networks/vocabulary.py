"""A language model that reads and scores another vocabulary's ids, or fewer of them.

Two uses, one static map (a gather, inside jit):

*   **Trimming** (FR-Spec, arXiv:2502.14856): a draft spends much of a step on its head.
    Only the columns of the kept ids are multiplied; all other ids have q = 0, where the
    residual is the target's own row. Acceptance is at most the target's mass on the
    kept ids.
*   **Another tokenizer** (token-level intersection, Timor et al., arXiv:2502.05202):
    the draft scores the tokens that both vocabularies have, renormalised among them
    before it draws. A token of the text that it lacks is read as another one, which
    costs acceptance and never the law: any law that was really drawn from will do.

    target ids   0   1   2   3   4       read    [0 2 1 1 3]   the id the draft reads
    draft ids    0   2   -   1   3       column  [0 2 4 1 3]   4 = none: -inf
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specdec_jax.base import LanguageModel, ModelOutput, Variables
from specdec_jax.networks.layers import TILE, product, tile


@dataclass(frozen=True)
class Remapped:
    """A `base.LanguageModel` over another one; see `trim` and `remap`.

    Its variables are the model's `params`, and `map`: `read` [V], the model's id for
    each id; `column` [V], where its score stands (one past the last column: nowhere);
    and perhaps `head`, the kept columns of the LM head.

    Args:
      model: The model that is asked.
      vocab_size: Ids that are read and scored, V.
    """

    model: LanguageModel
    vocab_size: int

    @property
    def config(self) -> Any:
        """The model's; it says how a mesh divides it."""
        return getattr(self.model, "config", None)

    def init_cache(self, batch_size: int, capacity: int) -> Any:
        """Returns the model's own cache."""
        return self.model.init_cache(batch_size, capacity)

    def apply(self, variables, tokens, cache, *, block=None, hidden_layers=()):
        """See `base.LanguageModel`."""
        own, ids = {"params": variables["params"]}, variables["map"]
        head = ids.get("head")
        wanted = hidden_layers if head is None else (*hidden_layers, -1)
        output, cache = self.model.apply(
            own, ids["read"][tokens], cache, block=block, hidden_layers=wanted
        )
        logits = output.logits
        if head is not None:  # the full product has no reader and is not computed
            logits = product(output.hidden[-1], head)
        padding = [(0, 0)] * (logits.ndim - 1) + [(0, 1)]
        logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
        logits = jnp.take(logits, ids["column"], axis=-1)
        return ModelOutput(logits, output.hidden[: len(hidden_layers)]), cache


def remap(
    model: LanguageModel,
    variables: Variables,
    read: Int[np.ndarray, " V"],
    column: Int[np.ndarray, " V"],
) -> tuple[Remapped, Variables]:
    """Lets a model read and score another vocabulary.

    Args:
      model: With a vocabulary of its own.
      variables: Its variables.
      read: For each id the model's id it is read as.
      column: For each id the model's id that scores it, or -1.

    Returns:
      The model over V ids, and its variables.
    """
    none = model.vocab_size
    ids = {
        "read": jnp.asarray(read, jnp.int32),
        "column": jnp.asarray(np.where(column < 0, none, column), jnp.int32),
    }
    return Remapped(model, len(read)), {"params": variables["params"], "map": ids}


def trim(
    model: Any, variables: Variables, ids: Any, vocab_size: int | None = None
) -> tuple[Remapped, Variables]:
    """Restricts a model to some ids, and its LM head to their columns.

    The columns are cut once, here, out of a model that has a method `logits` (the head
    alone, linear); any other model is masked, which saves nothing. Numbers of ids that
    64 divides are fastest on CPUs.

    Args:
      model: The draft model, perhaps one from `remap`.
      variables: Its variables.
      ids: What is kept, in the ids that the result reads.
      vocab_size: Ids that are read, V; None: the model's.

    Raises:
      ValueError: The model scores none of the ids.

    Example:
      >>> from specdec_jax.networks import Decoder, DecoderConfig
      >>> config = DecoderConfig(
      ...     vocab_size=11, width=8, num_layers=1, num_heads=2, num_kv_heads=1,
      ...     head_dim=4, mlp_width=16, max_positions=64)
      >>> model, tokens = Decoder(config), jnp.zeros((1, 1), jnp.int32)
      >>> cache = model.init_cache(1, 8)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens, cache)
      >>> model, variables = trim(model, variables, [0, 3, 4])
      >>> output, _ = jax.jit(model.apply)(variables, tokens, cache)
      >>> (output.logits[0, 0] > -jnp.inf).nonzero()[0].tolist()
      [0, 3, 4]
    """
    if not isinstance(model, Remapped):
        every = np.arange(vocab_size or model.vocab_size)
        own = model.vocab_size
        model, variables = remap(
            model,
            variables,
            read=np.minimum(every, own - 1),
            column=np.where(every < own, every, -1),
        )
    column, none = np.asarray(variables["map"]["column"]), model.model.vocab_size
    kept = np.unique(np.asarray(ids, np.int64))
    kept = kept[(kept >= 0) & (kept < len(column))]
    kept = kept[column[kept] < none]
    if not len(kept):
        raise ValueError(
            "the draft scores none of the ids that were to be kept; give ids of the "
            f"target's vocabulary, from 0 to {len(column) - 1}"
        )
    trimmed = dict(variables["map"])
    if hasattr(model.model, "logits"):
        inner = {"params": variables["params"]}
        trimmed["head"] = _head(model.model, inner, column[kept])
        place = np.full(len(column), len(kept))
        place[kept] = np.arange(len(kept))
    else:
        place = np.full(len(column), none)
        place[kept] = column[kept]
    trimmed["column"] = jnp.asarray(place, jnp.int32)
    return model, {"params": variables["params"], "map": trimmed}


def _head(model: Any, variables: Variables, columns: np.ndarray) -> Array:
    """Returns columns [D, M] of the LM head, in tiles if the model's weights are."""
    tokens = jnp.zeros((1, 1), jnp.int32)

    def shape(variables: Variables) -> Array:
        cache = model.init_cache(1, 1)
        output, _ = model.apply(variables, tokens, cache, hidden_layers=(-1,))
        return output.hidden[0]

    hidden = jax.eval_shape(shape, variables)

    @jax.jit
    def cut(variables: Variables) -> Array:
        identity = jnp.eye(hidden.shape[-1], dtype=hidden.dtype)
        head = model.apply(variables, identity, method="logits")
        return head[:, jnp.asarray(columns)]

    head = cut(variables)
    tiled = getattr(model, "tiled", False) and len(columns) % TILE == 0
    return tile(head) if tiled else head

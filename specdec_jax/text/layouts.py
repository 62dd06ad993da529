"""Weights as the compiler wants them to lie: asked once, before the first round.

A TPU keeps the two minor axes of an array in tiles of (8, 128), and each product has a
side on which it takes its weights. A program that is handed them in a standard layout
copies those it wants otherwise, some of them in every round. So the rounds are compiled
once with the layouts of the weights left open, and the weights are put into those that
were chosen; every other program then takes them as they lie.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from specdec_jax.base import Params
from specdec_jax.text import running
from specdec_jax.text.packing import Plan, by_bucket, pack


def compile_rounds(
    params: Params, state: Any, batch_size: int, static: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Compiles the rounds with the layouts of the weights left open.

    Args:
      params: Variables, or their shapes; each leaf knows its sharding.
      state: A state's shapes, as `start_batch` makes it.
      batch_size: Its rows.
      static: target, drafter, rule and placement.

    Returns:
      The program; `input_formats[0][0]` are the layouts that it chose.
    """
    rounds = inspect.unwrap(running._advance)

    def _advance(*arguments: Any) -> Any:  # by this name `plan` knows the loop
        return rounds(*arguments, traced=False, **static)

    wanted = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), params)
    placement = static["placement"]
    rest = placement and placement.everywhere
    shardings = (
        wanted,
        jax.tree.map(lambda leaf: leaf.sharding, state) if placement else None,
        *[rest] * 3,
    )
    compiled: jax.stages.Compiled = (
        jax.jit(_advance, in_shardings=shardings, donate_argnums=1)
        .lower(
            jax.tree.map(_shape, params),
            jax.tree.map(_shape, state),
            np.zeros(batch_size, bool),
            np.int32(1),
            np.int32(batch_size),
        )
        .compile()
    )
    return compiled


def lay_out(engine: running.Engine, plan: Plan, *, batch_size: int) -> running.Engine:
    """Returns the engine with its weights as the rounds of a plan want them.

    The plan has requests; its first batch decides. Both layouts of a weight that moves
    are in memory until the old engine is dropped.
    """
    slots, indices = next(iter(by_bucket(plan, batch_size)))
    size, _ = running.sizes(engine, len(indices), batch_size)
    state = running.state_shapes(engine, pack(plan, indices[:size], size, slots))
    rounds = compile_rounds(engine.params, state, size, engine.static)
    formats = rounds.input_formats[0][0]
    return engine._replace(params=jax.device_put(engine.params, formats))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

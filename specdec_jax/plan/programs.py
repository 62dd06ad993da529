"""Compiles the deployed programs for chips that are not here; runs as a process.

    python -m specdec_jax.plan.programs < request.json > answer.json

A process of its own, since the compiler's library looks for its chips where it is
loaded and reads its settings from the environment.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import topologies

from specdec_jax.acceptance import Rejection
from specdec_jax.base import Params
from specdec_jax.cache import SLOT_BLOCK
from specdec_jax.checkpoints.load import model_from_config, parameter_shapes
from specdec_jax.decode import bucket
from specdec_jax.drafters import ModelDrafter, NgramDrafter
from specdec_jax.networks import Decoder
from specdec_jax.plan.hlo import Instruction, Module, parse
from specdec_jax.plan.traffic import Traffic, Walk
from specdec_jax.sampling import Sampling
from specdec_jax.sharding import Placement, make_mesh
from specdec_jax.text import running
from specdec_jax.text.layouts import compile_rounds
from specdec_jax.text.packing import Batch, eos_rows


class _Parts(NamedTuple):
    """What is compiled, as shapes that know where they lie."""

    params: Params
    state: Any
    batch: Any
    static: dict[str, Any]


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles and measures; everything is of one chip.

    Args:
      request: target_config, draft_config (or None), topology, mesh, batch_size,
        context_length, num_draft_tokens, dtype, draft_sharding.

    Raises:
      ValueError: A config, the mesh or the topology is none.
    """
    placement = Placement(
        make_mesh(request["mesh"], _devices(request["topology"])),
        request["draft_sharding"],
    )
    target = model_from_config(request["target_config"], request["dtype"])
    target = target.clone(sliced=placement.whole())
    small = None
    if request["draft_config"] is not None:
        small = model_from_config(request["draft_config"], request["dtype"])
        small = small.clone(sliced=placement.whole(draft=True))
    parts = _parts(target, small, placement, request)
    placed = placement.parameters(parameter_shapes(target), target)
    rows = request["batch_size"]
    rounds = compile_rounds(
        parts.params, parts.state, rows, {**parts.static, "rule": Rejection()}
    )
    laid_out = jax.tree.map(_lying, parts.params, rounds.input_formats[0][0])
    prefill = running.start_batch.lower(laid_out, parts.batch, **parts.static).compile()
    return {
        "weights": _device_bytes(parts.params.target),
        "draft_weights": _device_bytes(parts.params.draft),
        "cache": _device_bytes(parts.state.cache),
        "draft_cache": _device_bytes(parts.state.drafter_state),
        "logits": _device_bytes(_logits(target, placement, request["batch_size"])),
        "programs": {
            "rounds": _memory(rounds),
            "prefill": _memory(prefill),
        },
        "round": _round(str(rounds.as_text()), parts, request["num_draft_tokens"]),
        "undivided": sorted(
            {axis for one in placed.values() for axis in one.undivided}
        ),
    }


def _devices(topology: str) -> list[Any]:
    kind, _, sizes = topology.partition(":")
    options: dict[str, Any] = {}
    if set(sizes.split("x")) == {"1"}:
        topology, options = f"{kind}:1x1x1", {"chips_per_host_bounds": [1, 1, 1]}
    try:
        found = topologies.get_topology_desc(topology, platform="tpu", **options)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"topology {topology!r} does not exist ({first}); write v5e:2x4, or "
            "v5e:1x1 for a single chip"
        ) from None
    return list(found.devices)


def _parts(
    target: Decoder, small: Decoder | None, placement: Placement, request: Mapping
) -> _Parts:
    size, depth = request["batch_size"], request["num_draft_tokens"]
    if size % placement.data:
        raise ValueError(
            f"a batch of {size} rows cannot be split over data={placement.data}; make "
            "it a multiple"
        )
    drafter: Any = NgramDrafter(depth)
    model: Any = small
    if model is not None:
        drafter = ModelDrafter(model, depth, target.vocab_size)
    params = Params(
        _variables(target, placement, False),
        None if small is None else _variables(small, placement, True),
    )
    column = np.zeros(size, np.int32)
    batch = Batch(
        tokens=np.zeros((size, bucket(request["context_length"])), np.int32),
        length=column,
        max_new_tokens=column,
        seed=column.astype(np.uint32),
        fold=column.astype(np.uint32),
        eos_token_ids=eos_rows((0,), size),
        sampling=jax.device_get(Sampling(1.0).rows(size, target.vocab_size)),
        draft_sampling=None,
    )
    static = {"target": target, "drafter": drafter, "placement": placement}
    start = partial(running.start_batch, **static)
    state = placement.shapes(jax.eval_shape(start, params, batch))

    def shapes(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=placement.everywhere
            ),
            tree,
        )

    return _Parts(params, state, shapes(batch), static)


def _variables(model: Decoder, placement: Placement, draft: bool) -> dict[str, Any]:
    placed = placement.parameters(parameter_shapes(model), model, draft=draft)
    flat = {
        path: jax.ShapeDtypeStruct(
            one.shape, jnp.dtype(model.dtype), sharding=placement.sharding(one)
        )
        for path, one in placed.items()
    }
    return {"params": traverse_util.unflatten_dict(flat, sep="/")}


def _logits(target: Decoder, placement: Placement, rows: int) -> Any:
    """Returns the shape of a plain step's logits, as the policy reads them."""
    shape = rows, target.vocab_size
    placed = placement.tensor("logits", shape, ("batch", "vocab"))
    where = placement.sharding(placed)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def _lying(shape: Any, form: Any) -> jax.ShapeDtypeStruct:
    """Returns a parameter's shape with the layout that the rounds chose for it."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=form)


def _device_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of shapes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        shard = leaf.sharding.shard_shape(leaf.shape)
        total += int(np.prod(shard)) * jnp.dtype(leaf.dtype).itemsize
    return total


def _memory(compiled: Any) -> dict[str, int]:
    found = compiled.memory_analysis()
    code = found.generated_code_size_in_bytes
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
        # The compiler's figure holds the program itself, unless it is 0.
        "temporaries": max(found.temp_size_in_bytes - code, 0),
        "code": code,
    }


def _round(text: str, parts: _Parts, depth: int) -> dict[str, Any]:
    """Returns what one round moves: as a whole, and its passes by themselves."""
    module = parse(text)
    slots = -(-parts.state.cache.capacity // SLOT_BLOCK)

    def trips(width: int) -> Any:
        def of(loop: Instruction) -> float | None:
            if "/over_cache/while" in loop.op_name:
                return slots
            if "/drafting/while" in loop.op_name:
                return depth - 1
            for one in (1, depth + 1):
                if loop.op_name.endswith(f"/width_{one}/while"):
                    return float(one == width)
            return None

        return of

    body = _loop(module, module.entry, "jit(_advance)/while").called("body")
    wide = Walk(module, trips(depth + 1))
    total = wide.computation(body)
    found = {"round": _told(total)}
    for width in (1, depth + 1):
        loop = _loop(module, body, f"/width_{width}/while")
        found[f"pass_{width}"] = _told(
            Walk(module, trips(width)).computation(loop.called("body"))
        )
    found["drafting"] = _told(_less(total, found[f"pass_{depth + 1}"]))
    return found


def _loop(module: Module, where: str, ending: str) -> Instruction:
    """Returns the loop of a computation whose place in the program ends so."""
    found = [
        one
        for one in module.computations[where].values()
        if one.opcode == "while" and one.op_name.endswith(ending)
    ]
    if not found:
        raise ValueError(f"the compiled program has no loop {ending} in {where}")
    return found[0]


def _less(total: Traffic, one: Mapping[str, Any]) -> Traffic:
    rest = Traffic(total.num_bytes - one["bytes_accessed"])
    for kind, size in total.collectives.items():
        rest.collectives[kind] = size - one["collectives"].get(kind, 0)
    return rest


def _told(traffic: Traffic) -> dict[str, Any]:
    return {
        "bytes_accessed": traffic.num_bytes,
        "collectives": dict(traffic.collectives),
        "moved": dict(sorted(traffic.moved.items(), key=lambda one: -one[1])[:8]),
    }


def main() -> int:
    """Reads a request, writes an answer; a user's mistake is one too."""
    request = json.load(sys.stdin)
    try:
        found: dict[str, Any] = {"answer": answer(request)}
    except (ValueError, OSError) as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

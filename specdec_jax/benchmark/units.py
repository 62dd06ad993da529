"""What is measured on: batches of equal shape, decoded by one engine or another."""

from collections.abc import Iterator, Sequence

import numpy as np

from specdec_jax import decode
from specdec_jax.benchmark import programs
from specdec_jax.decode import DecodeState
from specdec_jax.text.packing import Batch, Plan, Request, pack
from specdec_jax.text.running import Engine

TO_THE_END = 2**31 - 1
"""More rounds than any text takes."""


def batches(plan: Plan, batch_size: int) -> Iterator[tuple[list[Request], Batch]]:
    """Yields the batches of a plan, with the requests in each.

    All have the prompt slots of the widest, so that there is one program of each kind.
    """
    size = len(plan.requests)
    cuts = [(i, min(i + batch_size, size)) for i in range(0, size, batch_size)]
    packed = [pack(plan, range(first, last)) for first, last in cuts]
    width = max(batch.tokens.shape[1] for batch in packed)
    for (first, last), batch in zip(cuts, packed, strict=True):
        missing = width - batch.tokens.shape[1]
        tokens = np.pad(batch.tokens, ((0, 0), (0, missing)))
        yield plan.requests[first:last], batch._replace(tokens=tokens)


def run_rounds(
    engine: Engine,
    state: DecodeState,
    num_rounds: int = TO_THE_END,
    *,
    hold: bool = False,
    together: bool = False,
) -> tuple[programs.Tally, DecodeState]:
    """Runs `programs.decode_rounds`; the state is given up."""
    return programs.decode_rounds(
        engine.params,
        state,
        np.int32(num_rounds),
        np.bool_(hold),
        np.bool_(together),
        target=engine.target,
        drafter=engine.drafter,
        rule=engine.rule,
    )


def check_finite(state: DecodeState, indices: Sequence[int]) -> None:
    """Refuses a state in which a row ended for logits that are not numbers.

    Args:
      state: After a run.
      indices: Places of the prompts of its first rows.

    Raises:
      FloatingPointError: Naming the first such prompt.
    """
    broken = np.asarray(state.finish)[: len(indices)] == decode.ERROR
    if broken.any():
        raise FloatingPointError(
            f"the target's logits are not finite for prompt "
            f"{indices[int(broken.argmax())]}; check the checkpoint, or use "
            "dtype='float32' if it overflows in a smaller one"
        )

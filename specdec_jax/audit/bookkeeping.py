"""Identities that hold for the counts, budgets and ends of any run."""

import jax
import numpy as np

from specdec_jax import decode
from specdec_jax.decode import DecodeState


def bookkeeping_problems(state: DecodeState) -> list[str]:
    """Returns which identities a finished run breaks, as sentences; empty if none.

    Counts are of emitted tokens: each round emits some drafts and, unless it was cut,
    one token more; budgets are kept; nothing follows an end-of-text token.

    Args:
      state: Of rows that have run from their prompts to the end.
    """
    found: dict[str, int] = {}
    facts = jax.device_get(_facts(state))
    for row in range(len(state.tokens)):
        for problem in _row_problems({name: fact[row] for name, fact in facts.items()}):
            found.setdefault(problem, row)
    return [f"{problem} (row {row})" for problem, row in found.items()]


def _facts(state: DecodeState) -> dict:
    return {
        "tokens": state.tokens,
        "origin": state.origin,
        "start": state.prompt_length,
        "end": state.length,
        "limit": state.limit,
        "eos": state.eos_token_ids,
        "finish": state.finish,
        "rounds": state.counts.rounds,
        "drafted": state.counts.num_drafted,
        "accepted": state.counts.num_accepted,
        "histogram": state.counts.histogram,
    }


def _row_problems(row: dict) -> list[str]:
    tokens = row["tokens"][row["start"] : row["end"]]
    origin = row["origin"][row["start"] : row["end"]]
    ends = np.isin(tokens, row["eos"])
    cut = len(origin) > 0 and origin[-1] == decode.ACCEPTED
    by_rounds = row["accepted"] + row["rounds"] - cut
    finish = decode.EOS if ends.any() else decode.LENGTH
    checks = {
        "more tokens than the budget": row["end"] <= row["limit"],
        "tokens after the end-of-text token": not ends[:-1].any(),
        "the row ended for another reason than its text says": row["finish"] == finish,
        "a row that is not full has stopped": ends.any() or row["end"] >= row["limit"],
        "an emitted token has no origin": (origin > decode.PROMPT).all(),
        "accepted tokens and their origins differ in number": (
            (origin == decode.ACCEPTED).sum() == row["accepted"]
        ),
        "the histogram and the rounds differ": (
            row["histogram"].sum() == row["rounds"]
        ),
        "the histogram and the accepted tokens differ": (
            row["histogram"] @ np.arange(len(row["histogram"])) == row["accepted"]
        ),
        "emitted tokens are not accepted ones plus one a round": len(tokens)
        == by_rounds,
        "more drafts accepted than drafted": row["accepted"] <= row["drafted"],
    }
    return [problem for problem, holds in checks.items() if not holds]

"""`specdec theory`: the best draft length from two numbers, before anything is run."""

import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_jax.cli import show

SHOWN = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draft lengths of the printed table, besides the best one and its neighbours."""

LONGEST = 1024


def theory(
    alpha: Annotated[
        float,
        typer.Option(
            help="Chance that a drafted token is accepted, given that those before it "
            "were; 0 to 1."
        ),
    ],
    cost_ratio: Annotated[
        float,
        typer.Option(
            help="c, a target step over a draft step: 10 is a draft ten times cheaper."
        ),
    ],
    verify_slope: Annotated[
        float,
        typer.Option(
            help="Verifying K drafts takes 1 + slope * K plain steps of the target."
        ),
    ] = 0.0,
    max_num_draft_tokens: Annotated[
        int, typer.Option(help="Longest draft to consider.")
    ] = 64,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document.")
    ] = False,
) -> int:
    """Predicts the speedup of every draft length, and names the best."""
    config: dict[str, Any] = {
        "alpha": alpha,
        "cost_ratio": cost_ratio,
        "verify_slope": verify_slope,
        "max_num_draft_tokens": max_num_draft_tokens,
    }
    _check(**config)
    results = _predict(**config)
    results["verdict"] = _verdict(results, config)
    if as_json:
        show.document(**results, config=config)
    else:
        _print(results)
    return 0


def _check(
    alpha: float, cost_ratio: float, verify_slope: float, max_num_draft_tokens: int
) -> None:
    """Refuses what is no acceptance rate, no cost or no length."""
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"alpha is {alpha}; it must be from 0 to 1, the share of examined drafts "
            "that are accepted (0.8 for 80%)"
        )
    if not 0 < cost_ratio < math.inf:
        raise ValueError(
            f"cost_ratio is {cost_ratio}; it must be positive and finite: the time of "
            "a target step over that of a draft step"
        )
    if not 0 <= verify_slope < math.inf:
        raise ValueError(
            f"verify_slope is {verify_slope}; it must be finite and at least 0, which "
            "is free verification"
        )
    if not 1 <= max_num_draft_tokens <= LONGEST:
        raise ValueError(
            f"max_num_draft_tokens is {max_num_draft_tokens}; it must be from 1 to "
            f"{LONGEST}"
        )


def _predict(
    alpha: float, cost_ratio: float, verify_slope: float, max_num_draft_tokens: int
) -> dict[str, Any]:
    """Returns the curve and its peak as plain values for JSON."""
    import jax

    from specdec_jax import theory

    with jax.enable_x64(True):
        survival = theory.constant_survival(alpha, max_num_draft_tokens)
        verify_factor = theory.linear_verify_factor(verify_slope, max_num_draft_tokens)
        tokens = theory.expected_tokens(survival).tolist()
        speedup = theory.speedup(survival, cost_ratio, verify_factor)
        best = int(theory.best_num_draft_tokens(speedup))
        peak = float(
            theory.continuous_num_draft_tokens(alpha, cost_ratio, verify_slope)
        )
    table = [
        {"num_draft_tokens": k, "expected_tokens": tokens[k], "speedup": value}
        for k, value in enumerate(speedup.tolist())
    ]
    return {
        "best_num_draft_tokens": best,
        "speedup": table[best]["speedup"],
        # JSON has no infinity; null is a peak that never comes.
        "continuous_num_draft_tokens": peak if math.isfinite(peak) else None,
        "table": table,
    }


def _verdict(results: dict[str, Any], config: dict[str, Any]) -> str:
    """Says in a sentence or two what to do."""
    best, peak = (
        results["best_num_draft_tokens"],
        results["continuous_num_draft_tokens"],
    )
    if best == 0:
        bar = 1 / config["cost_ratio"] + config["verify_slope"]
        return (
            f"Do not speculate: a draft pays only if alpha is above 1/c + slope = "
            f"{bar:.3g}, and it is {config['alpha']:.3g}."
        )
    verdict = (
        f"Draft {best} token{'s' * (best > 1)} a round: {results['speedup']:.2f} times "
        "as fast as plain decoding."
    )
    if best == config["max_num_draft_tokens"] and (peak is None or peak > best):
        verdict += " It is the longest draft considered; longer ones may be faster."
    return verdict


def _print(results: dict[str, Any]) -> None:
    """Prints a part of the curve around its peak, and the verdict."""
    best = results["best_num_draft_tokens"]
    rows = results["table"]
    shown = {*SHOWN, best - 1, best, best + 1, len(rows) - 1}
    table = Table("K", "tokens a round", "speedup", "")
    for column in table.columns[:3]:
        column.justify = "right"
    for row in rows:
        k = row["num_draft_tokens"]
        if k in shown:
            values = (str(k), f"{row['expected_tokens']:.3f}", f"{row['speedup']:.3f}")
            mark = ("best", "bold green") if k == best else ("", None)
            table.add_row(*values, mark[0], style=mark[1])
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(results["verdict"])

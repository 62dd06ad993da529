"""`specdec plan`: what a pair would come to on a TPU slice, without one."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_jax.cli import options, show


def plan(
    target_config: Annotated[
        Path, typer.Option(help="Hugging Face's config.json of the target.")
    ],
    topology: Annotated[
        str, typer.Option(help="The slice, as v5e:2x4, v5p:2x2x1 or v6e:2x4.")
    ],
    draft_config: Annotated[
        Path | None, typer.Option(help="The same of the draft; without it, n-grams.")
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="How the slice is used, as data=1,model=8.")
    ] = "data=1,model=1",
    batch: Annotated[int, typer.Option(help="Rows in all.")] = 8,
    context: Annotated[
        int, typer.Option(help="The longest text, prompt and new tokens.")
    ] = 4096,
    num_draft_tokens: Annotated[
        int, typer.Option(help="Tokens drafted a round, K; at least 1.")
    ] = 4,
    dtype: options.Dtype = "bfloat16",
    draft_sharding: options.DraftSharding = "target",
    alpha: Annotated[
        float, typer.Option(help="Acceptance rate to assume; calibrate measures it.")
    ] = 0.7,
    as_json: options.AsJson = False,
) -> int:
    """Compiles for a TPU slice from configs: memory, traffic, and the K to use."""
    from specdec_jax.plan import plan as make_plan

    with show.status(f"compiling for {topology}"):
        found = make_plan(
            target_config,
            draft_config,
            topology=topology,
            mesh=mesh,
            batch_size=batch,
            context_length=context,
            num_draft_tokens=num_draft_tokens,
            dtype=dtype,
            draft_sharding=draft_sharding,
            alpha=alpha,
        )
    if as_json:
        show.document(**found)
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    """Prints what matters, of one chip."""
    memory, round_, told = found["hbm_bytes"], found["round"], found["predicted"]
    config = found["config"]
    table = Table("on each chip", "", title=f"{config['topology']}, {config['mesh']}")
    for name in ("weights", "cache", "temporaries", "total", "limit"):
        table.add_row(name, f"{memory[name] / 1e9:.2f} GB")
    left = memory["left"]
    told_left = f"{abs(left) / 1e9:.2f} GB"
    table.add_row("fits", f"yes, {told_left} are left" if left >= 0 else "no")
    if left < 0:
        table.add_row("too much", told_left)
    largest = found["largest"]
    table.add_row("largest batch, about", str(largest["batch_size"]))
    table.add_row("largest context, about", str(largest["context_length"]))
    table.add_row("a round moves", f"{round_['bytes_accessed'] / 1e9:.2f} GB")
    table.add_row("times the ideal", f"{round_['bytes_ratio']:.2f}")
    for kind, size in round_["collectives"].items():
        table.add_row(kind, f"{size / 1e6:.2f} MB a round")
    seconds = {name: f"{1e3 * one:.2f} ms" for name, one in told["seconds"].items()}
    table.add_row("plain step, verify, draft step", ", ".join(seconds.values()))
    table.add_row("cost ratio c", f"{told['cost_ratio']:.1f}")
    table.add_row("verify factor v(K)", f"{told['verify_factor']:.2f}")
    at = f"K = {config['num_draft_tokens']}, alpha = {told['alpha']:g}"
    table.add_row(f"speedup at {at}", f"{told['speedup']:.2f}")
    table.add_row("best K", str(told["best_num_draft_tokens"]))
    Console(highlight=False).print(table)

"""`specdec calibrate`: alpha, c and the draft length or tree to use, on your load."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_jax.cli import options, show
from specdec_jax.cli.environment import environment
from specdec_jax.cli.prompts import Entry, bundled_prompts, contents, read_all
from specdec_jax.text.pairing import DEFAULT_TARGET


def calibrate(
    target: options.Target = DEFAULT_TARGET,
    draft: options.Draft = None,
    compose: options.Compose = None,
    branching: options.Branching = None,
    draft_num_layers: options.DraftNumLayers = None,
    rule: options.Rule = None,
    allow_lossy: options.AllowLossy = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 64,
    batch_size: options.BatchSize = 1,
    repeats: Annotated[
        int, typer.Option(help="Timed runs of each draft length on each batch.")
    ] = 3,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    draft_sharding: options.DraftSharding = "target",
    cpu_devices: options.CpuDevices = None,
    figure: Annotated[
        Path | None, typer.Option(help="Where to draw it, such as calibration.png.")
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Measures draft lengths 0 to 16 on a load, and says which to use, if any.

    With --branching it drafts that tree, sees how often children of each rank are
    accepted, and measures the trees of up to 16 nodes that should be the fastest.
    """
    options.simulate_devices(cpu_devices)
    config = {
        "target": target,
        "draft": options.choose_draft(target, draft, draft_num_layers),
        "compose": compose,
        "draft_num_layers": draft_num_layers,
        "branching": options.read_tree(branching, "1")["branching"],
        **options.rule_facts(
            rule, allow_lossy, on_trees=bool(branching) or compose == "tree"
        ),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "repeats": repeats,
        "seed": seed,
        "dtype": dtype,
        "mesh": mesh,
        "draft_sharding": draft_sharding,
    }
    _check(config, figure)
    path = prompts or bundled_prompts()
    entries = read_all(path, num_prompts)
    config |= {"prompts": path.name, "num_prompts": len(entries)}
    results = _run(config, entries)
    if figure is not None:
        from specdec_jax.calibrate.figure import save_figure

        save_figure(results, figure, _title(config))
    if as_json:
        show.document(**results, config=config, environment=environment())
    else:
        _print(results, config)
    return 0


def _check(config: dict[str, Any], figure: Path | None) -> None:
    """Refuses what cannot be measured or drawn, before anything is loaded."""
    for name, least in (("max_new_tokens", 2), ("batch_size", 1), ("repeats", 1)):
        if config[name] < least:
            raise ValueError(f"{name} is {config[name]}; it must be at least {least}")
    if config["draft"] == "none":
        raise ValueError("draft is none, and there is nothing to calibrate; name one")
    if figure is not None:
        from specdec_jax.calibrate.figure import check_figure

        check_figure(figure)


def _run(config: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """Loads, measures and sums up."""
    from specdec_jax.calibrate import LENGTHS, calibrate
    from specdec_jax.sampling import Sampling

    sampling = Sampling(
        temperature=config["temperature"], top_k=config["top_k"], top_p=config["top_p"]
    )
    decoder = options.load_decoder(config, num_draft_tokens=max(LENGTHS))
    budget, size = config["max_new_tokens"], config["batch_size"]
    with show.progress(entries[::size]) as advance:
        found = calibrate(
            decoder,
            contents(decoder, entries, config["chat"]),
            lengths=LENGTHS,
            max_new_tokens=[entry.max_new_tokens or budget for entry in entries],
            sampling=sampling,
            seed=config["seed"],
            batch_size=size,
            repeats=config["repeats"],
            done=advance,
        )
    return found.summary()


def _print(results: dict[str, Any], config: dict[str, Any]) -> None:
    """Prints a row for each draft length, what it rests on, and the verdict."""
    trees = results.get("trees", {})
    columns = ["tokens/round", "v(K)", "overhead", "predicted", "measured", ""]
    columns = ["K", *(["levels"] if trees else []), *columns]
    table = Table(*columns, title=_title(config))
    for column in table.columns[:-2]:
        column.justify = "right"
    chosen = results["recommended_num_draft_tokens"]
    for k, speedup in results["measured_speedup"].items():
        low, high = results["measured_interval"][k]
        best = int(k) == chosen
        survival = results["survival_by_length"][k]
        table.add_row(
            k,
            *([str(len(survival))] if trees else []),
            f"{1 + sum(survival):.2f}",
            f"{results['verify_factor'][k]:.2f}",
            f"{1e3 * results['overhead_seconds'][k]:.2f} ms",
            f"{results['predicted_speedup'][k]:.2f}",
            f"{speedup:.2f} ({low:.2f} to {high:.2f})",
            "use" if best else "",
            style="bold green" if best else None,
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    lines = {
        "alpha": "{alpha[value]:.3f} ({alpha[low]:.3f} to {alpha[high]:.3f} over "
        "prompts)",
        "cost ratio c": "{cost_ratio:.1f}",
    }
    for name, line in lines.items():
        console.print(f"{name:20}{line.format(**results)}")
    console.print(
        f"{'a plain step':20}{1e3 * results['step_seconds']:.3f} ms; a drafted "
        f"{'level' if trees else 'token'} {1e3 * results['draft_step_seconds']:.3f} ms"
    )
    if trees:
        ranks = ", ".join(f"{rate:.2f}" for rate in results["rank_acceptance"])
        console.print(f"{'accepted by rank':20}{ranks}")
    console.print(results["verdict"])
    if results.get("recommended_tree"):
        console.print(f"The tree of it: {_asked(results['recommended_tree'])}")


def _asked(parents: list[int]) -> str:
    """Returns the options that ask for a tree.

    Example:
      >>> _asked([-1, -1, 0]), _asked([-1, 0, 1])
      ('--branching -1,-1,0', 'a chain, --num-draft-tokens 3')
    """
    if parents == list(range(-1, len(parents) - 1)):
        return f"a chain, --num-draft-tokens {len(parents)}"
    return f"--branching {','.join(map(str, parents))}"


def _title(config: dict[str, Any]) -> str:
    policy = f"temperature {config['temperature']:g}"
    for name in ("top_k", "top_p"):
        if config[name] is not None:
            policy += f", {name} {config[name]:g}"
    target = Path(config["target"]).name
    draft = options.told_drafts(config)
    if isinstance(config["draft"], str):
        draft = Path(draft).name
    lossy = "" if config["lossless"] else f"{options.told_rule(config)}, "
    return (
        f"{target}, draft {draft}, batch {config['batch_size']}, {policy}, {lossy}"
        f"{config['num_prompts']} prompts of up to {config['max_new_tokens']} tokens"
    )

"""`specdec bench`: does speculation pay here, and what would the cost model say."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_jax.cli import options, show
from specdec_jax.cli.environment import environment
from specdec_jax.cli.prompts import Entry, bundled_prompts, contents, read_all
from specdec_jax.text.pairing import DEFAULT_TARGET


def bench(
    target: options.Target = DEFAULT_TARGET,
    draft: options.Draft = None,
    compose: options.Compose = None,
    draft_num_layers: options.DraftNumLayers = None,
    num_draft_tokens: options.NumDraftTokens = "4",
    branching: options.Branching = None,
    rule: options.Rule = None,
    allow_lossy: options.AllowLossy = False,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 64,
    batch_size: options.BatchSize = 1,
    repeats: Annotated[
        int, typer.Option(help="Timed runs of each arm on each batch.")
    ] = 5,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    draft_sharding: options.DraftSharding = "target",
    cpu_devices: options.CpuDevices = None,
    against: Annotated[
        str | None,
        typer.Option(help="transformers: also time its plain and assisted decoding."),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Times plain and speculative decoding in turns, and what each part costs."""
    options.simulate_devices(cpu_devices)
    config = {
        "target": target,
        "draft": options.choose_draft(target, draft, draft_num_layers),
        **options.draft_facts(
            compose=compose,
            draft_num_layers=draft_num_layers,
            num_draft_tokens=num_draft_tokens,
            branching=branching,
            rule=rule,
            allow_lossy=allow_lossy,
        ),
        "temperature": temperature,
        "top_p": top_p,
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "repeats": repeats,
        "seed": seed,
        "dtype": dtype,
        "mesh": mesh,
        "draft_sharding": draft_sharding,
        "against": against,
    }
    _check(config)
    path = prompts or bundled_prompts()
    entries = read_all(path, num_prompts)
    config |= {"prompts": path.name, "num_prompts": len(entries)}
    results = _run(config, entries)
    if as_json:
        show.document(**results, config=config, environment=environment())
    else:
        _print(results, config)
    return 0


def _check(config: dict[str, Any]) -> None:
    """Refuses what cannot be measured, before anything is loaded."""
    options.check_lengths(config)
    for name in ("max_new_tokens", "batch_size", "repeats"):
        if config[name] < 1:
            raise ValueError(f"{name} is {config[name]}; it must be at least 1")
    if config["draft"] == "none":
        raise ValueError(
            "draft is none, but bench compares a draft with none; name one"
        )
    against = config["against"]
    if against not in (None, "transformers"):
        raise ValueError(f"against is {against!r}; offered is transformers")
    if against and config["compose"]:
        raise ValueError(
            "--against transformers knows one draft, and "
            f"{options.told_drafts(config)} are several; give one"
        )
    if against and (config["temperature"] != 0 or config["batch_size"] != 1):
        raise ValueError(
            f"--against transformers compares greedy texts, one prompt at a time, got "
            f"temperature {config['temperature']} and batch_size "
            f"{config['batch_size']}; use 0 and 1"
        )


def _run(config: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """Loads, measures and sums up."""
    from specdec_jax.benchmark import compare
    from specdec_jax.sampling import Sampling

    sampling = Sampling(temperature=config["temperature"], top_p=config["top_p"])
    decoder = options.load_decoder(config)
    rivals = {}
    if config["against"]:
        from specdec_jax.benchmark import transformers

        names = ("num_draft_tokens", "draft_num_layers", "dtype")
        with show.status("loading transformers"):
            rivals = transformers.load_rivals(
                config["target"],
                config["draft"],
                **{name: config[name] for name in names},
            )
    budget = config["max_new_tokens"]
    with show.progress(entries) as advance:
        report = compare(
            decoder,
            contents(decoder, entries, config["chat"]),
            max_new_tokens=[entry.max_new_tokens or budget for entry in entries],
            sampling=sampling,
            seed=config["seed"],
            batch_size=config["batch_size"],
            repeats=config["repeats"],
            rivals=rivals,
            time_compiling=True,
            done=advance,
        )
    results: dict[str, Any] = report.summary()
    if rivals:
        results["transformers"] = transformers.summary(report, decoder.engine)
    return results


def _print(results: dict[str, Any], config: dict[str, Any]) -> None:
    """Prints what matters as a table and lines."""
    table = Table("", "tokens/s", "slowest", "fastest", title=_title(config))
    for name in ("plain", "speculative"):
        arm = results[name]
        rates = (arm["tokens_per_second"], min(arm["by_repeat"]), max(arm["by_repeat"]))
        table.add_row(name, *(f"{rate:.1f}" for rate in rates))
    others = results.get("transformers", {})
    for name in ("plain", "assisted") if others else ():
        rate = others[f"{name}_tokens_per_second"]
        table.add_row(f"transformers, {name}", f"{rate:.1f}", "", "")
    console = Console(highlight=False)
    console.print(table)
    lines = {
        "speedup": "{speedup:.2f} (over prompts {speedup_low:.2f} to "
        "{speedup_high:.2f})",
        "predicted": "{predicted_speedup:.2f}",
        "tokens a round": "{mean_acceptance_length:.2f}, a draft in "
        "{wide_round_share:.0%} of rounds",
        "verify factor v(K)": "{verify_factor:.2f}",
        "cost ratio c": "{cost_ratio:.1f}",
        "compiling": "{cold_compile_seconds:.1f} s cold, {warm_compile_seconds:.1f} s "
        "warm",
    }
    for name, line in lines.items():
        console.print(f"{name:20}{line.format(**results)}")
    if others:
        counts = "{texts_equal} of {texts_compared} texts equal, {near_ties} near-ties"
        console.print(f"{'against it':20}{counts.format(**others)}")


def _title(config: dict[str, Any]) -> str:
    return (
        f"{config['target']}, draft {options.told_drafts(config)}, K "
        f"{config['num_draft_tokens']}, rule {options.told_rule(config)}, "
        f"batch {config['batch_size']}, "
        f"{config['num_prompts']} prompts of up to "
        f"{config['max_new_tokens']} new tokens"
    )

"""`specdec audit`: did the text's distribution move, and would we have noticed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec_jax.cli import options, show
from specdec_jax.cli.environment import environment
from specdec_jax.cli.prompts import Entry, bundled_prompts, contents, read_all
from specdec_jax.text.pairing import DEFAULT_TARGET

SHOWN_DIFFERENCES = 5

_VERDICTS = {"lossless": "bold green", "not lossless": "bold red"}


def audit(
    target: options.Target = DEFAULT_TARGET,
    draft: options.Draft = None,
    compose: options.Compose = None,
    draft_num_layers: options.DraftNumLayers = None,
    num_draft_tokens: options.NumDraftTokens = "4",
    branching: options.Branching = None,
    rule: options.Rule = None,
    allow_lossy: options.AllowLossy = False,
    temperature: Annotated[
        float,
        typer.Option(help="Of the sampled text; 0 leaves out the level statistics."),
    ] = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    prompts: options.Prompts = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="exact_law, enumeration, statistics or identity; repeatable, all by "
            "default."
        ),
    ] = None,
    num_samples: Annotated[
        int, typer.Option(help="Rows that the level statistics draws.")
    ] = 1024,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Audit another engine's records instead: an npz file with token [R], "
            'p [R, V] and q [R, V], or JSON lines {"token": 5, "p": [...], "q": '
            "[...]}. One record for each place that was drafted and examined: the "
            "token that the text has there, the target's policy p and the draft's law "
            "q, as probabilities over the vocabulary."
        ),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(help="Plant one fault in a small model and see what catches it."),
    ] = None,
    all_faults: Annotated[
        bool, typer.Option("--all-faults", help="Plant every fault in turn.")
    ] = False,
    as_json: options.AsJson = False,
) -> int:
    """Audits whether speculative text has the target's distribution.

    Exit code 0: lossless. 1: not lossless, or inconclusive (the sample was too small
    for its silence to mean anything). 2: bad input. With --fault and --all-faults a
    fault that no level catches is inconclusive; --all-faults is lossless when every
    fault was caught and every right rule let pass.
    """
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
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "dtype": dtype,
        "levels": _levels(level),
        "num_samples": num_samples,
    }
    _check(config, records, fault, all_faults)
    from specdec_jax.compilation import enable_compilation_cache

    enable_compilation_cache()
    if fault or all_faults:
        config, found = {}, _plant([fault] if fault else None)
    elif records is not None:
        config = {"records": records.name, "seed": seed}
        found = _audit_records(records, seed)
    else:
        path = prompts or bundled_prompts()
        entries = read_all(path)
        config |= {"prompts": path.name, "num_prompts": len(entries)}
        found = _audit(config, entries)
    if as_json:
        show.document(**found, config=config, environment=environment())
    else:
        _print(found, config)
    return 0 if found["verdict"] == "lossless" else 1


def _levels(level: Sequence[str] | None) -> list[str] | None:
    return [name.replace("-", "_") for name in level] if level else None


def _check(
    config: dict[str, Any], records: Path | None, fault: str | None, all_faults: bool
) -> None:
    """Refuses what cannot be audited, before anything is loaded."""
    options.check_lengths(config)
    if config["num_samples"] < 1:
        raise ValueError(
            f"num_samples is {config['num_samples']}; it must be at least 1"
        )
    if config["draft"] == "none":
        raise ValueError(
            "draft is none, and plain decoding is what audit compares with; name one"
        )
    if (records is not None) + (fault is not None) + all_faults > 1:
        raise ValueError(
            "--records, --fault and --all-faults audit different things; give one"
        )
    if config["levels"] and (records is not None or fault or all_faults):
        raise ValueError(
            "--level chooses among the levels of an audit of models; it does not go "
            "with --records, --fault and --all-faults"
        )


def _audit(config: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """Loads the pair and runs the levels."""
    import jax.numpy as jnp

    from specdec_jax.audit import Subject, check_levels
    from specdec_jax.audit import audit as run_levels
    from specdec_jax.sampling import Sampling

    check_levels(config["levels"])
    sampling = Sampling.from_options(
        {name: config[name] for name in ("temperature", "top_k", "top_p")}
    )
    decoder = options.load_decoder(config)
    budget = 32
    prompts = [
        decoder.encode(content, budget) for content in contents(decoder, entries, False)
    ]
    with show.status("auditing"):
        report = run_levels(
            Subject.of(decoder),
            prompts,
            sampling,
            levels=config["levels"],
            num_samples=config["num_samples"],
            max_new_tokens=budget,
            eos_token_ids=decoder.eos_token_ids,
            seed=config["seed"],
            dtype=jnp.dtype(config["dtype"]),
            announce=lambda power: show.note(f"statistics: {power}"),
        )
    return {**report.document(), "faults": []}


def _audit_records(path: Path, seed: int) -> dict[str, Any]:
    from specdec_jax.audit import Report, audit_records, read_records

    evidence = audit_records(
        read_records(path),
        seed=seed,
        announce=lambda power: show.note(f"records: {power}"),
    )
    return {**Report(statistics=evidence).document(), "faults": []}


def _plant(names: list[str | None] | None) -> dict[str, Any]:
    """Plants faults, one or all, and says what they came to."""
    from specdec_jax.audit import Report, faults

    chosen = list(faults.FAULTS) if names is None else names
    outcomes = []
    with show.progress(chosen) as advance:
        for name in chosen:
            outcomes.append(faults.run_fault(str(name)))
            advance()
    blamed = {} if names else {n: faults.run_control(n) for n in faults.CONTROLS}
    missed = [one.name for one in outcomes if not one.caught]
    reasons = [f"no level catches {name!r}" for name in missed]
    reasons += [f"{level} objects to {n!r}" for n, level in blamed.items() if level]
    verdict = "inconclusive" if reasons else "lossless"
    if names and not reasons and outcomes[0].kind != faults.EFFICIENCY:
        verdict, reasons = "not lossless", [f"{outcomes[0].level} objects"]
    return {
        **Report().document(),
        "verdict": verdict,
        "reasons": reasons,
        "faults": [
            {
                "name": one.name,
                "class": one.kind,
                "caught": one.caught,
                "level": one.level,
            }
            for one in outcomes
        ],
        "controls": [
            {"name": name, "passed": level is None} for name, level in blamed.items()
        ],
    }


def _print(found: dict[str, Any], config: dict[str, Any]) -> None:
    """Prints a table a level and the verdict."""
    console = Console(highlight=False)
    for name in ("exact_law", "enumeration", "statistics", "identity"):
        if found[name] is not None:
            title = "records" if "records" in config else name.replace("_", " ")
            console.print(_table(title, _LINES[name](found[name])))
    if found["faults"]:
        table = Table("fault", "class", "caught by")
        for one in found["faults"]:
            level = one["level"] if one["caught"] else "[bold red]nothing"
            table.add_row(one["name"], one["class"], level)
        console.print(table)
        passed = [one["name"] for one in found["controls"] if one["passed"]]
        if passed:
            console.print(f"right rules let pass: {', '.join(passed)}")
    for line in [*found["reasons"], *found["warnings"]]:
        console.print(f"- {line}")
    verdict = found["verdict"]
    style = _VERDICTS.get(verdict, "bold yellow")
    console.print(f"[{style}]{verdict}[/]: {_subject(found, config)}")


def _table(title: str, lines: dict[str, str]) -> Table:
    table = Table("", "", title=title, show_header=False, title_justify="left")
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _exact_law_lines(found: dict[str, Any]) -> dict[str, str]:
    return {
        "contexts": str(found["num_contexts"]),
        "largest deviation": f"{found['max_deviation']:.1e}",
    }


def _enumeration_lines(found: dict[str, Any]) -> dict[str, str]:
    return {name: f"{value:.1e}" for name, value in found["by_rule"].items()}


def _statistics_lines(found: dict[str, Any]) -> dict[str, str]:
    lines = {name: f"p = {value:.3g}" for name, value in found["tests"].items()}
    lines["together, corrected"] = f"p = {found['p_value']:.3g}"
    lines["tokens"] = str(found["num_tokens"])
    for name, value in found["power_by_fault"].items():
        lines[f"power: {name}"] = f"{value:.3f}"
    if found["draft_deviation"] is not None:
        lines["draft's law, told against own"] = f"{found['draft_deviation']:.1e}"
    return lines


def _identity_lines(found: dict[str, Any]) -> dict[str, str]:
    lines = {
        "texts identical": str(found["identical"]),
        "near-ties": f"{found['near_ties']} (gap below {found['near_tie_below']:.1e})",
        "mismatches": str(found["mismatches"]),
        "agreement": "{mean:.1%} of tokens, from {lowest:.1%} to {highest:.1%} of a "
        "text".format(**found["agreement"]),
        "rounding": f"{found['rounding']:.1e} nats",
    }
    for one in found["differences"][:SHOWN_DIFFERENCES]:
        kind = "near-tie" if one["near_tie"] else "real difference"
        place = f"{one['way']}, prompt {one['prompt']}, token {one['position']}"
        lines[place] = f"{kind}: gap {one['margin']:.1e}"
    return lines


_LINES = {
    "exact_law": _exact_law_lines,
    "enumeration": _enumeration_lines,
    "statistics": _statistics_lines,
    "identity": _identity_lines,
}


def _subject(found: dict[str, Any], config: dict[str, Any]) -> str:
    """Says what the verdict is about."""
    if found["faults"]:
        caught = sum(one["caught"] for one in found["faults"])
        return f"{caught} of {len(found['faults'])} planted faults caught."
    if "records" in config:
        return f"the records of {config['records']}."
    return (
        f"{config['target']} with draft {options.told_drafts(config)}, K "
        f"{config['num_draft_tokens']}, rule {options.told_rule(config)}, "
        f"{config['dtype']}."
    )

"""`specdec generate`: text for prompts from the command line or from a file."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from specdec_jax.cli import options, show
from specdec_jax.cli.environment import environment
from specdec_jax.cli.prompts import Entry, Problem, read_prompts
from specdec_jax.text.pairing import DEFAULT_TARGET

DEFAULT_PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
"""What a run without any prompt goes on with."""


def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Texts to go on with.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: {"prompt": ...} or {"messages": [...]}.'),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where --prompts writes; stdout by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what --output has already.")
    ] = False,
    target: options.Target = DEFAULT_TARGET,
    draft: options.Draft = None,
    compose: options.Compose = None,
    draft_num_layers: options.DraftNumLayers = None,
    num_draft_tokens: options.NumDraftTokens = "4",
    branching: options.Branching = None,
    rule: options.Rule = None,
    allow_lossy: options.AllowLossy = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    draft_temperature: Annotated[
        float | None, typer.Option(help="The draft's own; the target's by default.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a text; repeatable.")
    ] = None,
    seed: options.Seed = 0,
    chat: options.Chat = False,
    dtype: options.Dtype = "float32",
    batch_size: Annotated[
        int, typer.Option(help="Prompts decoded together at the most.")
    ] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a page of every token's decision to this HTML file."),
    ] = None,
    mesh: options.Mesh = None,
    draft_sharding: options.DraftSharding = "target",
    cpu_devices: options.CpuDevices = None,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    distributed: options.Distributed = False,
    as_json: options.AsJson = False,
) -> int:
    """Goes on with prompts, drafting and verifying; greedy unless told otherwise."""
    from specdec_jax.sampling import Sampling

    options.simulate_devices(cpu_devices)
    options.join_processes(coordinator, num_processes, process_id, distributed)
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    draft_sampling = None
    if draft_temperature is not None:
        draft_sampling = dataclasses.replace(sampling, temperature=draft_temperature)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    job = _Job(
        target=target,
        draft=options.choose_draft(target, draft, draft_num_layers),
        options={
            **options.draft_facts(
                compose=compose,
                draft_num_layers=draft_num_layers,
                num_draft_tokens=num_draft_tokens,
                branching=branching,
                rule=rule,
                allow_lossy=allow_lossy,
            ),
            "dtype": dtype,
            "mesh": mesh,
            "draft_sharding": draft_sharding,
        },
        settings={
            "sampling": sampling,
            "draft_sampling": draft_sampling,
            "seed": seed,
            "stop": tuple(stop or ()),
        },
        max_new_tokens=max_new_tokens,
        chat=chat,
        batch_size=batch_size,
        trace=_writable(trace),
    )
    entries, problems = _entries(prompt, prompts, chat)
    if prompts is None and output is not None:
        raise ValueError("--output goes with --prompts")
    if resume and output is None:
        raise ValueError("--resume goes with --output, the file to go on with")
    return _run(job, entries, problems, prompts, output, resume, as_json)


class _Job(NamedTuple):
    """What is to be decoded with what."""

    target: str
    draft: Any
    options: dict[str, Any]
    """Further arguments of `from_pretrained`."""
    settings: dict[str, Any]
    """Arguments of `plan` that are the same for all prompts."""
    max_new_tokens: int
    chat: bool
    batch_size: int
    trace: Path | None

    def describe(self) -> dict[str, Any]:
        """Returns everything that decides the texts, as plain values for JSON."""
        sampling, draft = self.settings["sampling"], self.settings["draft_sampling"]
        return {
            "target": self.target,
            "draft": self.draft,
            **self.options,
            "sampling": dataclasses.asdict(sampling),
            "draft_temperature": None if draft is None else draft.temperature,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.settings["stop"]),
            "seed": self.settings["seed"],
            "chat": self.chat,
            "batch_size": self.batch_size,
        }

    def decides(self) -> dict[str, Any]:
        """Returns what decides the tokens: not how they are spread over devices."""
        spread = ("batch_size", "mesh", "draft_sharding")
        told = {k: v for k, v in self.describe().items() if k not in spread}
        for name in ("compose", "branching"):
            if told[name] is None:  # files from before there was one go on
                del told[name]
        return told


def _entries(
    prompt: list[str] | None, path: Path | None, chat: bool
) -> tuple[list[Entry], list[Problem]]:
    if path is not None:
        if prompt:
            raise ValueError("give prompts on the command line or --prompts, not both")
        return read_prompts(path)
    texts = prompt or [DEFAULT_PROMPT]
    return [Entry(0, i, text, chat, None) for i, text in enumerate(texts)], []


def _run(
    job: _Job,
    entries: list[Entry],
    problems: list[Problem],
    path: Path | None,
    output: Path | None,
    resume: bool,
    as_json: bool,
) -> int:
    """Loads, compiles, decodes and writes; returns the exit code."""
    from specdec_jax.dataset import Journal, fingerprint, record

    journal = None
    if output is not None:
        journal = Journal(output, fingerprint(job.decides()), resume=resume)
    timing: dict[str, float] = {}
    with show.clock(timing, "load_seconds"):
        decoder = _load(job)
    plan, entries, misfits = _plan(decoder, job, entries, tolerant=path is not None)
    problems = sorted([*problems, *misfits])
    for problem in problems:
        show.note(f"{path}: line {problem.line}: {problem.message}")
    if journal is not None:
        plan = journal.rest(plan, [entry.content for entry in entries])
        if resume:
            there = len(entries) - len(plan.requests)
            show.note(f"{there} of {len(entries)} were there")
    with show.status("compiling"), show.clock(timing, "compile_seconds"):
        traced = job.trace is not None
        decoder.compile(plan, batch_size=job.batch_size, trace=traced)

    contents = {entry.index: entry.content for entry in entries}
    texts = path is None and not as_json
    live = texts and len(entries) == 1 and show.is_terminal()
    pieces, results = [], []
    looks = 1 if live else 4 if texts or plan.stop else None
    with show.progress(plan.requests) as done, journal or nullcontext():
        with show.clock(timing, "decode_seconds"):
            for piece in decoder.run(
                plan,
                batch_size=job.batch_size,
                rounds_per_look=looks,
                trace=traced,
            ):
                if texts:
                    pieces.append(piece)
                if live:
                    show.piece(piece)
                result = piece.result
                if result is None:
                    continue
                results.append(result)
                if journal is not None:
                    journal.append(result, contents[result.index])
                elif path is not None and not as_json:
                    show.line(record(result, contents[result.index]))
                done(result.num_tokens)
    results.sort(key=lambda result: result.index)
    if job.trace is not None:
        _write_page(job, results, decoder.tokenizer)
    tokens = sum(result.num_tokens for result in results)
    timing["tokens_per_second"] = tokens / max(timing["decode_seconds"], 1e-9)
    if as_json:
        show.document(
            requests=[record(r, contents[r.index]) for r in results],
            timing=timing,
            config=job.describe(),
            environment=environment(),
        )
    elif texts:
        show.texts(pieces, live)
    if not as_json:
        show.summary(results, timing["tokens_per_second"])
    _complain(results, problems, len(entries) + len(problems))
    return 0


def _writable(path: Path | None) -> Path | None:
    """Returns the path; a file that cannot be written is an error before the work."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"--trace {path}: there is no folder {path.parent}")
    return path


def _write_page(job: _Job, results: list[Any], tokenizer: Any) -> None:
    from specdec_jax.text.page import page

    assert job.trace is not None
    told = job.describe()
    facts = {name: told[name] for name in ("target", "seed")}
    facts["rule"] = options.told_rule(told)
    facts["draft"] = options.told_drafts(told)
    facts["draft tokens a round"] = told["num_draft_tokens"]
    settings = told["sampling"].items()
    default = dataclasses.asdict(type(job.settings["sampling"])())
    facts |= {name: value for name, value in settings if value != default[name]}
    job.trace.write_text(page(results, tokenizer, settings=facts), encoding="utf-8")
    show.note(f"wrote {job.trace}")


def _load(job: _Job) -> Any:
    """Loads the checkpoints; a missing bundled one is told what to use instead."""
    try:
        return options.load_decoder(
            {"target": job.target, "draft": job.draft, **job.options}
        )
    except FileNotFoundError as error:
        if job.target != DEFAULT_TARGET:
            raise
        raise FileNotFoundError(
            f"{error}; the default target is bundled with the library and not here: "
            "try --target smollm2-135m, a folder or a hub id"
        ) from None


def _plan(
    decoder: Any, job: _Job, entries: list[Entry], *, tolerant: bool
) -> tuple[Any, list[Entry], list[Problem]]:
    """Tokenises the entries; those that cannot be used are left out if `tolerant`."""
    kept, prompts, budgets, misfits = [], [], [], []
    for entry in entries:
        budget = entry.max_new_tokens or job.max_new_tokens
        try:
            prompt = entry.content
            if entry.is_chat or job.chat:
                prompt = decoder.chat_prompt(prompt)
            decoder.encode(prompt, max(budget, 1))
        except ValueError as error:
            if not tolerant:
                raise
            misfits.append(Problem(entry.line, str(error)))
            continue
        kept.append(entry)
        prompts.append(prompt)
        budgets.append(budget)
    plan = decoder.plan(
        prompts,
        max_new_tokens=budgets,
        indices=[entry.index for entry in kept],
        **job.settings,
    )
    return plan, kept, misfits


def _complain(results: list[Any], problems: list[Problem], size: int) -> None:
    """Raises for what went wrong, now that everything else is written."""
    from specdec_jax.text.results import NonFiniteLogitsError

    if any(result.finish_reason == "error" for result in results):
        raise NonFiniteLogitsError(results)
    if problems:
        first = problems[0]
        raise ValueError(
            f"{len(problems)} of {size} prompts could not be used, first line "
            f"{first.line}: {first.message}; all others are done"
        )

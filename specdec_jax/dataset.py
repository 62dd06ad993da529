"""Data sets: results are on disk as they come, and a run that stopped can go on.

A file of results has one JSON object a line, in the order in which requests finished
while it grows and in the data set's order once all of them are there. Each line carries
its request's place (`index`) and a mark of the run (`run`), so that a run that was
killed finds what it has:

    {"index": 2, "prompt": ..., "token_ids": [...], ..., "run": "51fe9a0c33d1"}
    {"index": 0, "prompt": ..., "token_i            <- cut by the kill: decoded again

A request's tokens depend on its place, prompt and settings alone, so the file of a run
that was stopped and gone on with is that of one that was not.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from specdec_jax.text import SpeculativeDecoder
from specdec_jax.text.decoder import ROUNDS_PER_LOOK
from specdec_jax.text.packing import Plan
from specdec_jax.text.requests import Prompt, as_prompts
from specdec_jax.text.results import NonFiniteLogitsError, Result


class Journal:
    """A file of results that grows by whole lines.

    Of several processes the first one writes; the others follow what it has.

    Args:
      path: The file.
      run: Mark of everything that decides the tokens; see `fingerprint`.
      resume: Whether to go on with what is in the file. A last line that was cut is
        dropped.

    Raises:
      FileExistsError: The file has something in it, and `resume` is false.
      ValueError: A line is no result, or is of a run with other settings.
    """

    def __init__(self, path: Path, run: str, *, resume: bool = False):
        self._path, self._run = path, run
        self._lines: dict[int, Any] = {}
        self._writes = jax.process_index() == 0
        self._file: Any = None
        if self._writes and path.exists() and path.stat().st_size:
            if not resume:
                raise FileExistsError(
                    f"{path} has results already; go on with them (--resume), or "
                    "write to another file"
                )
            self._read()

    def _read(self) -> None:
        """Reads the lines that are whole, and cuts off one that is not."""
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            where = f"{self._path}: line {number}"
            try:
                data = json.loads(line)
                index, run, prompt = data["index"], data["run"], data["prompt"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{where} is no result of a run: {error!r}") from None
            if run != self._run:
                raise ValueError(
                    f"{where} is of a run with other settings ({run}, this one is "
                    f"{self._run}); resume with the same ones, or write to another file"
                )
            self._lines[index] = prompt
        if whole < len(content):
            os.truncate(self._path, whole)

    def rest(self, plan: Plan, prompts: Sequence[Any]) -> Plan:
        """Returns the plan without the requests whose results are in the file.

        Args:
          plan: All requests.
          prompts: Of each request, as it is written to the file.

        Raises:
          ValueError: The file has another prompt at a request's place.
        """
        done = np.zeros(len(prompts), bool)
        for place, request in enumerate(plan.requests):
            if request.index not in self._lines:
                continue
            if self._lines[request.index] != prompts[place]:
                raise ValueError(
                    f"{self._path} has another prompt at index {request.index}; "
                    "resume with the same prompts, or write to another file"
                )
            done[place] = True
        if jax.process_count() > 1:
            done = np.asarray(multihost_utils.broadcast_one_to_all(done))
        return plan.select(np.flatnonzero(~done).tolist())

    def append(self, result: Result, prompt: Any) -> None:
        """Writes a result; it is safe from the death of this process afterwards."""
        if not self._writes:
            return
        line = record(result, prompt) | {"run": self._run}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> "Journal":
        """Opens the file."""
        if self._writes:
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Closes the file; if all went well, puts it into the data set's order."""
        if not self._writes:
            return
        self._file.close()
        if kind is None:
            self._sort()

    def _sort(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        order = [json.loads(line)["index"] for line in lines]
        if order != sorted(order):
            aside = self._path.with_name(self._path.name + ".sorted")
            places = sorted(range(len(lines)), key=order.__getitem__)
            aside.write_bytes(b"".join(lines[place] for place in places))
            os.replace(aside, self._path)


class Summary(NamedTuple):
    """What a call of `decode_dataset` did."""

    num_requests: int
    """Requests decoded by this call; those found in the file are not among them."""
    num_tokens: int
    seconds: float
    """Of decoding, compiling included."""


def decode_dataset(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    path: str | Path,
    *,
    batch_size: int = 8,
    resume: bool = False,
    rounds_per_look: int | None = None,
    done: Callable[[Result], None] = lambda result: None,
    **settings: Any,
) -> Summary:
    """Decodes a data set into a file, with the batch full to the end.

    Rows that finish make room for the next prompts between rounds, without compiling
    anew. A request's tokens are those that `generate` gives it alone. With several
    processes each calls this with the same arguments, and the first one writes.

    Args:
      decoder: What decodes; its rule decides whether the texts are lossless.
      prompts: Texts or lists of token ids. Request i uses `fold_in(key(seed), i)`.
      path: The file of results; see the module.
      batch_size: Rows of the batch.
      resume: Whether to go on with what is in the file.
      rounds_per_look: Rounds between two looks of the host; None looks when rows are to
        be refilled, or every 4 rounds with stop strings.
      done: Called with each result, after it was written.
      **settings: What `SpeculativeDecoder.plan` takes: max_new_tokens, sampling,
        draft_sampling, seed, eos_token_id, min_new_tokens, stop.

    Raises:
      ValueError: Something asked for is impossible, or the file is of another run.
      FileExistsError: The file has something in it, and `resume` is false.
      NonFiniteLogitsError: After everything else was decoded and written.
    """
    prompts = as_prompts(prompts)
    plan = decoder.plan(prompts, **settings)
    if rounds_per_look is None and plan.stop:
        rounds_per_look = ROUNDS_PER_LOOK
    engine = decoder.engine
    parts = (engine.target, engine.drafter, engine.rule)
    run = fingerprint({"parts": [str(part) for part in parts], **settings})
    start, num_tokens, broken = time.perf_counter(), 0, []
    with Journal(Path(path), run, resume=resume) as journal:
        plan = journal.rest(plan, prompts)
        for piece in decoder.run(
            plan, batch_size=batch_size, rounds_per_look=rounds_per_look
        ):
            result = piece.result
            if result is None:
                continue
            journal.append(result, prompts[result.index])
            done(result)
            num_tokens += result.num_tokens
            if result.finish_reason == "error":
                broken.append(result)
    if broken:
        raise NonFiniteLogitsError(broken)
    seconds = time.perf_counter() - start
    return Summary(len(plan.requests), num_tokens, seconds)


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Returns a short mark of settings: equal for equal ones, in any process.

    Example:
      >>> fingerprint({"seed": 0, "stop": ()})
      '2c54f2f5a7ad'
    """
    told = repr(sorted(settings.items(), key=lambda item: item[0]))
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def record(result: Result, prompt: Any) -> dict[str, Any]:
    """Returns a result as plain values for JSON.

    Args:
      result: A `Result`.
      prompt: The prompt as the user gave it.
    """
    return {
        "index": result.index,
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "num_tokens": result.num_tokens,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "finish_reason": result.finish_reason,
        "rounds": result.rounds,
        "num_drafted": result.num_drafted,
        "num_accepted": result.num_accepted,
        "acceptance_histogram": result.acceptance_histogram,
        "mean_acceptance_length": result.mean_acceptance_length,
        "draft_acceptance_rate": result.draft_acceptance_rate,
        "logprobs": result.logprobs,
        "policy_logprobs": result.policy_logprobs,
        "origins": result.origins,
        "lossless": result.lossless,
    }

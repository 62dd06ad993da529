"""What the commands print: text coloured by origin, JSON, progress, wall clocks.

Text and JSON go to stdout and everything else to stderr, so that a pipe gets nothing
but the answer.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

COLOURS = {"accepted": "green", "corrected": "yellow", "bonus": "cyan"}
"""Accepted: drafted and kept; corrected: replaces a rejected draft; bonus: follows."""


def _out() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def _err() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def is_terminal() -> bool:
    """Returns whether somebody reads stdout as it is written."""
    return _out().is_terminal


def note(message: str) -> None:
    """Prints a line to stderr."""
    print(message, file=sys.stderr)


@contextmanager
def status(message: str) -> Iterator[None]:
    """Shows what is being waited for, where somebody may look."""
    console = _err()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


@contextmanager
def clock(timing: dict[str, float], name: str) -> Iterator[None]:
    """Writes the seconds that the body took to `timing[name]`."""
    start = time.perf_counter()
    yield
    timing[name] = time.perf_counter() - start


@contextmanager
def progress(requests: Collection[Any]) -> Iterator[Callable[..., None]]:
    """Shows how many requests are done, and the rate of tokens where it is known.

    Yields what counts one more request; its argument is the request's new tokens.
    """
    console = _err()
    if len(requests) < 2 or not console.is_terminal:
        yield lambda num_tokens=0: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}")
    tokens, start = 0, time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), rate, console=console) as bar:
        task = bar.add_task("prompts", total=len(requests), rate="")

        def advance(num_tokens: int = 0) -> None:
            nonlocal tokens
            tokens += num_tokens
            speed = tokens / (time.perf_counter() - start)
            told = f"{speed:.1f} tokens/s" if tokens else ""
            bar.update(task, advance=1, rate=told)

        yield advance


def line(data: dict[str, Any]) -> None:
    """Prints a line of JSON to stdout, at once."""
    print(json.dumps(data, ensure_ascii=False), flush=True)


def document(**parts: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(parts, ensure_ascii=False, indent=2))


def piece(one: Any) -> None:
    """Prints a piece of text in the colour of its origin."""
    _out().print(Text(one.text, COLOURS.get(one.origin, "")), end="")


def texts(pieces: Sequence[Any], live: bool) -> None:
    """Prints the texts, one after the other; only ends the line if they were live."""
    for index in sorted({one.index for one in pieces}) if not live else ():
        own = [one for one in pieces if one.index == index]
        if is_terminal():
            for one in own:
                piece(one)
            print()
        else:
            print("".join(one.text for one in own))
    if live:
        print()


def summary(results: Sequence[Any], tokens_per_second: float) -> None:
    """Prints the closing line to stderr, with a legend where there are colours."""
    tokens = sum(result.num_tokens for result in results)
    rounds = sum(result.rounds for result in results)
    console = _err()
    if is_terminal():
        legend = [Text(name, colour) for name, colour in COLOURS.items()]
        console.print(Text(" ").join(legend))
    console.print(
        f"{tokens} tokens, {rounds} rounds, mean acceptance length "
        f"{tokens / max(rounds, 1):.2f}, {tokens_per_second:.1f} tokens/s",
        style="dim",
    )
    if not all(result.lossless for result in results):
        console.print(
            "lossy: the rule let the texts part from the target's distribution",
            style="bold yellow",
        )

"""Prompt files: JSON lines, read whole before anything is decoded.

    {"prompt": "def main():"}
    {"prompt": [5, 17, 3], "max_new_tokens": 20}
    {"messages": [{"role": "user", "content": "Hello"}]}

Other keys belong to whoever wrote the file. A line that cannot be used is reported by
its number; it keeps its place, so that mending it changes no other line's text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Entry:
    """One line that can be used."""

    line: int
    """Number of the line, from 1."""
    index: int
    """Place among the lines that are not blank; the request's place in the data set."""
    content: Any
    """Text, token ids, or the messages of a conversation."""
    is_chat: bool
    max_new_tokens: int | None


class Problem(NamedTuple):
    """One line that cannot be used."""

    line: int
    message: str


def read_prompts(path: Path) -> tuple[list[Entry], list[Problem]]:
    """Returns the lines of a prompt file, and what is wrong with the others.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: It is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no prompt file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    entries, problems = [], []
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for index, (number, line) in enumerate(filled):
        try:
            entries.append(_entry(line, number, index))
        except ValueError as error:
            problems.append(Problem(number, str(error)))
    return entries, problems


def _entry(line: str, number: int, index: int) -> Entry:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if isinstance(data, str):
        data = {"prompt": data}
    if not isinstance(data, dict):
        raise ValueError('it must be a JSON object with "prompt" or "messages"')
    budget = data.get("max_new_tokens")
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(f"max_new_tokens is {budget!r}; it must be at least 1")
    if "messages" in data:
        return Entry(number, index, _messages(data["messages"]), True, budget)
    prompt = data.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise ValueError('"prompt" must be text or a list of token ids')
    return Entry(number, index, prompt, False, budget)


def _messages(messages: Any) -> list[dict[str, str]]:
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str)
        for m in messages
    )
    if not messages or not well_formed:
        raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
    return messages

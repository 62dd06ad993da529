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

from specdec_jax.text.pairing import DEFAULT_TARGET


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


def read_all(path: Path, num_prompts: int | None = None) -> list[Entry]:
    """Returns the first prompts of a file of which every line can be used.

    A measurement with a broken line left out would be another one.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: A line cannot be used, or none is asked for or there.
    """
    entries, problems = read_prompts(path)
    if problems:
        raise ValueError(f"{path}: line {problems[0].line}: {problems[0].message}")
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}; it must be at least 1")
    if not entries:
        raise ValueError(f"{path} has no prompts; give at least one line")
    return entries[:num_prompts]


def bundled_prompts() -> Path:
    """Returns the prompt file that lies beside the bundled checkpoints.

    Raises:
      FileNotFoundError: There is none.
    """
    from specdec_jax.checkpoints.locate import BUNDLED, find_bundled

    if DEFAULT_TARGET in BUNDLED:
        path = find_bundled(DEFAULT_TARGET).parent / "prompts.jsonl"
        if path.is_file():
            return path
    raise FileNotFoundError("there are no bundled prompts here; give --prompts FILE")


def contents(decoder: Any, entries: list[Entry], chat: bool) -> list[Any]:
    """Returns the prompts as a `SpeculativeDecoder` takes them: text or token ids.

    Args:
      decoder: Knows the chat template.
      entries: Lines of a prompt file.
      chat: Whether a plain text is the user's turn in a chat.
    """
    return [
        decoder.chat_prompt(entry.content) if entry.is_chat or chat else entry.content
        for entry in entries
    ]


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

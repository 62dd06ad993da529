"""Text to rows of tokens: which files, which are held out, which row comes when.

Whole files are held out, chosen by a hash of their path, so that the split is the same
on every machine and no part of a held-out file is ever trained on.

Rows are windows over the concatenation of all files, each opened by the beginning-of-
sequence token. The batch of a step is a function of seed and step alone: a resumed run
reads the same batches as an uninterrupted one.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

LEFT_OUT = frozenset(
    "site-packages test tests idle_test pydoc_data encodings turtledemo __phello__ "
    "data".split()
)
"""Folders of the standard library that are tests, tables or generated prose."""


class Source(NamedTuple):
    """One text file."""

    name: str
    """Path below its root, with forward slashes."""
    text: str


def is_held_out(name: str, *, share: int = 16) -> bool:
    """Says whether a file belongs to the held-out part, one in `share`.

    Example:
      >>> is_held_out("pkgutil.py"), is_held_out("typing.py")
      (True, False)
    """
    digest = hashlib.sha256(name.encode()).hexdigest()
    return int(digest, 16) % share == 0


def standard_library(*, held_out: bool) -> list[Source]:
    """Returns the Python standard library's sources, in order of their paths.

    Args:
      held_out: Whether to return the held-out files or the others.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        generated = name.parts[0].startswith(("config-", "_sysconfigdata"))
        if generated or LEFT_OUT & set(name.parts):
            continue
        if is_held_out(name.as_posix()) == held_out:
            text = path.read_text(encoding="utf-8", errors="replace")
            sources.append(Source(name.as_posix(), text))
    return sources


def encode(
    tokenizer: Any, sources: Iterable[Source], eos: int
) -> Int[np.ndarray, " N"]:
    """Returns the tokens of all sources, each closed by `eos`.

    Args:
      tokenizer: A `tokenizers.Tokenizer`.
      sources: Texts, in order.
      eos: End-of-sequence token.
    """
    batch = tokenizer.encode_batch([s.text for s in sources], add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, eos], np.int32) for e in batch])


def batch(
    tokens: Int[np.ndarray, " N"],
    step: int,
    *,
    batch_size: int,
    length: int,
    bos: int,
    seed: int = 0,
) -> Int[np.ndarray, "B S"]:
    """Returns the rows of one training step.

    An epoch cuts the stream into windows from a random phase and shuffles them.

    Args:
      tokens: The stream.
      step: Number of the step, from 0.
      batch_size: Rows, B.
      length: Tokens of a row that are predicted; S = length + 1, the first is `bos`.
      bos: Beginning-of-sequence token.
      seed: Decides phases and orders.

    Example:
      >>> batch(np.arange(9, dtype=np.int32), 0, batch_size=2, length=3, bos=99).shape
      (2, 4)
    """
    windows = len(tokens) // length - 1
    steps = windows // batch_size
    if steps < 1:
        raise ValueError(
            f"{len(tokens)} tokens make {windows} windows of {length}; a batch needs "
            f"{batch_size}: use more text, shorter rows or a smaller batch"
        )
    rng = np.random.default_rng((seed, step // steps))
    phase = rng.integers(length)
    order = rng.permutation(windows)
    chosen = order[step % steps * batch_size :][:batch_size]
    starts = phase + chosen * length
    rows = tokens[starts[:, None] + np.arange(length)[None]]
    return np.concatenate([np.full((batch_size, 1), bos, np.int32), rows], axis=1)

"""Records of another engine: emitted tokens with the laws behind them.

A record is one emitted token, the target's policy p that it should have been drawn from
and the draft's law q at its place, both as probabilities over the whole vocabulary:

    npz     arrays `token` [R] (integers), `p` [R, V] and `q` [R, V]
    JSONL   one object a line: {"token": 5, "p": [0.1, ...], "q": [0.3, ...]}

Record every place at which something was drafted and examined, whatever became of it:
in each round the accepted places and the one that was rejected, with the token that the
text has there. Places where nothing was drafted (bonus tokens) have no q and are left
out. Leaving out places because of their token (only the accepted ones, say) is a bias
of its own, and is found as one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from specdec_jax.audit.evidence import Evidence, Gatherer
from specdec_jax.audit.power import Power, power
from specdec_jax.audit.scores import NUM_BUCKETS, score_all

FIELDS = ("token", "p", "q")

_SUM_TOLERANCE = 1e-3
_CHUNK_CELLS = 2**24
_JOINT = 3
"""Consecutive records whose joint law is tested."""

TESTS: dict[str, tuple[str, Callable]] = {
    "leak everywhere": ("leak", lambda: np.bool_(True)),
    "surprise everywhere": ("surprise", lambda: np.bool_(True)),
}


class Records(NamedTuple):
    """Emitted tokens and the laws at their places."""

    token: Int[np.ndarray, " R"]
    p: Float[np.ndarray, "R V"]
    q: Float[np.ndarray, "R V"]


def read_records(path: Path) -> Records:
    """Returns the records of an `.npz` or JSONL file.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: A field is missing or malformed; the message names the line or row.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no records file {path}")
    if path.suffix == ".npz":
        return _from_npz(path)
    return _from_lines(path)


def audit_records(
    records: Records,
    *,
    seed: int = 0,
    announce: Callable[[Power], Any] = lambda p: None,
) -> Evidence:
    """Tests recorded tokens against the recorded target's law.

    Args:
      records: What was emitted.
      seed: Of the coins that split tokens on a bucket's edge.
      announce: Is told the sample's size and power before anything is tested.
    """
    gatherer = Gatherer(TESTS)
    known = _power(records, gatherer.num_tests)
    announce(known)
    coins = np.random.default_rng(seed).random(len(records.token), np.float32)
    parts = []
    for chunk in _chunks(records):
        with np.errstate(divide="ignore"):
            target, draft = np.log(records.p[chunk]), np.log(records.q[chunk])
        drafted = np.ones(len(target), bool)
        parts.append(
            score_all(records.token[chunk], coins[chunk], target, draft, drafted)
        )
    found = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    # Few records leave few to a cell: then each stands for itself.
    length = _JOINT if len(coins) >= 5 * _JOINT * NUM_BUCKETS**_JOINT else 1
    whole = len(coins) // length * length
    buckets = np.asarray(found.bucket)[:whole].reshape(-1, length)
    gatherer.add(found, np.ones(len(coins), bool), buckets)
    return gatherer.evidence(known)


def _chunks(records: Records) -> list[slice]:
    size = max(_CHUNK_CELLS // records.p.shape[1], 1)
    return [slice(i, i + size) for i in range(0, len(records.token), size)]


def _power(records: Records, num_tests: int) -> Power:
    return power(records.p, records.q, 1, num_tests)


def _from_npz(path: Path) -> Records:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no npz file: {error}") from None
    for name in FIELDS:
        if name not in arrays:
            raise ValueError(
                f"{path} has no array {name!r}, only {', '.join(arrays) or 'none'}; "
                "records need token [R], p [R, V] and q [R, V]"
            )
    token, p, q = (arrays[name] for name in FIELDS)
    if token.ndim != 1 or p.ndim != 2 or p.shape != q.shape or len(p) != len(token):
        raise ValueError(
            f"{path} has token {token.shape}, p {p.shape} and q {q.shape}; needed are "
            "[R], [R, V] and [R, V]"
        )
    if not np.issubdtype(token.dtype, np.integer):
        raise ValueError(f"{path}: token is {token.dtype}; token ids are integers")
    return _checked(token, p, q, lambda row: f"{path}: row {row}")


def _from_lines(path: Path) -> Records:
    rows: list[tuple[Any, Any, Any]] = []
    numbers = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_line(line))
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            numbers.append(number)
            if len(rows[-1][1]) != len(rows[0][1]):
                raise ValueError(
                    f"{path}: line {number}: p has {len(rows[-1][1])} entries and that "
                    f"of line {numbers[0]} {len(rows[0][1])}; a file has one vocabulary"
                )
    if not rows:
        raise ValueError(f"{path} has no records; give at least one line")
    token, p, q = (np.array(column) for column in zip(*rows, strict=True))
    return _checked(token, p, q, lambda row: f"{path}: line {numbers[row]}")


def _line(line: str) -> tuple[int, list, list]:
    """Returns one line's fields."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError('it must be a JSON object with "token", "p" and "q"')
    for name in FIELDS:
        if data.get(name) is None:
            raise ValueError(
                f"{name!r} is missing; a record is the token, the target's law p and "
                "the draft's law q"
            )
    token, p, q = (data[name] for name in FIELDS)
    if type(token) is not int:
        raise ValueError(f"'token' is {token!r}; it must be a token id")
    for name, row in (("p", p), ("q", q)):
        if not _is_row(row):
            raise ValueError(f"{name!r} must be a list of probabilities, one a token")
    if len(p) != len(q):
        raise ValueError(
            f"'p' has {len(p)} entries and 'q' {len(q)}; both go over one vocabulary"
        )
    return token, p, q


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and bool(row)
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in row)
    )


def _checked(
    token: np.ndarray, p: np.ndarray, q: np.ndarray, place: Callable[[int], str]
) -> Records:
    """Refuses what is no token or no law, naming the first row."""
    if not len(token) or not p.shape[1]:
        raise ValueError(f"{place(0).split(': ')[0]} has no records; give at least one")
    vocab_size = p.shape[1]
    for row in np.flatnonzero((token < 0) | (token >= vocab_size))[:1]:
        raise ValueError(
            f"{place(int(row))}: 'token' is {token[row]}, but p has {vocab_size} "
            "entries; ids go from 0 to one below"
        )
    laws = []
    for name, rows in (("p", p), ("q", q)):
        rows = np.asarray(rows, np.float64)
        total = rows.sum(axis=1)
        bad = ~(np.abs(total - 1) < _SUM_TOLERANCE) | (rows < 0).any(axis=1)
        for row in np.flatnonzero(bad)[:1]:
            raise ValueError(
                f"{place(int(row))}: {name!r} is no law: it sums to {total[row]:.6g} "
                f"and its least entry is {rows[row].min():.3g}; give probabilities, "
                "not logits, over the whole vocabulary"
            )
        laws.append((rows / total[:, None]).astype(np.float32))
    return Records(token.astype(np.int32), *laws)

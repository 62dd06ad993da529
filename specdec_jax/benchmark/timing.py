"""One clock for everything that is measured.

What is compared takes turns in one process, so that a machine that slows down slows
all of it down. The first turn compiles and warms up and is thrown away.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from specdec_jax.benchmark.bootstrap import estimate

T = TypeVar("T")

_CACHE_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds until the result of `call` is there, and the result.

    JAX hands out results before they are computed; this waits for them.
    """
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def alternate(
    arms: Mapping[str, Callable[[], T]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[T]]:
    """Runs each arm once to warm up, then all of them in turns.

    The order is reversed every other time: what runs after a hungry neighbour does so
    in half of the turns only.

    Args:
      arms: What to run, by name; each returns its own measurement.
      repeats: Turns that count.
      warm_up: Whether to run each arm once before; not if its programs ran already.

    Returns:
      The `repeats` measurements of each arm.

    Raises:
      ValueError: `repeats` is below 1.

    Example:
      >>> turns = []
      >>> arms = {name: lambda name=name: turns.append(name) or name for name in "ab"}
      >>> alternate(arms, 2)
      {'a': ['a', 'a'], 'b': ['b', 'b']}
      >>> "".join(turns)
      'ababba'
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    measured: dict[str, list[T]] = {name: [] for name in arms}
    for run in arms.values() if warm_up else ():
        run()
    for repeat in range(repeats):
        names = list(arms)
        for name in names[::-1] if repeat % 2 else names:
            measured[name].append(arms[name]())
    return measured


class Costs(NamedTuple):
    """What one arm took for each of U units (a prompt, or a batch of them)."""

    seconds: np.ndarray
    """[U]"""
    tokens: np.ndarray
    """[U] Tokens that were decoded in these seconds."""

    def tokens_per_second(self, units: Any = slice(None)) -> float:
        """Returns the ratio of totals over the given units; 0 if nothing was timed."""
        total = float(self.seconds[units].sum())
        return float(self.tokens[units].sum()) / total if total > 0 else 0.0


def speedup(baseline: Costs, candidate: Costs, units: Any = slice(None)) -> float:
    """Returns how many times fewer seconds a token the candidate needs.

    Example:
      >>> slow, fast = Costs(np.array([4.0]), np.array([8])), Costs(
      ...     np.array([2.0]), np.array([8]))
      >>> speedup(slow, fast)
      2.0
    """
    slow = baseline.tokens_per_second(units)
    return candidate.tokens_per_second(units) / slow if slow else float("nan")


def speedup_interval(baseline: Costs, candidate: Costs) -> tuple[float, float]:
    """Returns the bootstrap interval of `speedup` over units.

    Units are drawn, not rounds: rounds of one text are correlated (ALGORITHMS C.2).

    Example:
      >>> same = Costs(np.ones(3), np.array([5, 5, 5]))
      >>> speedup_interval(same, same)
      (1.0, 1.0)
    """

    def ratio(weights):
        def rate(costs):
            return weights @ costs.tokens / (weights @ costs.seconds)

        return rate(candidate) / rate(baseline)

    found = estimate(ratio, len(baseline.seconds))
    return found.low, found.high


def compile_seconds(compile_all: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of compiling cold and warm.

    Cold: nothing is cached, in memory or on disk. Warm: as a new process of the same
    programs finds it, with the disk cache filled and nothing in memory. All programs
    compiled before are forgotten; the disk cache in use is left alone.

    Args:
      compile_all: Traces, lowers and compiles whatever is meant.
    """
    with tempfile.TemporaryDirectory() as folder, _disk_cache(folder):
        taken = []
        for _ in range(2):
            jax.clear_caches()
            taken.append(timed(compile_all)[0])
    return taken[0], taken[1]


@contextmanager
def _disk_cache(folder: str) -> Iterator[None]:
    """Keeps compiled programs in `folder` meanwhile."""
    settings = _CACHE_SETTINGS | {"jax_compilation_cache_dir": folder}
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # JAX opens its cache once and keeps it, whatever the settings say later.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

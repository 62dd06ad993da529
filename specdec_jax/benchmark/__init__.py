"""Benchmarks: the only place of the library that times anything.

    timing        one clock: arms that take turns, bootstrap, compiling cold and warm
    programs      what is timed: decoding, drafting alone
    units         batches of equal shape, and running one of them
    sweep         one drafter at many draft lengths, each against plain decoding
    measure       plain against speculative decoding, batch after batch
    report        what that came to, beside what the cost model predicts
    transformers  the same weights and prompts decoded by transformers (torch)

Prefill and compiling are never part of a decoding time; both arms decode the same
prompts with the same budgets and the same end-of-text tokens.
"""

from specdec_jax.benchmark.measure import compare
from specdec_jax.benchmark.report import Report, Run
from specdec_jax.benchmark.timing import alternate, compile_seconds, timed

__all__ = ["Report", "Run", "alternate", "compare", "compile_seconds", "timed"]

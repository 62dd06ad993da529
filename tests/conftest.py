"""Settings that every test runs under."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")

# Both workers, and the next run, find what was compiled before: it is keyed by content.
COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


OPTIMISED = {
    "test_layouts",
    "test_lean",
    "test_pair",
    "test_plan",
    "test_sharding",
    "test_smollm2",
}
"""What asks for the compiled program itself, or for real weights as users run them."""


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    """Most of the suite's time is XLA's, and most tests need none of its cleverness."""
    plain = request.path.stem not in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", plain)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def _few_programs_at_a_time():
    """Each compiled program maps some 350 regions; the kernel allows 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)

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


@pytest.fixture(autouse=True, scope="module")
def _few_programs_at_a_time():
    """Each compiled program maps some 350 regions; the kernel allows 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)

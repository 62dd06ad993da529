"""Settings that every test runs under."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def _few_programs_at_a_time():
    """Each compiled program maps some 350 regions; the kernel allows 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)

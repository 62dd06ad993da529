"""What a number was measured on: versions and devices."""

import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("specdec-jax", "jax", "jaxlib", "flax", "transformers", "numpy")


def environment() -> dict[str, Any]:
    """Returns versions, devices and cores as plain values for JSON."""
    import jax

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cores": os.cpu_count(),
    }


def leave_absent_tpus_alone() -> None:
    """Keeps JAX from looking for TPUs where libtpu is installed for `plan` alone.

    It would complain at length about a machine that has none, and go on without.
    """
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    if os.environ.get("JAX_PLATFORMS") or chips or not find_spec("libtpu"):
        return
    import jax

    has_gpu = Path("/dev/nvidiactl").exists() and find_spec("jax_cuda12_plugin")
    jax.config.update("jax_platforms", "cuda,cpu" if has_gpu else "cpu")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

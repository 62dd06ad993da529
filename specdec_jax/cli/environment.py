"""What a number was measured on: versions and devices."""

import os
import platform
from importlib import metadata
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

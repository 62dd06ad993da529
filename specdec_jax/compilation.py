"""The persistent compilation cache: a second run of a program starts at once."""

import os
from pathlib import Path

import jax


def cache_directory() -> Path:
    """Returns where compiled programs are kept: $SPECDEC_CACHE_DIR or ~/.cache."""
    chosen = os.environ.get("SPECDEC_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "specdec_jax"


def enable_compilation_cache() -> Path:
    """Keeps compiled programs on disk for later processes; returns the folder.

    The command line and the notebooks call it; importing the library does not. A
    folder that was configured before (JAX_COMPILATION_CACHE_DIR) is left alone.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    path = Path(chosen) if chosen else cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Small programs count too: a bundled pair has dozens that compile in a moment.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path

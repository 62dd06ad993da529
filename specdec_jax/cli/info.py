"""`specdec info`: what is installed, what is bundled, what there is to run on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_jax.cli import show
from specdec_jax.cli.environment import environment
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document.")
    ] = False,
) -> int:
    """Shows versions, devices, bundled checkpoints and the compilation cache."""
    from specdec_jax.checkpoints.locate import BUNDLED
    from specdec_jax.compilation import cache_directory

    facts: dict[str, Any] = {
        **environment(),
        "bundled": sorted(BUNDLED),
        "default_target": DEFAULT_TARGET,
        "default_target_path": _path(DEFAULT_TARGET),
        "default_draft": DEFAULT_DRAFT,
        "default_draft_path": _path(DEFAULT_DRAFT),
        "compilation_cache": str(cache_directory()),
    }
    if as_json:
        show.document(**facts)
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{name.replace('_', ' ')}: {value or 'none'}")
    return 0


def _path(name: str) -> str | None:
    """Returns the folder of a bundled checkpoint, or None where there is none."""
    from specdec_jax.checkpoints.locate import BUNDLED, find_bundled

    try:
        folder: Path | None = find_bundled(name) if name in BUNDLED else None
    except FileNotFoundError:
        folder = None
    return None if folder is None else str(folder)

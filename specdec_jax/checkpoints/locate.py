"""From what the user typed to an open checkpoint."""

import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path

from specdec_jax.checkpoints.folder import open_folder
from specdec_jax.checkpoints.source import Source

BUNDLED = {"pystd-5m": "pystd-5m", "pystd-draft": "pystd-draft"}
"""Names of the checkpoints that travel with the library, and their folders."""

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def open_checkpoint(name: str | Path) -> Source:
    """Opens a checkpoint by path or by name.

    Looked for in this order: a `.gguf` file, a local folder, `smollm2-135m` (found by
    `gguf.find_smollm2`), a bundled name, an id `org/name` on the Hugging Face hub.

    Raises:
      FileNotFoundError: Nothing of that name; the message says where it was looked for.
      ValueError: The checkpoint is damaged.
    """
    name = str(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" or name == "smollm2-135m":
        # The gguf package is an extra.
        from specdec_jax.checkpoints.gguf import find_smollm2, open_gguf

        return open_gguf(path if path.suffix == ".gguf" else find_smollm2(), name)
    if path.is_dir():
        return open_folder(path, name)
    if name in BUNDLED:
        return open_folder(find_bundled(name), name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return open_folder(_download(name), name)
    raise FileNotFoundError(
        f"there is no checkpoint {name!r}: not a local folder (looked in "
        f"{Path.cwd()}), not a .gguf file, none of the bundled names "
        f"({', '.join([*BUNDLED, 'smollm2-135m'])}), and not a hub id like org/name"
    )


def find_bundled(name: str) -> Path:
    """Returns the folder of a bundled checkpoint, in the wheel or the checkout."""
    looked = []
    for root in _roots():
        looked.append(str(root / BUNDLED[name]))
        if (root / BUNDLED[name]).is_dir():
            return root / BUNDLED[name]
    raise FileNotFoundError(
        f"the bundled checkpoint {name!r} is missing; looked in {', '.join(looked)}; "
        "install the library again"
    )


def _roots() -> Iterator[Path]:
    package = Path(str(importlib.resources.files("specdec_jax")))
    yield package / "_checkpoints"
    yield package.parent / "models"


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"there is no local folder {name!r} (looked in {Path.cwd()}), and the "
            f"Hugging Face hub did not give it: {error}"
        ) from error

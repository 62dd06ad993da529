"""`specdec info`: what is installed, what is bundled, what there is to run on.

With `--mesh` it also says where every tensor of a target and its draft would lie; no
weights are read for that.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec_jax.cli import options, show
from specdec_jax.cli.environment import environment
from specdec_jax.text.free_drafts import whole
from specdec_jax.text.makers import CHECKPOINT, maker_of
from specdec_jax.text.pairing import DEFAULT_DRAFT, DEFAULT_TARGET, read_drafts


def info(
    mesh: options.Mesh = None,
    target: options.Target = DEFAULT_TARGET,
    draft: options.Draft = None,
    draft_num_layers: options.DraftNumLayers = None,
    draft_sharding: options.DraftSharding = "target",
    cpu_devices: options.CpuDevices = None,
    as_json: options.AsJson = False,
) -> int:
    """Shows versions, devices, bundled checkpoints, and a mesh's placements."""
    options.simulate_devices(cpu_devices)
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
    placed = {}
    if mesh is not None:
        chosen = options.choose_draft(target, draft, draft_num_layers)
        drafts = read_drafts(chosen, draft_num_layers)
        placed = _placements(mesh, draft_sharding, target, drafts)
    if as_json:
        named = {
            part: [
                {**one._asdict(), "spec": [*one.spec], "undivided": [*one.undivided]}
                for one in tensors
            ]
            for part, tensors in placed.items()
        }
        show.document(**facts, **({"placements": named} if placed else {}))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{name.replace('_', ' ')}: {value or 'none'}")
    for part, tensors in placed.items():
        _print(part, mesh, tensors)
    return 0


def _placements(
    mesh: str,
    draft_sharding: str,
    target: str,
    drafts: list[tuple[str, dict[str, str]]],
) -> dict[str, list[Any]]:
    """Returns where the tensors of target and draft lie; reads headers alone."""
    from specdec_jax.checkpoints.load import build_model, parameter_shapes
    from specdec_jax.checkpoints.locate import open_checkpoint
    from specdec_jax.sharding import Placement, make_mesh

    placement = Placement(make_mesh(mesh), draft_sharding)
    placed = {}
    named: list[tuple[str, str, dict[str, str]]] = [("target", target, {})]
    for index, (name, written) in enumerate(drafts):
        if maker_of(name) is CHECKPOINT:
            part = "draft" if len(drafts) == 1 else f"draft {index + 1}"
            named.append((part, name, written))
    for part, name, written in named:
        is_draft = part != "target"
        num_layers = whole(name, written, "layers")
        model = build_model(open_checkpoint(name), num_layers=num_layers)
        shapes = parameter_shapes(model)
        tensors = placement.parameters(shapes, model, draft=is_draft).values()
        placed[part] = [*tensors, *placement.cache(model, draft=is_draft)]
    return placed


def _print(part: str, mesh: str | None, tensors: list[Any]) -> None:
    """Prints a table; what all layers have in common is one line."""
    lines = Counter(
        one._replace(name=re.sub(r"^layers_\d+/", "layers/", one.name))
        for one in tensors
    )
    table = Table("tensor", "number", "shape", "split over", "not divided", title=part)
    for one, count in lines.items():
        shape = " x ".join(str(size) for size in one.shape)
        split = ", ".join(axis or "-" for axis in one.spec) or "whole"
        table.add_row(one.name, str(count), shape, split, ", ".join(one.undivided))
    Console(highlight=False).print(table)


def _path(name: str) -> str | None:
    """Returns the folder of a bundled checkpoint, or None where there is none."""
    from specdec_jax.checkpoints.locate import BUNDLED, find_bundled

    try:
        folder: Path | None = find_bundled(name) if name in BUNDLED else None
    except FileNotFoundError:
        folder = None
    return None if folder is None else str(folder)

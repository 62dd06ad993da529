"""Checkpoint folders as Hugging Face writes them: config.json and safetensors."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import numpy as np
from safetensors import SafetensorError, safe_open

from specdec_jax.checkpoints.source import Source, Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED = ("F32", "F16", "BF16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def open_folder(path: Path, name: str | None = None) -> Source:
    """Opens a folder; reads its JSON files and the headers of its tensors.

    Args:
      path: The folder.
      name: What messages call it; its path by default.

    Raises:
      FileNotFoundError: A file is missing: the config, the weights or a shard.
      ValueError: A file is damaged or cut short.
    """
    name = name or str(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{name}: {path} has no config.json")
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path, name):
        tensors |= _read_header(file)
    generation = path / "generation_config.json"
    return Source(
        name=name,
        path=path,
        config=read_json(path / "config.json"),
        tensors=tensors,
        load_tokenizer=partial(_load_tokenizer, path),
        generation_config=read_json(generation) if generation.is_file() else {},
    )


def _weight_files(path: Path, name: str) -> list[Path]:
    """The files that hold weights: one, or all that the index names."""
    if (path / INDEX).is_file():
        index = read_json(path / INDEX)
        shards = sorted(set(index.get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing or not shards:
            raise FileNotFoundError(
                f"{name}: {path / INDEX} names {len(shards)} shards, of which are "
                f"missing: {', '.join(missing) or 'all'}; download them again"
            )
        return [path / shard for shard in shards]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    raise FileNotFoundError(
        f"{name}: {path} has neither {SINGLE} nor {INDEX}; weights in other formats "
        "(pytorch_model.bin) must be saved as safetensors first, with "
        "save_pretrained(..., safe_serialization=True)"
    )


def _read_header(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            return {
                key: Tensor(
                    shape=tuple(opened.get_slice(key).get_shape()),
                    dtype=opened.get_slice(key).get_dtype(),
                    read=partial(_read_tensor, file, key),
                )
                for key in opened.keys()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{file} is damaged or cut short ({file.stat().st_size} bytes): {error}; "
            "download it again"
        ) from error


def _read_tensor(file: Path, key: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    with safe_open(file, framework="numpy") as opened:
        stored = opened.get_slice(key)
        kind = stored.get_dtype()
        if kind not in STORED:
            raise ValueError(
                f"{file}: tensor {key} is stored as {kind}; supported: "
                f"{', '.join(STORED)}; use the checkpoint that is not quantised"
            )
        return stored[index] if index else opened.get_tensor(key)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: It is not JSON, or no object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {type(value).__name__}, not an object")
    return value


def _load_tokenizer(path: Path) -> Any:
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        return None
    # transformers takes seconds to import, and not everyone needs text.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)

"""From a checkpoint to a model, its parameters and its tokenizer.

Every tensor is asserted by name and shape: none missing, none left over. Tensors are
read, cast and placed one by one, so the host holds one tensor, or one device's part of
it, beside the parameters.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specdec_jax.checkpoints.family import Family, Row, expand, stored_shape
from specdec_jax.checkpoints.folder import read_json
from specdec_jax.checkpoints.gpt2 import GPT2
from specdec_jax.checkpoints.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from specdec_jax.checkpoints.locate import open_checkpoint
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.checkpoints.source import Source, Tensor
from specdec_jax.networks import Decoder, DecoderConfig
from specdec_jax.networks.layers import tile

FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
"""Families by `model_type`."""

DTYPES = ("float32", "bfloat16", "float16")

Read = Callable[..., np.ndarray]
"""Reads a part of a parameter, from one slice an axis; the whole without."""

Place = Callable[[str, tuple[int, ...], Read], jax.Array]
"""Puts the parameter at a path ("layers_0/mlp/up_proj/kernel") on devices, from its
shape and what reads it."""


class Loaded(NamedTuple):
    """A checkpoint, ready to run."""

    model: Decoder
    params: dict[str, Any]
    """The linen variables `{"params": ...}` that `model.apply` takes."""
    tokenizer: Any
    """A transformers tokenizer, or None where the checkpoint has none."""
    name: str
    """What was asked for."""
    path: Path
    config: Mapping[str, Any]
    """Hugging Face's config.json."""
    generation_config: Mapping[str, Any]
    """Hugging Face's generation_config.json, or {}."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; empty where the checkpoint names none."""
    bos_token_id: int | None
    max_positions: int
    """The most tokens that a text may have."""


def load(
    name: str | Path,
    dtype: str = "float32",
    num_layers: int | None = None,
    *,
    context_length: int | None = None,
    place: Callable[[Decoder], Place] | None = None,
    tiled: bool | None = None,
    whole: bool | None = None,
) -> Loaded:
    """Loads a checkpoint.

    Args:
      name: A folder, a `.gguf` file, a bundled name, or a hub id `org/name`.
      dtype: Type of parameters, cache and computing: "float32", "bfloat16", "float16".
      num_layers: Keeps only the first layers; None keeps all.
      context_length: The longest text wanted; only `longrope` checkpoints care, see
        `rope.rotary`. It must not be above the checkpoint's limit.
      place: Given the model, returns what puts each parameter on devices and reads no
        more of it than lies here; by default all go to JAX's default device.
      tiled: Whether weights lie in tiles, which decodes faster on CPUs (see
        `networks.layers`), or as [in, out]; None means tiles on a CPU, without `place`.
      whole: Whether each device has tensors as a whole, so that a TPU may look tokens
        up one by one (see `networks.layers`); None means without `place`.

    Raises:
      FileNotFoundError: There is no such checkpoint, or a file of it is missing.
      ValueError: The architecture or a setting is not supported; a file is damaged; a
        tensor is missing, left over or misshapen; an argument is out of range.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    source = open_checkpoint(name)
    model = build_model(source, dtype, num_layers, context_length)
    if tiled is None:
        tiled = place is None and jax.default_backend() == "cpu"
    whole = place is None if whole is None else whole
    sliced = whole and jax.default_backend() == "tpu"
    model = model.clone(tiled=tiled, sliced=sliced)
    params = read_params(source, model, place(model) if place else _place)
    # Of transformers only tokenizers are wanted: no advice that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    bos = source.config.get("bos_token_id")
    return Loaded(
        model=model,
        params={"params": params},
        tokenizer=source.load_tokenizer(),
        name=source.name,
        path=source.path,
        config=source.config,
        generation_config=source.generation_config,
        eos_token_ids=eos_token_ids(source),
        bos_token_id=source.generation_config.get("bos_token_id", bos),
        max_positions=model.config.max_positions,
    )


def build_model(
    source: Source,
    dtype: str = "float32",
    num_layers: int | None = None,
    context_length: int | None = None,
) -> Decoder:
    """Returns the model that a checkpoint describes; reads no tensor.

    Raises:
      ValueError: As `load`.
    """
    family, config = _family(source), dict(source.config)
    settings = Settings(config, source.name)
    # A stored head is used whatever the config says, as transformers 5 does.
    tied = settings.take("tie_word_embeddings", family.tied)
    has_head = "lm_head.weight" in source.tensors if source.tensors else not tied
    if not tied and not has_head:
        raise ValueError(
            f"{source.name}: the tensor lm_head.weight is missing, and config.json has "
            "tie_word_embeddings false; the file is incomplete"
        )
    full = family.config(settings, not has_head, context_length)
    settings.refuse_rest(family.harmless)
    if context_length is not None and context_length > full.max_positions:
        raise ValueError(
            f"{source.name}: context_length {context_length} is above the "
            f"checkpoint's {full.max_positions} positions"
        )
    return Decoder(_cut(full, num_layers, source.name), jnp.dtype(dtype))


def model_from_config(path: str | Path, dtype: str = "float32") -> Decoder:
    """Returns the model that a config.json describes; there need be no weights.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: It is no config of a supported model.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no config file {file}")
    return build_model(Source(str(file), file, read_json(file), {}), dtype)


def read_params(source: Source, model: Decoder, place: Place) -> dict[str, Any]:
    """Reads all parameters of `model`, one tensor after the other.

    Raises:
      ValueError: A tensor is missing, left over, misshapen or of an unknown type.
    """
    family, tree = _family(source), parameter_shapes(model.clone(tiled=False))
    stored = parameter_shapes(model)
    rows = list(expand(family.rows, model.config.num_layers, tree))
    covered = {path for row in rows for path in row.ours}
    assert covered == set(tree), f"no row for {sorted(set(tree) - covered)}"
    tensors = _with_prefix(source.tensors, family.prefix)
    _check(source, model, rows, tree, tensors)
    params: dict[str, jax.Array] = {}
    for row in rows:
        start = 0
        for path in row.ours:
            shape, tensor = tree[path], tensors[row.theirs]
            read = partial(_read, tensor, row.transpose, start, shape, model.dtype)
            if len(stored[path]) == 3:
                read = partial(_tile, read, path.endswith("/embedding"))
            params[path] = place(path, stored[path], read)
            start += shape[-1]
    return traverse_util.unflatten_dict(params, sep="/")


def _read(
    tensor: Tensor,
    transpose: bool,
    start: int,
    shape: tuple[int, ...],
    dtype: Any,
    index: tuple[slice, ...] = (),
) -> np.ndarray:
    """Reads a part of a parameter that fills a tensor's last axis from `start` on."""
    whole = tensor.shape[::-1] if transpose else tensor.shape
    if index or shape != whole:
        index = index or (slice(None),) * len(shape)
        bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        bounds[-1] = bounds[-1][0] + start, bounds[-1][1] + start
        index = tuple(slice(*one) for one in bounds)
    part = np.asarray(tensor.read(index[::-1] if transpose else index))
    return (part.T if transpose else part).astype(dtype, order="C")


def _tile(read: Read, transpose: bool, index: tuple[slice, ...] = ()) -> np.ndarray:
    whole = read()
    return tile(whole.T if transpose else whole)[index]


def parameter_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter, by path."""
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    tree = jax.eval_shape(model.init, jax.random.key(0), tokens, cache)["params"]
    flat = traverse_util.flatten_dict(tree, sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}


def eos_token_ids(source: Source) -> tuple[int, ...]:
    """Returns the ids that end a text: generation_config's, else the config's."""
    for config in (source.generation_config, source.config):
        found = config.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _family(source: Source) -> Family:
    kind = source.config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{source.name}: architecture {kind!r} "
            f"({source.config.get('architectures')}) is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def _cut(config: DecoderConfig, num_layers: int | None, name: str) -> DecoderConfig:
    if num_layers is None:
        return config
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(
            f"{name} has {config.num_layers} layers; num_layers {num_layers} must be "
            f"between 1 and {config.num_layers}"
        )
    windows = config.windows[:num_layers]
    return dataclasses.replace(config, num_layers=num_layers, windows=windows)


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Gives the body's names the prefix that some exporters leave out."""
    if any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {
        name if name.startswith("lm_head.") else prefix + name: tensor
        for name, tensor in tensors.items()
    }


def _check(
    source: Source,
    model: Decoder,
    rows: list[Row],
    tree: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Raises ValueError unless names and shapes are exactly those expected."""
    wanted = {row.theirs: stored_shape(row, tree) for row in rows}
    missing = sorted(set(wanted) - set(tensors))
    left_over = sorted(
        name
        for name in set(tensors) - set(wanted)
        if not _may_be_left(name, source, model)
    )
    problems = [f"missing: {_some(missing)}"] if missing else []
    problems += [f"left over: {_some(left_over)}"] if left_over else []
    problems += [
        f"{name} has shape {tensors[name].shape}, the config asks for {shape}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ][:3]
    if problems:
        raise ValueError(
            f"{source.name}: the tensors do not fit the config. {'; '.join(problems)}"
        )


def _may_be_left(name: str, source: Source, model: Decoder) -> bool:
    """Whether a stored tensor is a buffer, or belongs to a layer that was cut off."""
    if any(re.fullmatch(pattern, name) for pattern in _family(source).ignored):
        return True
    layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    if layer is None:
        return False
    total = source.config.get("num_hidden_layers", source.config.get("n_layer", 0))
    return model.config.num_layers <= int(layer[1]) < total


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _place(path: str, shape: tuple[int, ...], read: Read) -> jax.Array:
    del path, shape
    return jnp.asarray(read())

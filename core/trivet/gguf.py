"""Reader of GGUF files: header, metadata and tensor table, without a deep learning library.

The engine side needs a file's tokenizer, the worker side its tensors; both share this reader. A file is mapped into
memory and only its header is parsed, so that opening costs milliseconds even with a vocabulary of hundreds of thousands
of strings, which are decoded when first looked at.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from trivet.errors import ModelLoadError

if TYPE_CHECKING:
    import os

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MIN_PAIR_BYTES = 8 + 4 + 1  # empty key, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # empty name, number of dimensions, type, offset

_TYPE_STRING = 8
_TYPE_ARRAY = 9
# gguf_metadata_value_type of the fixed-size values, as little-endian numpy types.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGMLType(IntEnum):
    """Element types of tensors in files (``ggml_type``; types of intermediate results are left out)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


# Type -> (elements per block, bytes per block).
BLOCK_SIZES: Mapping[GGMLType, tuple[int, int]] = MappingProxyType(
    {
        GGMLType.F32: (1, 4),
        GGMLType.F16: (1, 2),
        GGMLType.Q4_0: (32, 18),
        GGMLType.Q4_1: (32, 20),
        GGMLType.Q5_0: (32, 22),
        GGMLType.Q5_1: (32, 24),
        GGMLType.Q8_0: (32, 34),
        GGMLType.Q2_K: (256, 84),
        GGMLType.Q3_K: (256, 110),
        GGMLType.Q4_K: (256, 144),
        GGMLType.Q5_K: (256, 176),
        GGMLType.Q6_K: (256, 210),
        GGMLType.IQ2_XXS: (256, 66),
        GGMLType.IQ2_XS: (256, 74),
        GGMLType.IQ3_XXS: (256, 98),
        GGMLType.IQ1_S: (256, 50),
        GGMLType.IQ4_NL: (32, 18),
        GGMLType.IQ3_S: (256, 110),
        GGMLType.IQ2_S: (256, 82),
        GGMLType.IQ4_XS: (256, 136),
        GGMLType.I8: (1, 1),
        GGMLType.I16: (1, 2),
        GGMLType.I32: (1, 4),
        GGMLType.I64: (1, 8),
        GGMLType.F64: (1, 8),
        GGMLType.IQ1_M: (256, 56),
        GGMLType.BF16: (1, 2),
        GGMLType.TQ1_0: (256, 54),
        GGMLType.TQ2_0: (256, 66),
        GGMLType.MXFP4: (32, 17),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table.

    Attributes:
        name: The tensor's name in the file, such as ``blk.0.attn_q.weight``.
        shape: Sizes in torch's order, the contiguous dimension last (the file stores them reversed).
        ggml_type: Element type.
        offset: Position of the first byte, from the start of the file.
        nbytes: Size of the data in bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings in the metadata: its length is known at once, its items are decoded on first access."""

    def __init__(self, data: mmap.mmap, offsets: array[int], where: str) -> None:
        self._data = data
        self._offsets = offsets
        self._where = where
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __repr__(self) -> str:
        return f"StringArray(<{len(self)} strings>)"

    def _decoded(self) -> list[str]:
        if self._items is None:
            items = []
            data, length_at = self._data, _U64.unpack_from
            for index, offset in enumerate(self._offsets):
                start = offset + 8
                raw = data[start : start + length_at(data, offset)[0]]
                try:
                    items.append(raw.decode())
                except UnicodeDecodeError as error:
                    raise ModelLoadError(
                        f"{self._where}: string {index} is not valid UTF-8 ({raw[:40]!r}); "
                        "the file is damaged or was written by a faulty converter: download or convert it again"
                    ) from error
            self._items = items
        return self._items


MetadataValue: TypeAlias = "int | float | bool | str | np.ndarray[Any, Any] | StringArray"


class _Parser:
    """A cursor over the mapped file; every read is checked against the file's size before anything is allocated."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def fail(self, problem: str, remedy: str = "the file is damaged: download or convert it again") -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}; {remedy}")

    def take(self, count: int, what: str) -> int:
        """Advance by ``count`` bytes and return the position before."""
        start = self.pos
        if count > self.size - start:
            raise self.fail(
                f"truncated or corrupt GGUF: {what} needs {count} bytes at offset {start}, but the file ends at "
                f"{self.size}"
            )
        self.pos = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, min_item_bytes: int) -> int:
        """A number of items that follow; refused when so many cannot fit into the rest of the file."""
        value = self.u64(what)
        left = self.size - self.pos
        if value * min_item_bytes > left:
            raise self.fail(
                f"truncated or corrupt GGUF: {what} is {value}, more than can fit into the remaining {left} bytes"
            )
        return value

    def string(self, what: str) -> str:
        length = self.count(f"length of {what}", 1)
        start = self.take(length, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 ({raw[:40]!r})") from error

    def value(self, key: str) -> MetadataValue:
        kind = self.u32(f"type of {key!r}")
        if kind == _TYPE_STRING:
            return self.string(f"value of {key!r}")
        if kind == _TYPE_ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"metadata key {key!r} has the unknown value type {kind}")
        dtype = _SCALARS[kind]
        start = self.take(dtype.itemsize, f"value of {key!r}")
        item: int | float | bool = np.frombuffer(self.data, dtype, 1, start)[0].item()
        return item

    def array(self, key: str) -> np.ndarray[Any, Any] | StringArray:
        kind = self.u32(f"item type of {key!r}")
        if kind == _TYPE_STRING:
            return self.string_array(key)
        if kind not in _SCALARS:
            raise self.fail(f"metadata key {key!r} is an array with the unsupported item type {kind}")
        dtype = _SCALARS[kind]
        length = self.count(f"length of array {key!r}", dtype.itemsize)
        start = self.take(length * dtype.itemsize, f"array {key!r}")
        return np.frombuffer(self.data, dtype, length, start)

    def string_array(self, key: str) -> StringArray:
        length = self.count(f"length of array {key!r}", 8)
        offsets = array("Q")  # grows string by string: a corrupt length cannot make it large
        # The hot loop of opening a file: hundreds of thousands of strings are skipped, not decoded.
        data, pos, last, length_at = self.data, self.pos, self.size - 8, _U64.unpack_from
        for _ in range(length):
            if pos > last:
                break
            offsets.append(pos)
            pos += 8 + length_at(data, pos)[0]
        else:
            last += 8
        if pos > last:
            raise self.fail(f"truncated or corrupt GGUF: the strings of array {key!r} run past the end of the file")
        self.pos = pos
        return StringArray(self.data, offsets, f"{self.path}: metadata key {key!r}")


class GGUFFile:
    """A GGUF file, mapped read-only.

    Attributes:
        path: The file.
        version: Version of the format, 2 or 3.
        metadata: Key -> value: Python numbers, bools and strings; numeric arrays as read-only numpy views of the file;
            string arrays as :class:`StringArray`.
        tensors: Name -> :class:`TensorInfo`, in the file's order.

    The mapping lives as long as this object or any array handed out by it.

    Raises:
        ModelLoadError: The file is missing, unreadable, not GGUF, of an unsupported version or byte order, truncated
            or inconsistent. Lengths in the file are checked against its size before memory is allocated for them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        parser = _Parser(self.path, self._data)
        self.version = _read_version(parser)
        num_tensors = parser.count("number of tensors", _MIN_TENSOR_BYTES)
        num_pairs = parser.count("number of metadata entries", _MIN_PAIR_BYTES)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(_read_metadata(parser, num_pairs))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_read_tensors(parser, num_tensors, self.metadata))

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor as a read-only ``[nbytes]`` uint8 view of the mapped file.

        Raises:
            KeyError: The file has no tensor of that name.
        """
        info = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)


# A generation may end with the end of the sequence, of a turn, or of a message (llama.cpp's vocabulary loader).
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def eos_token_ids(file: GGUFFile) -> list[int]:
    """The ids that end a generation according to the metadata, the main one first, each once."""
    ids = (file.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return list(dict.fromkeys(value for value in ids if isinstance(value, int)))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.absolute()}: no such GGUF file; correct the path of the model") from error
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(
            f"{path}: cannot read the GGUF file ({error}); check the file and its permissions"
        ) from error


def _read_version(parser: _Parser) -> int:
    start = parser.take(4, "the magic number")
    magic = parser.data[start : start + 4]
    if magic != _MAGIC:
        raise parser.fail(
            f"not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}",
            "name a GGUF file, or a folder with config.json and safetensors",
        )
    version = parser.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise parser.fail("big-endian GGUF is not supported", "convert the model to a little-endian file")
    if version not in _VERSIONS:
        raise parser.fail(
            f"GGUF version {version} is not supported (supported: {', '.join(map(str, _VERSIONS))})",
            "convert the model again with a current version of llama.cpp",
        )
    return version


def _read_metadata(parser: _Parser, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = parser.string(f"key of metadata entry {index}")
        if key in metadata:
            raise parser.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = parser.value(key)
    return metadata


def _read_tensors(parser: _Parser, count: int, metadata: Mapping[str, MetadataValue]) -> dict[str, TensorInfo]:
    entries: list[tuple[str, tuple[int, ...], GGMLType, int]] = []
    for index in range(count):
        name = parser.string(f"name of tensor {index}")
        num_dims = parser.u32(f"number of dimensions of tensor {name!r}")
        if num_dims > _MAX_DIMS:
            raise parser.fail(f"tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS} are possible")
        sizes = tuple(parser.u64(f"shape of tensor {name!r}") for _ in range(num_dims))
        number = parser.u32(f"type of tensor {name!r}")
        try:
            ggml_type = GGMLType(number)
        except ValueError as error:
            raise parser.fail(
                f"tensor {name!r} has the unknown type {number}",
                "convert the model to a supported type, such as Q8_0 or Q4_K",
            ) from error
        offset = parser.u64(f"offset of tensor {name!r}")
        entries.append((name, sizes[::-1], ggml_type, offset))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise parser.fail(f"general.alignment is {alignment!r}, it must be a power of two")
    base = -(-parser.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, ggml_type, offset in entries:
        if name in tensors:
            raise parser.fail(f"tensor {name!r} occurs twice")
        if offset % alignment:
            raise parser.fail(f"tensor {name!r} starts at {offset}, which is no multiple of the alignment {alignment}")
        nbytes = _nbytes(parser, name, shape, ggml_type)
        if base + offset + nbytes > parser.size:
            raise parser.fail(
                f"truncated GGUF: tensor {name!r} ends at byte {base + offset + nbytes}, but the file has only "
                f"{parser.size} bytes",
                "the download or copy is incomplete: fetch the file again",
            )
        tensors[name] = TensorInfo(name, shape, ggml_type, base + offset, nbytes)
    return tensors


def _nbytes(parser: _Parser, name: str, shape: tuple[int, ...], ggml_type: GGMLType) -> int:
    block_elements, block_bytes = BLOCK_SIZES[ggml_type]
    row = shape[-1] if shape else 1
    if row % block_elements:
        raise parser.fail(
            f"tensor {name!r} of type {ggml_type.name} has rows of {row} elements, which is no multiple of the block "
            f"size {block_elements}"
        )
    return prod(shape) // block_elements * block_bytes

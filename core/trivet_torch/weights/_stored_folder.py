"""Weights of a Hugging Face folder as views of its mapped safetensors files."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trivet.errors import ModelLoadError
from trivet.roles import StoredLinear
from trivet_torch.weights._mapped_file import MappedFile
from trivet_torch.weights._mxfp4 import GROUP, widened
from trivet_torch.weights.plain_config import plain_config
from trivet_torch.weights.safetensors_dir import (
    check_folder,
    folder_config,
    folder_eos_token_ids,
    read_config,
    read_header,
)
from trivet_torch.weights.stored import StoredWeights

# https://github.com/huggingface/safetensors, ``Dtype``.
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
# Experts as transformers' models hold them, for folders that were saved in that form: gate above up, all in one tensor.
_STACKED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
# GPT-OSS, whose checkpoints have no other form: each matrix is transposed, and gate and up take turns in its columns.
_GPT_OSS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# By model type: module of the experts in the checkpoint, names of gate, up and down there.
EXPERT_NAMES: Mapping[str, tuple[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
        "qwen2_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: bytes ``[start, end)`` of a file, row after row, or column after column if ``transposed``
    (matrices only)."""

    file: MappedFile
    path: Path
    stored: str
    shape: tuple[int, ...]
    start: int
    end: int
    transposed: bool = False

    def item(self, index: int) -> _Entry:
        """The vector ``index`` of a stack ``[count, size]``; of a stack ``[count, columns, rows]`` the matrix ``index``
        as ``[rows, columns]``."""
        count, *shape = self.shape
        num_bytes = (self.end - self.start) // count
        start = self.start + index * num_bytes
        is_matrix = len(shape) > 1
        return _Entry(self.file, self.path, self.stored, tuple(reversed(shape)), start, start + num_bytes, is_matrix)

    def part(self, index: int, row: int, num_rows: int) -> _Entry:
        """Rows ``[row, row + num_rows)`` of the matrix ``index`` of a stack ``[count, rows, columns]``."""
        count, rows, columns = self.shape
        row_bytes = (self.end - self.start) // (count * rows)
        start = self.start + (index * rows + row) * row_bytes
        return _Entry(self.file, self.path, self.stored, (num_rows, columns), start, start + num_rows * row_bytes)


@dataclass(frozen=True, slots=True)
class _FourBits:
    """Where a matrix ``[rows, columns]`` in MXFP4 lies: bytes ``[rows, columns / 2]`` of two numbers, and scales."""

    blocks: _Entry
    scales: _Entry
    #: what holds its numbers exactly
    stored = "BF16"

    @property
    def shape(self) -> tuple[int, int]:
        rows, num_bytes = self.blocks.shape
        return rows, 2 * num_bytes

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows ``[start, stop)``, in new memory."""
        blocks, scales = (
            part.file.bytes[part.start : part.end].view(part.shape)[start:stop] for part in (self.blocks, self.scales)
        )
        return widened(blocks, scales, dtype)

    def release(self, start: int, stop: int) -> None:
        """See :meth:`StoredMatrix.release`."""
        for part in (self.blocks, self.scales):
            row_bytes = part.shape[1]
            part.file.release(part.start + start * row_bytes, part.start + stop * row_bytes)


class _FolderWeights(StoredWeights):
    def __init__(
        self, folder: Path, config: Any, eos_token_ids: Sequence[int], entries: dict[str, _Entry | _FourBits]
    ) -> None:
        super().__init__(folder, config, eos_token_ids)
        self._entries = entries
        #: the names of what belongs to each module, by their last parts
        self._modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in entries:
            module, _, suffix = name.rpartition(".")
            self._modules[module][suffix] = name

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored(self, name: str) -> str:
        return str(_dtype(name, self._entry(name))).removeprefix("torch.")

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._view(name).to(dtype)

    def _range(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        if isinstance(entry, _FourBits):
            self._used.add(name)
            return entry.rows(start, stop, dtype)
        return self._view(name)[start:stop].to(dtype).contiguous()

    def _release_rows(self, name: str, start: int, stop: int) -> None:
        entry = self._entry(name)
        if isinstance(entry, _FourBits):
            entry.release(start, stop)
            return
        if entry.transposed:
            return  # a row lies all over the matrix, whose pages go with :meth:`release`
        row_bytes = (entry.end - entry.start) // entry.shape[0]
        entry.file.release(entry.start + start * row_bytes, entry.start + stop * row_bytes)

    def linear(self, name: str) -> StoredLinear:
        weight = f"{name}.weight"
        rows, columns = self._matrix_shape(weight)
        tensors = {}
        for suffix, full_name in self._modules[name].items():
            stored = self.tensor(full_name, torch.float32) if suffix == "bias" else self._view(full_name)
            tensors[suffix] = stored.contiguous()
        return StoredLinear(name, (rows, columns), self.stored(weight), tensors)

    def rows(self, name: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        if isinstance(entry, _FourBits) or entry.transposed or len(entry.shape) != 2:
            return self._view(name).index_select(0, indices).to(dtype)
        self._used.add(name)
        stored = _dtype(name, entry)
        num_rows, columns = entry.shape
        raw = entry.file.rows(entry.start, num_rows, columns * stored.itemsize, indices)
        return raw.view(stored).to(dtype)

    def release(self, name: str) -> None:
        entry = self._entry(name)
        if isinstance(entry, _FourBits):
            entry.release(0, entry.shape[0])
        else:
            entry.file.release(entry.start, entry.end)

    def close(self) -> None:
        # A mapping goes when the last view of it does.
        self._entries = {}
        self._modules = {}

    def _entry(self, name: str) -> _Entry | _FourBits:
        entry = self._entries.get(name)
        if entry is None:
            raise self._missing(name)
        return entry

    def _view(self, name: str) -> Tensor:
        entry = self._entry(name)
        dtype = _dtype(name, entry)
        self._used.add(name)
        if isinstance(entry, _FourBits):
            return entry.rows(0, entry.shape[0], dtype)
        data = entry.file.bytes[entry.start : entry.end]
        if entry.start % dtype.itemsize:
            data = data.clone()  # nothing obliges a writer to align, torch does
        values = data.view(dtype)
        return values.view(entry.shape[::-1]).t() if entry.transposed else values.view(entry.shape)


def open_folder(folder: Path, *, trust_remote_code: bool) -> StoredWeights:
    """Open the model in ``folder``; only ``config.json`` and the headers of the weights are read.

    Raises:
        ModelLoadError: As :func:`trivet_torch.weights.safetensors_dir.check_folder`, and for tensors whose size does
            not fit their shape.
    """
    paths = check_folder(folder)
    config = plain_config(read_config(folder)) or folder_config(folder, trust_remote_code=trust_remote_code)
    wanted = _indexed(folder)
    entries: dict[str, _Entry] = {}
    for path in paths:
        file = MappedFile(path)
        header, base = read_header(path)
        for name, value in header.items():
            if wanted is None or wanted.get(name) == path.name:
                entries[name] = _entry(name, value, file, path, base)
    return _FolderWeights(folder, config, folder_eos_token_ids(folder, config), _unstacked(entries, config))


def _indexed(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file, where several files may hold a tensor of the same name."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return weight_map


def _entry(name: str, value: Mapping[str, Any], file: MappedFile, path: Path, base: int) -> _Entry:
    try:
        shape = tuple(int(size) for size in value["shape"])
        start, end = (base + int(offset) for offset in value["data_offsets"])
        stored = str(value["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: the header's entry of tensor {name!r} is damaged ({error}); download the model again"
        ) from error
    if not base <= start <= end or min(shape, default=0) < 0:
        raise ModelLoadError(
            f"{path}: the header puts tensor {name!r} of the shape {list(shape)} at bytes {start - base} to "
            f"{end - base} of the data, which cannot be; the file is damaged: download the model again"
        )
    entry = _Entry(file, path, stored, shape, start, end)
    if stored in _DTYPES and prod(shape) * _DTYPES[stored].itemsize != end - start:
        raise ModelLoadError(
            f"{path}: tensor {name!r} has {end - start} bytes, which do not fit its shape {list(shape)} in {stored}; "
            "the file is damaged: download the model again"
        )
    return entry


def _dtype(name: str, entry: _Entry | _FourBits) -> torch.dtype:
    dtype = _DTYPES.get(entry.stored)
    if dtype is None:
        assert isinstance(entry, _Entry)
        raise ModelLoadError(
            f"{entry.path}: tensor {name!r} is stored as {entry.stored}, which is not supported; use a checkpoint in "
            "bfloat16, or a GGUF file"
        )
    return dtype


def _unstacked(entries: dict[str, _Entry], config: Any) -> dict[str, _Entry | _FourBits]:
    """Replace stacked experts by single matrices under the checkpoint's names."""
    if config.model_type == "gpt_oss":
        return _unstacked_gpt_oss(entries)
    result: dict[str, _Entry | _FourBits] = dict(entries)
    if config.model_type not in EXPERT_NAMES:
        return result
    module, (gate, up, down) = EXPERT_NAMES[config.model_type]
    for name, entry in entries.items():
        match = _STACKED.fullmatch(name)
        if match is None or len(entry.shape) != 3:
            continue
        del result[name]
        count, rows, _ = entry.shape
        parts = {down: (0, rows)} if match[2] == "down_proj" else {gate: (0, rows // 2), up: (rows // 2, rows // 2)}
        for index in range(count):
            for part, (row, num_rows) in parts.items():
                result[f"{match[1]}{module}.{index}.{part}.weight"] = entry.part(index, row, num_rows)
    return result


def _unstacked_gpt_oss(entries: dict[str, _Entry]) -> dict[str, _Entry | _FourBits]:
    """Replace GPT-OSS's stacked experts by single matrices and biases; gate and up stay one matrix, taking turns."""
    result: dict[str, _Entry | _FourBits] = dict(entries)
    for name, entry in entries.items():
        match = _GPT_OSS.fullmatch(name)
        if match is not None and len(entry.shape) == (2 if match[3] else 3):
            del result[name]
            kind = "bias" if match[3] else "weight"
            for index in range(entry.shape[0]):
                result[f"{match[1]}.{index}.{match[2]}.{kind}"] = entry.item(index)
        match = _GPT_OSS.fullmatch(name.removesuffix("_blocks"))
        scales = entries.get(f"{name.removesuffix('_blocks')}_scales")
        if match is None or scales is None or not _are_four_bits(entry, scales):
            continue
        del result[name], result[f"{match[0]}_scales"]
        count, rows, groups = scales.shape
        rows_of_bytes = replace(entry, shape=(count, rows, groups * GROUP // 2))
        for index in range(count):
            parts = (stack.part(index, 0, rows) for stack in (rows_of_bytes, scales))
            result[f"{match[1]}.{index}.{match[2]}.weight"] = _FourBits(*parts)
    return result


def _are_four_bits(blocks: _Entry, scales: _Entry) -> bool:
    """Whether two stacks are ``[count, rows, groups, 16]`` and ``[count, rows, groups]`` bytes of MXFP4. Unlike the
    stacks of wider types their matrices are not transposed."""
    return (
        blocks.stored == scales.stored == "U8"
        and blocks.shape == (*scales.shape, GROUP // 2)
        and len(scales.shape) == 3
    )

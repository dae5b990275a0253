"""Weights of a GGUF file under the names of the model's Hugging Face checkpoint, dequantised when they are read.

The file's names, and what llama.cpp's converter changed, are those of :mod:`trivet_torch.weights.gguf_names`; here its
changes are undone on the stored blocks, whole rows at a time, so that raw blocks come in the checkpoint's order too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trivet.errors import ModelLoadError
from trivet.gguf import GGMLType, GGUFFile, eos_token_ids
from trivet.roles import StoredLinear
from trivet_torch.weights._listing import listed
from trivet_torch.weights._mapped_file import MappedFile
from trivet_torch.weights._stored_folder import EXPERT_NAMES
from trivet_torch.weights.gguf_config import config_from_gguf, config_values
from trivet_torch.weights.gguf_dequant import check_type, dequantize_into, jobs_for, run_jobs
from trivet_torch.weights.gguf_names import Placement, is_parameter, place
from trivet_torch.weights.plain_config import plain_config
from trivet_torch.weights.stored import StoredWeights

if TYPE_CHECKING:
    from pathlib import Path

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Tensors of fewer elements are dequantised by the calling thread alone.
_THREADED_ELEMENTS = 1 << 22
# What the names of parameters have in place of the names in the checkpoint, by model type.
_RENAMED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"gpt_neox": ("lm_head.", "embed_out."), "mixtral": (".mlp.", ".block_sparse_moe.")}
)
# Types that are a dtype of torch.
_PLAIN_TYPES: Mapping[GGMLType, str] = MappingProxyType(
    {
        GGMLType.F32: "float32",
        GGMLType.F16: "float16",
        GGMLType.BF16: "bfloat16",
        GGMLType.F64: "float64",
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: bytes ``[start, end)`` of the file, row after row.

    ``order`` ``[rows]`` gives for each row of the checkpoint's tensor the file's row; None: they are the same.
    ``offset`` is added to the values in float32.
    """

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    start: int
    end: int
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        return (self.end - self.start) // self.shape[0]

    def part(self, name: str, index: int) -> _Entry:
        """The matrix ``index`` of a stack ``[count, rows, columns]``."""
        size = self.row_bytes
        return _Entry(name, self.ggml_type, self.shape[1:], self.start + index * size, self.start + (index + 1) * size)


class _GGUFWeights(StoredWeights):
    def __init__(self, path: Path, config: Any, eos_token_ids: Sequence[int], entries: dict[str, _Entry]) -> None:
        super().__init__(path, config, eos_token_ids)
        self._entries = entries
        self._file: MappedFile = MappedFile(path)
        # The same memory as numpy has it: the functions that dequantise take arrays.
        self._bytes: _Bytes = self._file.bytes.numpy()

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored(self, name: str) -> str:
        ggml_type = self._entry(name).ggml_type
        return _PLAIN_TYPES.get(ggml_type, ggml_type.name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        self._used.add(name)
        return _values(self._raw(entry), entry, entry.shape, dtype)

    def _range(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        self._used.add(name)
        if entry.order is None:
            raw = self._bytes[entry.start + start * entry.row_bytes : entry.start + stop * entry.row_bytes]
        else:
            raw = self._rows_of(entry).take(entry.order[start:stop], axis=0).reshape(-1)
        return _values(raw, entry, (stop - start, *entry.shape[1:]), dtype)

    def _release_rows(self, name: str, start: int, stop: int) -> None:
        entry = self._entry(name)
        # Rows in another order are near in the file (those of a head).
        self._file.release(entry.start + start * entry.row_bytes, entry.start + stop * entry.row_bytes)

    def linear(self, name: str) -> StoredLinear:
        weight = f"{name}.weight"
        rows, columns = self._matrix_shape(weight)
        entry = self._entry(weight)
        if entry.ggml_type in _PLAIN_TYPES:
            stored: Any = self.tensor(weight, getattr(torch, _PLAIN_TYPES[entry.ggml_type]))
        else:
            self._used.add(weight)
            stored = self._raw(entry).reshape(rows, -1)
        tensors = {"weight": stored}
        if f"{name}.bias" in self._entries:
            tensors["bias"] = self.tensor(f"{name}.bias", torch.float32)
        return StoredLinear(name, (rows, columns), self.stored(weight), tensors)

    def rows(self, name: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        self._used.add(name)
        if entry.order is not None:
            indices = torch.from_numpy(entry.order)[indices]
        raw = self._file.rows(entry.start, entry.shape[0], entry.row_bytes, indices)
        return _values(raw.view(-1).numpy(), entry, (len(indices), *entry.shape[1:]), dtype)

    def release(self, name: str) -> None:
        entry = self._entry(name)
        self._file.release(entry.start, entry.end)

    def close(self) -> None:
        # The mapping goes when the last view of it does.
        self._entries = {}

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise self._missing(name)
        return entry

    def _rows_of(self, entry: _Entry) -> _Bytes:
        """The tensor's blocks as the file has them, ``[rows, bytes per row]``."""
        return self._bytes[entry.start : entry.end].reshape(entry.shape[0], -1)

    def _raw(self, entry: _Entry) -> _Bytes:
        """The tensor's blocks, ``[nbytes]``, its rows in the checkpoint's order."""
        if entry.order is None:
            return self._bytes[entry.start : entry.end]
        ordered: _Bytes = self._rows_of(entry).take(entry.order, axis=0).reshape(-1)
        return ordered


def open_gguf(path: Path) -> StoredWeights:
    """Open the model in the file ``path``; only its header is read.

    Raises:
        ModelLoadError: The file is damaged, its architecture or a tensor's type is not supported, or a tensor has no
            place in the model; names what is concerned.
    """
    file = GGUFFile(path)
    config = plain_config(config_values(file)) or config_from_gguf(file)
    architecture = str(file.metadata["general.architecture"])
    entries: dict[str, _Entry] = {}
    unmapped = []
    for name in filter(is_parameter, file.tensors):
        check_type(file, name)
        placement = place(architecture, name, config)
        if placement is None:
            unmapped.append(name)
        else:
            entries |= _entries(file, name, placement, config)
    if unmapped:
        raise ModelLoadError(
            f"{file.path}: no parameter of a {architecture!r} model corresponds to {listed(unmapped)}; "
            "the file holds a variant that is not supported: use the model's safetensors instead"
        )
    return _GGUFWeights(path, config, eos_token_ids(file), entries)


def _entries(file: GGUFFile, name: str, placement: Placement, config: Any) -> dict[str, _Entry]:
    """The tensors of the checkpoint that the tensor ``name`` of the file holds: one, or one per expert."""
    info = file.tensors[name]
    shape = info.shape
    if placement.parameter.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # the converter drops the dimension of its single output
    order = None
    if placement.reorder is not None:
        rows = torch.arange(shape[0])
        # The view has, in the file's order, the checkpoint's rows.
        order = torch.empty_like(rows).scatter_(0, placement.reorder(rows).reshape(-1), rows).numpy()
    end = info.offset + info.nbytes
    entry = _Entry(name, info.ggml_type, shape, info.offset, end, order, placement.offset)
    module, names = EXPERT_NAMES.get(config.model_type, ("", ("", "", "")))
    head, experts, _ = placement.parameter.partition("mlp.experts.")
    if experts and module:
        part = names[2] if placement.part is None else names[placement.part[0]]
        return {f"{head}{module}.{index}.{part}.weight": entry.part(name, index) for index in range(shape[0])}
    old, new = _RENAMED.get(config.model_type, ("", ""))
    return {placement.parameter.replace(old, new): entry}


def _values(raw: _Bytes, entry: _Entry, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values of the blocks ``raw`` of a tensor, as a new tensor of ``shape``, rounded once to ``dtype``."""
    if entry.offset:
        values = torch.empty(shape, dtype=torch.float32)
        dequantize_into(values, raw, entry.ggml_type)
        return values.add_(entry.offset).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    if prod(shape) < _THREADED_ELEMENTS:
        dequantize_into(out, raw, entry.ggml_type)
    else:
        run_jobs(jobs_for(out, raw, entry.ggml_type))
    return out

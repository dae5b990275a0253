"""Weights as a file holds them, by the names of the model's checkpoint: what builds its own layers reads them here.

Nothing is read before it is asked for. Files are mapped into memory, so a tensor that is used as it is costs no copy,
and :meth:`StoredWeights.release` gives back the pages of one that has been converted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig

    from trivet.roles import StoredLinear


class StoredWeights(ABC):
    """The tensors of one model, named as in its Hugging Face checkpoint whatever the file's format.

    Experts are single matrices (``model.layers.0.mlp.experts.3.gate_proj.weight``, Mixtral's
    ``block_sparse_moe.experts.3.w1.weight``), also where a file stacks them.
    """

    #: the model's transformers configuration
    config: PreTrainedConfig
    #: ids that end a generation, the main one first
    eos_token_ids: tuple[int, ...]
    #: what the user named, for messages
    location: str

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as in the checkpoint. Raises :class:`trivet.errors.ModelLoadError` for an unknown name,
        naming the file."""

    @abstractmethod
    def stored(self, name: str) -> str:
        """How a tensor is stored: a dtype (``bfloat16``) or a GGUF type (``Q4_K``)."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in ``dtype`` on the CPU. It may be a view of the file: it must not be written, and lives as long as
        these weights. Raises :class:`trivet.errors.ModelLoadError` for an unknown name."""

    @abstractmethod
    def linear(self, name: str) -> StoredLinear:
        """A matrix as stored, for a quantization provider: ``name`` without ``.weight``. ``tensors`` holds ``weight``
        (a tensor in its own dtype, or a ``[out, bytes per row]`` uint8 array of GGUF blocks), ``bias`` if there is one
        (float32) and whatever else lies beside them. Rows are in the checkpoint's order."""

    @abstractmethod
    def rows(self, name: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``indices`` ``[n]`` of a matrix as ``[n, columns]``: only they are read and converted, so an embedding
        needs no copy in memory."""

    @abstractmethod
    def release(self, name: str) -> None:
        """The tensor will not be asked for again: its pages of the file need not stay in memory."""

    @abstractmethod
    def close(self) -> None:
        """Give the files back. Views of them must not be used any more."""


def open_weights(location: str, *, trust_remote_code: bool = False) -> StoredWeights:
    """Open a Hugging Face folder, a GGUF file, a hub id or ``demo``; only headers are read.

    Raises:
        ModelLoadError: Anything is missing, damaged or not supported; the message names it and says what to do.
    """
    raise NotImplementedError

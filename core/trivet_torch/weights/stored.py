"""Weights as a file holds them, by the names of the model's checkpoint: what builds its own layers reads them here.

Nothing is read before it is asked for. Files are mapped into memory, so a tensor that is used as it is costs no copy,
and :meth:`StoredWeights.release` gives back the pages of one that has been converted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from trivet.errors import ModelLoadError
from trivet.model_source import resolve_model
from trivet_torch.weights._listing import listed

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from trivet.roles import StoredLinear


class StoredMatrix:
    """A matrix ``[rows, columns]`` of :class:`StoredWeights`, read some rows at a time and let go of at once."""

    def __init__(self, weights: StoredWeights, name: str, dtype: torch.dtype) -> None:
        """See :meth:`StoredWeights.matrix`."""
        self.shape = weights._matrix_shape(name)
        self._weights = weights
        self._name = name
        self._dtype = dtype

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)``; may be a view of the file, which must not be written."""
        return self._weights._range(self._name, start, stop, self._dtype)

    def release(self, start: int, stop: int) -> None:
        """Rows ``[start, stop)`` are not used any more: their pages of the file need not stay in memory."""
        self._weights._release_rows(self._name, start, stop)


class StoredWeights(ABC):
    """The tensors of one model, named as in its Hugging Face checkpoint whatever the file's format.

    Experts are single matrices (``model.layers.0.mlp.experts.3.gate_proj.weight``, Mixtral's
    ``block_sparse_moe.experts.3.w1.weight``), also where a file stacks them. Checkpoints of GPT-OSS have stacks only;
    its experts are ``mlp.experts.3.gate_up_proj`` ``[2 * intermediate, hidden]``, whose rows are gate, up, gate, up, …,
    and ``mlp.experts.3.down_proj`` ``[hidden, intermediate]``, with ``weight`` and ``bias`` each; those in MXFP4 are
    read as bfloat16, which holds them exactly.
    """

    #: the model's configuration: transformers', or a :class:`~trivet_torch.weights.plain_config.PlainConfig`
    config: Any
    #: ids that end a generation, the main one first
    eos_token_ids: tuple[int, ...]
    #: the folder or file, for messages
    location: str

    def __init__(self, location: Path, config: Any, eos_token_ids: Sequence[int]) -> None:
        """Keep what all kinds of files have."""
        self.location = str(location)
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self._used: set[str] = set()

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as in the checkpoint. Raises :class:`trivet.errors.ModelLoadError` for an unknown name,
        naming the file."""

    def expect(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor ``name`` and that it has ``shape``.

        Raises:
            ModelLoadError: It has not, or is missing; names the tensor, both shapes and the file.
        """
        found = self.shape(name)
        if found != tuple(shape):
            raise ModelLoadError(
                f"{self.location}: tensor {name!r} has the shape {list(found)} instead of {list(shape)}, which the "
                "configuration asks for; the weights belong to another model: download or convert it again"
            )

    def unused(self) -> list[str]:
        """Names of the tensors that nobody has asked for with :meth:`tensor`, :meth:`linear` or :meth:`rows`, sorted.

        What is left once a model is built had no place in it.
        """
        return sorted(set(self.names) - self._used)

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        if len(shape) != 2:
            raise ModelLoadError(
                f"{self.location}: tensor {name!r} has the shape {list(shape)}, but a linear layer's weight is a "
                "matrix; the weights belong to another model: download or convert it again"
            )
        return shape[0], shape[1]

    def _missing(self, name: str) -> ModelLoadError:
        siblings = [known for known in self.names if known.rpartition(".")[0] == name.rpartition(".")[0]]
        beside = f" (beside it there are {listed(siblings)})" if siblings else ""
        return ModelLoadError(
            f"{self.location}: the weights hold no tensor {name!r}{beside}; they belong to another model than the "
            "configuration or are incomplete: download or convert the model again"
        )

    @abstractmethod
    def stored(self, name: str) -> str:
        """How a tensor is stored: a dtype (``bfloat16``) or a GGUF type (``Q4_K``)."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in ``dtype`` on the CPU. It may be a view of the file: it must not be written, and lives as long as
        these weights. Raises :class:`trivet.errors.ModelLoadError` for an unknown name."""

    def matrix(self, name: str, dtype: torch.dtype) -> StoredMatrix:
        """A matrix that is read in ``dtype`` some rows at a time, for :func:`trivet_torch.linear.make_linear`. Raises
        :class:`trivet.errors.ModelLoadError` for an unknown name and for what is no matrix."""
        return StoredMatrix(self, name, dtype)

    @abstractmethod
    def _range(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows ``[start, stop)``."""

    @abstractmethod
    def _release_rows(self, name: str, start: int, stop: int) -> None:
        """As :meth:`release`, for rows ``[start, stop)``."""

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


def open_weights(location: str | Path, *, trust_remote_code: bool = False) -> StoredWeights:
    """Open a Hugging Face folder, a GGUF file, a hub id or ``demo``; only headers are read.

    Raises:
        ModelLoadError: Anything is missing, damaged or not supported; the message names it and says what to do.
    """
    from trivet_torch.weights._stored_folder import open_folder
    from trivet_torch.weights._stored_gguf import open_gguf

    found = resolve_model(location)
    if found.kind == "gguf":
        return open_gguf(found.path)
    return open_folder(found.path, trust_remote_code=trust_remote_code)

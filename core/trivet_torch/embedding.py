"""Rows of the embedding matrix by token id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trivet_torch.weights.stored import StoredWeights


class Embedding(ABC):
    """Maps token ids to rows of a matrix ``[num_embeddings, hidden_size]``, times ``scale``.

    Some models (Gemma) multiply embeddings by a constant. Like the weights it is rounded to ``dtype``, in which the
    product is formed, as in transformers.
    """

    num_embeddings: int
    hidden_size: int

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
        """Keep what all kinds have."""
        self.num_embeddings, self.hidden_size = shape
        self._scale = None if scale == 1.0 else float(torch.tensor(scale, dtype=dtype))

    def __call__(self, ids: Tensor) -> Tensor:
        """Token ids ``[T]`` int64 to ``[T, hidden_size]``, new memory."""
        rows = self._rows(ids)
        return rows if self._scale is None else rows.mul_(self._scale)

    @abstractmethod
    def _rows(self, ids: Tensor) -> Tensor: ...

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of memory that the matrix takes."""


#: bytes of rows of recent tokens that are kept: reading one takes longer than everything else that is done with it
_RECENT_BYTES = 2 << 20


class FileEmbedding(Embedding):
    """Reads and converts the rows it needs from the file, on the CPU; of the matrix only some rows of recent tokens
    take memory. The system's cache of files holds it as long as there is room."""

    def __init__(self, weights: StoredWeights, name: str, *, dtype: torch.dtype, scale: float = 1.0) -> None:
        """Look up the tensor ``name`` of ``weights``, which must stay open. Raises
        :class:`trivet.errors.ModelLoadError` if there is none."""
        super().__init__(weights.shape(name), dtype, scale)
        self._weights = weights
        self._name = name
        self._dtype = dtype
        weights.rows(name, torch.zeros(1, dtype=torch.int64), dtype)  # a type that cannot be read shows now
        count = min(self.num_embeddings, _RECENT_BYTES // (self.hidden_size * dtype.itemsize))
        #: bytes of rows, as an array: for a few rows that costs less than a tensor
        self._recent = np.empty((count, self.hidden_size * dtype.itemsize), np.uint8)
        #: where a token's row is among the recent ones; the one that was not wanted for longest comes first
        self._places: dict[int, int] = {}

    def _rows(self, ids: Tensor) -> Tensor:
        wanted = ids.tolist()
        places = self._places
        if 2 * len(wanted) > len(self._recent):
            # A long prompt would take the place of all others; a token that it has twice is read once.
            order = {token: index for index, token in enumerate(dict.fromkeys(wanted))}
            rows = self._read(list(order))
            return rows if len(order) == len(wanted) else rows[torch.tensor([order[token] for token in wanted])]
        missing: dict[int, None] = {}
        for token in wanted:
            place = places.pop(token, None)
            if place is None:
                missing[token] = None
            else:
                places[token] = place
        if missing:  # at most half of the places, so none that is wanted now
            rows = self._read(list(missing))
            self._keep(missing, rows)
            if len(missing) == len(wanted):
                return rows
        if not wanted:
            return torch.empty(0, self.hidden_size, dtype=self._dtype)
        return torch.from_numpy(self._recent[[places[token] for token in wanted]]).view(self._dtype)

    def _keep(self, tokens: Iterable[int], rows: Tensor) -> None:
        places, count = self._places, len(self._recent)
        taken = []
        for token in tokens:
            places[token] = place = len(places) if len(places) < count else places.pop(next(iter(places)))
            taken.append(place)
        self._recent[taken] = rows.view(torch.uint8).numpy()

    def _read(self, tokens: list[int]) -> Tensor:
        return self._weights.rows(self._name, torch.tensor(tokens, dtype=torch.int64), self._dtype)

    @property
    def weight_bytes(self) -> int:
        return 0


class DeviceEmbedding(Embedding):
    """Looks rows up in a matrix in memory, on any device."""

    def __init__(self, weight: Tensor, *, scale: float = 1.0) -> None:
        """Keep ``weight`` ``[num_embeddings, hidden_size]``."""
        super().__init__(weight.shape, weight.dtype, scale)
        self.weight = weight

    def _rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

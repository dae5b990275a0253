"""CUDA graphs of decode steps: the whole forward pass is recorded once per batch size, and replayed as one launch.

A decode step of a small model is a few hundred kernels of microseconds each, and launching them takes longer than they
run. A graph (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs) replays them all, with the addresses
and sizes of the recording: a step's inputs are therefore copied into buffers that never move, and its rows are padded
to the next recorded size. Padding rows are requests of one token in the null block, whose content nobody reads.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivet.plan import LogitsRows
from trivet.roles import AttentionMetadata, ForwardBatch, ForwardOutput

if TYPE_CHECKING:
    from trivet.roles import Attention, KVLayout, Model

logger = logging.getLogger("trivet.runner")

#: how often a step runs before it is recorded: kernels are compiled and libraries take their workspaces
_WARM_UPS = 2


class GraphBackend(ABC):
    """Records work on a device and replays it."""

    @abstractmethod
    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record ``work``; returns what replays it, and what ``work`` returned: tensors that a replay fills anew."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory of the device in use, that of other programs included."""


class CudaBackend(GraphBackend):
    """Graphs of CUDA and ROCm, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate (copies of a cache tier): only this thread's calls are held to what graphs allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._pool = graph.pool()
        return graph.replay, output

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class DecodeGraphs:
    """The recorded decode steps of a model, by number of rows."""

    def __init__(
        self,
        backend: GraphBackend,
        model: Model,
        attention: Attention,
        layout: KVLayout,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """``sizes``: batch sizes to record. Nothing is recorded before :meth:`capture`."""
        self._backend, self._model, self._attention = backend, model, attention
        self._sizes = sorted(set(sizes))
        self._max_len = max_model_len
        self._graphs: dict[int, tuple[Callable[[], None], ForwardOutput, list[AttentionMetadata]]] = {}
        rows = self._sizes[-1]

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._ids = zeros(rows, dtype=torch.int64)
        self._positions = zeros(rows, dtype=torch.int64)
        self._indices = torch.arange(rows, dtype=torch.int64, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._block_sizes = [group.block_size for group in layout.groups]
        self._tables = [zeros(rows, -(-max_model_len // size), dtype=torch.int32) for size in self._block_sizes]
        self._slots = [zeros(rows, dtype=torch.int64) for _ in self._block_sizes]

    def capture(self) -> int:
        """Record every size, the largest first so that the others fit into its memory; returns the bytes taken."""
        before = self._backend.used_bytes()
        for size in reversed(self._sizes):
            batch = self._static_batch(size)

            def work(batch: ForwardBatch = batch) -> ForwardOutput:
                return self._model.forward(batch)

            self._graphs[size] = (*self._backend.capture(work), batch.attention)
        taken = max(0, self._backend.used_bytes() - before)
        logger.info("recorded decode steps of %s rows in %.0f MiB", self._sizes, taken / 2**20)
        return taken

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """The output of a decode step by the recording of the next size, valid until the next call; None for a step
        that is not recorded (chunks of prompts, drafts, hidden states, more rows)."""
        rows = len(batch.query_lens)
        if rows > self._sizes[-1] or not self._records(batch):
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._fill(batch, rows, size)
        replay, output, metas = self._graphs[size]
        for meta in metas:
            self._attention.prepare(meta)  # what the recorded pass has of it was made on the host
        replay()
        return ForwardOutput(output.logits[:rows])

    def _records(self, batch: ForwardBatch) -> bool:
        return (
            len(batch.logits_indices) == len(batch.input_ids) == len(batch.query_lens)
            and not batch.wants_hidden
            and not batch.hidden_layers
            and not batch.multimodal
            and batch.tree_parents is None
            and (batch.adapters is None or not (batch.adapters >= 0).any())
        )

    def _fill(self, batch: ForwardBatch, rows: int, size: int) -> None:
        self._ids[:rows].copy_(batch.input_ids)
        self._positions[:rows].copy_(batch.positions)
        meta = batch.attention[0]
        self._seq_lens[:rows].copy_(meta.seq_lens)
        padding = slice(rows, size)
        self._ids[padding].zero_()
        self._positions[padding].zero_()
        self._seq_lens[padding].fill_(1)
        for meta, table, slots in zip(batch.attention, self._tables, self._slots, strict=True):
            width = meta.block_table.shape[1]
            table[:rows, :width].copy_(meta.block_table)
            table[padding, 0].zero_()
            slots[:rows].copy_(meta.slot_mapping)
            slots[padding].zero_()

    def _static_batch(self, size: int) -> ForwardBatch:
        """A batch over the buffers. Its lengths on the host are those of the longest context, so that what is recorded
        holds for every other."""
        metas = [
            AttentionMetadata(
                group=group,
                block_size=block_size,
                query_start=self._starts[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_table=self._tables[group][:size],
                slot_mapping=self._slots[group][:size],
                max_query_len=1,
                max_seq_len=self._max_len,
            )
            for group, block_size in enumerate(self._block_sizes)
        ]
        return ForwardBatch(
            slots=np.arange(size, dtype=np.int32),
            input_ids=self._ids[:size],
            positions=self._positions[:size],
            query_lens=np.ones(size, np.int32),
            seq_lens=np.full(size, self._max_len, np.int32),
            logits_indices=self._indices[:size],
            logits_rows=np.full(size, LogitsRows.LAST, np.uint8),
            samples=np.ones(size, np.bool_),
            attention=metas,
        )


def default_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, then every eighth up to 256 and every sixteenth up to 512, the last one being
    ``max_num_seqs`` where that is less."""
    limit = min(max_num_seqs, 512)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    return [*(size for size in sizes if size < limit), limit]

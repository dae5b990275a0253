"""What may be recorded into a CUDA graph reads nothing from the device: tensors without data show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import LONGEST, VOCAB, make_model, make_native, save
from worker_kit import make_layout

from trivet.plan import LogitsRows
from trivet.roles import Attention, AttentionMetadata, ForwardBatch
from trivet_native.model import NativeModel

ROWS = 3


class _NoAttention(Attention):
    """Has the shapes of attention."""

    capturable = True

    def support(self, spec: Any) -> Any:
        raise NotImplementedError

    def allocate(self, layout: Any) -> None:
        raise NotImplementedError

    def kv(self, layer: int) -> Any:
        raise NotImplementedError

    def prepare(self, meta: AttentionMetadata) -> None:
        meta.prepared = True

    def forward(self, layer: int, query: Any, key: Any, value: Any, meta: AttentionMetadata, **given: Any) -> Any:
        assert meta.prepared
        return torch.empty_like(query)

    def copy_blocks(self, group: int, pairs: Any) -> None:
        raise NotImplementedError

    def zero_blocks(self, group: int, blocks: Any) -> None:
        raise NotImplementedError

    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        raise NotImplementedError


def _loaded(folder: Path, case: str, device: str = "meta", **given: Any) -> NativeModel:
    model = make_native(save(make_model(case), folder), **given)
    model._context.device = device
    model.load()
    return model


def _decode_step(model: NativeModel) -> torch.Tensor:
    """The logits of a decode step whose every tensor is on a device that nothing can be read from."""
    layout = make_layout(model.kv_specs(), 4)
    model.bind(_NoAttention(), layout)

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="meta")

    metas = [
        AttentionMetadata(
            group=group.index,
            block_size=group.block_size,
            query_start=tensor(ROWS + 1),
            seq_lens=tensor(ROWS),
            block_table=tensor(ROWS, LONGEST // group.block_size),
            slot_mapping=tensor(ROWS, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=LONGEST,
        )
        for group in layout.groups
    ]
    batch = ForwardBatch(
        slots=np.arange(ROWS, dtype=np.int32),
        input_ids=tensor(ROWS, dtype=torch.int64),
        positions=tensor(ROWS, dtype=torch.int64),
        query_lens=np.ones(ROWS, np.int32),
        seq_lens=np.full(ROWS, LONGEST, np.int32),
        logits_indices=tensor(ROWS, dtype=torch.int64),
        logits_rows=np.full(ROWS, LogitsRows.LAST, np.uint8),
        samples=np.ones(ROWS, np.bool_),
        attention=metas,
    )
    logits: torch.Tensor = model.forward(batch).logits
    return logits


@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3", "phi3", "qwen3"])
def test_a_decode_step_reads_nothing_from_the_device(tmp_path: Path, case: str) -> None:
    model = _loaded(tmp_path, case)
    assert model.capturable
    logits = _decode_step(model)
    assert (logits.device.type, logits.shape) == ("meta", (ROWS, VOCAB))


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_mixtures_of_experts_read_counts(tmp_path: Path, case: str) -> None:
    model = _loaded(tmp_path, case)
    assert not model.capturable
    with pytest.raises((RuntimeError, NotImplementedError)):
        _decode_step(model)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_on_a_cpu_and_compiled_nothing_is_recorded(tmp_path: Path) -> None:
    assert not _loaded(tmp_path, "llama", device="cpu").capturable
    assert not _loaded(tmp_path, "llama", compile=True).capturable

"""What may be recorded into a CUDA graph reads nothing from the device: tensors without data show it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import LONGEST, VOCAB, make_model, make_native, save
from worker_kit import make_layout

from trivet.plan import LogitsRows
from trivet.roles import Attention, AttentionMetadata, ForwardBatch, Quantization, StoredLinear
from trivet_native.model import NativeModel
from trivet_torch.linear import Linear

# Read when kernels are first imported, which a model leaves until it needs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

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


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_stacked_experts_read_nothing_either(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched: list[str] = []

    def stand_in(name: str) -> Any:
        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args, **kwargs: launched.append(name)

        return Kernel()

    names = ("gate_kernel", "down_kernel", "sum_kernel")
    for name in names:
        monkeypatch.setattr(import_module("trivet_kernels.triton.moe"), name, stand_in(name))
    monkeypatch.setattr("trivet_kernels.moe.serves", lambda device: device.type == "meta")
    model = _loaded(tmp_path, case)
    assert model.capturable
    assert model.capture_problem is None
    assert _decode_step(model).shape == (ROWS, VOCAB)
    mixtures = sum(layer.experts is not None for layer in model._spec.layers)
    assert launched == list(names) * mixtures


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_experts_one_after_the_other_read_counts(tmp_path: Path, case: str) -> None:
    model = _loaded(tmp_path, case)
    assert not model.capturable
    assert model.capture_problem == (
        "layer 0: the numbers of the experts' tokens are read, which are multiplied one expert after the other"
    )
    with pytest.raises((RuntimeError, NotImplementedError)):
        _decode_step(model)


class _Product(Linear):
    """A product of unknown ways."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.out_features, self.in_features = shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), self.out_features)

    @property
    def weight_bytes(self) -> int:
        return 0


class _Recordable(_Product):
    capturable = True


class _Quantization(Quantization):
    """Takes over the matrices of one name."""

    def __init__(self, taken: str, kind: type[_Product]) -> None:
        self._taken, self._kind = taken, kind

    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        return name.endswith(self._taken)

    def linear(self, parts: Sequence[StoredLinear]) -> Linear:
        return self._kind((sum(part.shape[0] for part in parts), parts[0].shape[1]))


@pytest.mark.parametrize(
    ("taken", "named"),
    [("layers.1.mlp.down_proj", "layer 1: mlp.down"), ("o_proj", "layer 0: out"), ("lm_head", "lm_head")],
)
def test_a_product_that_cannot_be_recorded_is_named(tmp_path: Path, taken: str, named: str) -> None:
    model = _loaded(tmp_path, "qwen2", quantization=_Quantization(taken, _Product))
    assert not model.capturable
    assert model.capture_problem == f"{named} is a _Product"


def test_quantised_products_that_say_so_are_recorded(tmp_path: Path) -> None:
    model = _loaded(tmp_path, "qwen2", quantization=_Quantization("_proj", _Recordable))
    assert model.capturable
    assert _decode_step(model).shape == (ROWS, VOCAB)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_on_a_cpu_and_compiled_nothing_is_recorded(tmp_path: Path) -> None:
    on_cpu, compiled = _loaded(tmp_path, "llama", device="cpu"), _loaded(tmp_path, "llama", compile=True)
    assert not on_cpu.capturable
    assert on_cpu.capture_problem == "on a CPU embeddings are read from the model's file"
    assert not compiled.capturable
    assert compiled.capture_problem == "plugins.model.compile is set"

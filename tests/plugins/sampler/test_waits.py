"""A step's sampling does not wait for a GPU, but for the tokens in the end: tensors without data show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from sampler_rig import VOCAB, Rig, Row, sample_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trivet_kernels.sampling
from trivet.plan import NewRequest
from trivet.roles import LogitsProcessor, SampleRows

# Read when kernels are first imported, which the sampler leaves until it needs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

META = torch.device("meta")
KERNELS = {
    "sampling": ["group_kernel", "draw_kernel"],
    "logprobs": ["group_kernel", "logprobs_kernel", "ranks_kernel"],
    "logits": ["bitmask_kernel", "bias_kernel", "penalty_kernel"],
}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "logprobs": 0, "logprob_token_ids": [4, 5]},
    {"min_p": 0.2, "extra_args": {"own": True}},
    {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.6,
        "presence_penalty": -0.3,
        "prompt": [1, 4, 4],
        "output": [4, 9],
        "logprobs": 2,
    },
    {"logit_bias": {5: 2.5, 7: -100.0}, "allowed_token_ids": list(range(0, 200, 3)), "words": [[6], [9, 12]]},
    {"min_tokens": 4, "stop_ids": [3, 8]},
    {"prompt_logprobs": 1, "temperature": 0},
]


class Own(LogitsProcessor):
    """Changes logits in torch's operations, before or after the temperature."""

    def __init__(self, *, keeps_argmax: bool) -> None:
        self.keeps_argmax = keeps_argmax  # type: ignore[misc]

    def add(self, request: NewRequest) -> bool:
        return bool(request.params.extra_args)

    def remove(self, slot: int) -> None:
        pass

    def apply(self, logits: Tensor, rows: SampleRows, selected: Tensor) -> Tensor:
        return logits.index_add(0, selected, torch.ones(len(selected), VOCAB, device=logits.device))


class Copies(TorchDispatchMode):
    """Counts copies to the device, which must not block, and refuses operations that mix devices: torch copies what is
    on the wrong one, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        flat = [x for arg in (*args, *given.values()) for x in (arg if isinstance(arg, list | tuple) else [arg])]
        devices = {x.device.type for x in flat if isinstance(x, Tensor)}
        assert len(devices) < 2, f"{func} takes tensors of {devices}"
        if func is torch.ops.aten._to_copy.default and devices == {"cpu"} and given.get("device") == META:
            assert given.get("non_blocking"), "a copy to the device that is waited for"
            self.sent += 1
        return func(*args, **given)


def launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched from now on; none is carried out."""
    seen: set[str] = set()

    def stand_in(name: str) -> Any:
        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                assert all(type(size) is int and size > 0 for size in grid)
                return lambda *args, **kwargs: seen.add(name)

        return Kernel()

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(import_module(f"trivet_kernels.triton.{module}"), name, stand_in(name))
    return seen


def test_all_that_a_step_brings_back_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    rig = Rig([Own(keeps_argmax=False), Own(keeps_argmax=True)])
    for slot, params in enumerate(REQUESTS):
        rig.add(slot, seed=31 + slot, **params)
    # Two drafts for the request with penalties and one without; two rows for prompt logprobs.
    rows = [Row(slot, 2 if slot == 3 else 0, [5, 6] if slot in {1, 3} else []) for slot in range(len(REQUESTS))]
    count = len(REQUESTS) + 4 + 2
    mask = torch.full((count, -(-VOCAB // 32)), -1, dtype=torch.int32)
    mask[0, 1:] = 0
    reads: list[list[tuple[int, ...]]] = []

    def read(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
        assert {tensor.device for tensor in tensors} == {META}
        assert {tensor.element_size() for tensor in tensors} == {4}
        reads.append([tuple(tensor.shape) for tensor in tensors])
        return [torch.zeros_like(tensor, device="cpu").numpy() for tensor in tensors]

    monkeypatch.setattr(trivet_kernels.sampling, "fused", lambda logits: True)
    monkeypatch.setattr("trivet_sampler.sampler.to_host", read)
    launched = launches(monkeypatch)
    batch = sample_rows(rows, count, [(6, 1, 1, count - 2, 2)], rig.tokens, mask, rig.lengths)
    batch.bitmask = torch.empty_like(mask, device=META)
    logits = torch.empty(count, VOCAB, dtype=torch.bfloat16, device=META)
    with Copies() as copies:
        sampled = rig.sampler.sample(logits, batch)
    assert launched == {name for names in KERNELS.values() for name in names}
    # Ids and maxima; logprobs of 5 drawn tokens and 3 of request 1, without alternatives, with 1, with 2; asked ids.
    assert len(reads) == 1
    assert reads[0][0] == (2, count - 2)
    assert reads[0][-1] == (3, 3)
    assert copies.sent > 10
    assert sampled.accepted.lengths.tolist() == [1] * len(REQUESTS)
    assert [entry.row for entry in sampled.logprobs] == [0, 1, 3]
    assert [entry.values.token_ids.shape for entry in sampled.logprobs] == [(1, 3), (1, 3), (1, 3)]
    assert [entry.values.token_ids.shape for entry in sampled.prompt_logprobs] == [(2, 2)]


def test_a_mask_without_word_of_what_it_forbids_still_counts() -> None:
    rig = Rig().add(0, temperature=0)
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    mask = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    mask[0, 2] = 1 << 3
    batch = sample_rows([Row(0)], 1, (), rig.tokens, mask, rig.lengths)
    batch.constrained = None
    assert rig.sampler.sample(logits, batch).accepted.values.tolist() == [67]

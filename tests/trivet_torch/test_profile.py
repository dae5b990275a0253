"""The trial of the largest step: what it measures, and that it leaves no trace."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import Context, Driver, GreedySampler, SlowAttention, greedy, make_layout, make_model, save_model

from trivet.errors import CacheMemoryError
from trivet.plan import NewRequest, Ragged
from trivet.roles import Drafter, DraftInputs, Drafts, MemoryEstimate, ModelInfo, WorkerInfo
from trivet_sampler.sampler import TorchSampler
from trivet_torch import trial
from trivet_torch.options import RunnerOptions
from trivet_torch.runner import TorchRunner
from trivet_torch.trial import largest_step, measure, trial_layout
from trivet_torch_attention.attention import TorchAttention
from trivet_transformers.model import TransformersModel

MIB = 1 << 20
#: logits of all rows, in float32, are more than an allocator may have at hand from before (32 MiB in glibc)
VOCAB, ROWS, BUDGET = 120_000, 80, 128
PROMPT = [3 + (7 * i) % 90 for i in range(23)]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A model with windowed and full layers, and so many words that logits are what takes memory."""
    model = make_model("gemma3", vocab_size=VOCAB)
    return save_model(model, tmp_path_factory.mktemp("wide")), model


def runner(
    name: str, profile: Any, *, rows: int = ROWS, sampler: Any = None, attention: Any = None, **roles: Any
) -> TorchRunner:
    context = Context(name, max_num_seqs=rows)
    context.max_num_batched_tokens = BUDGET
    context.roles = {"attention": attention or SlowAttention(), "sampler": sampler or GreedySampler(), **roles}
    context.roles["model"] = TransformersModel(context)
    made = TorchRunner(context, RunnerOptions(profile=profile))
    made.context = context  # type: ignore[attr-defined]
    if isinstance(attention, TorchAttention):
        attention._context = context
    return made


def serve(made: TorchRunner, info: WorkerInfo, count: int) -> list[int]:
    """Tokens of a request through a fresh cache."""
    layout = make_layout(info.specs, 4)
    made.allocate(layout)
    driver = Driver(made, layout)
    driver.add(3, PROMPT)
    for _ in range(count):
        driver.step()
    made.check_integrity()
    output: list[int] = driver.outputs(3)
    return output


@pytest.mark.parametrize("attention", [SlowAttention, lambda: TorchAttention(None)], ids=["slow", "torch"])  # type: ignore[arg-type]
def test_a_profiled_runner_says_what_a_step_takes_and_serves_as_before(
    wide: tuple[str, Any], caplog: pytest.LogCaptureFixture, attention: Any
) -> None:
    name, model = wide
    made = runner(name, True, attention=attention())
    info = made.load()
    assert info.workspace_bytes is not None
    assert ROWS * VOCAB * 4 < info.workspace_bytes < 800 * MIB
    with caplog.at_level(logging.INFO, "trivet.runner"):
        assert serve(made, info, 5) == greedy(model, PROMPT, 5)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trivet.runner"]
    assert "weights" in line
    assert "(measured)" in line
    assert "199 blocks" in line


def test_on_a_cpu_nothing_is_measured_unless_asked_for(wide: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: 1000 * MIB)
    monkeypatch.setattr("trivet_torch.runner.measure", lambda device, step: 30 * MIB)
    name, _ = wide
    for profile in ("auto", False):
        info = runner(name, profile).load()
        assert (info.workspace_bytes, info.available_bytes) == (None, 500 * MIB)
    info = runner(name, True).load()
    assert (info.workspace_bytes, info.available_bytes) == (30 * MIB, 470 * MIB)


def test_the_storage_of_a_trial_is_let_go(wide: tuple[str, Any]) -> None:
    made = runner(wide[0], True)
    info = made.load()
    attention = made.context.roles["attention"]  # type: ignore[attr-defined]
    trials = [weakref.ref(part) for spec in info.specs for part in attention.kv(spec.layer)]
    assert sum(ref().numel() for ref in trials) * 4 < MIB, "a trial's cache is of no weight"  # type: ignore[union-attr]
    made.allocate(make_layout(info.specs, 4))
    gc.collect()
    assert [ref() for ref in trials] == [None] * len(trials)


def test_a_trial_leaves_nothing_with_sampler_and_drafters(wide: tuple[str, Any]) -> None:
    class Counting(Drafter):
        num_tokens = 3

        def __init__(self) -> None:
            self.slots: set[int] = set()
            self.asked: list[int] = []

        def add(self, request: NewRequest) -> None:
            self.slots.add(request.slot)

        def remove(self, slot: int) -> None:
            self.slots.remove(slot)

        def propose(self, inputs: DraftInputs) -> Drafts:
            self.asked.append(len(inputs.slots))
            assert len(inputs.output.logits) == 4 * len(inputs.slots), "drafts reach the head too"  # type: ignore[union-attr]
            return Drafts(Ragged.empty(len(inputs.slots)))

    drafter, sampler = Counting(), GreedySampler()
    runner(wide[0], True, rows=8, sampler=sampler, drafter=[drafter]).load()
    assert drafter.asked == [8]
    assert drafter.slots == set()
    assert sampler.epochs == {}


def test_the_real_sampler_draws_every_row_of_a_trial(wide: tuple[str, Any]) -> None:
    drawn: list[Any] = []

    class Watched(TorchSampler):
        def sample(self, logits: Any, rows: Any) -> Any:
            drawn.append(super().sample(logits, rows))
            return drawn[-1]

    made = runner(wide[0], True, rows=8, sampler=Watched())
    made.load()
    (sampled,) = drawn
    assert not sampled.errors
    assert sampled.accepted.lengths.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("seqs", "budget", "length", "drafts"),
    [(8, 64, 256, 0), (8, 64, 16, 0), (4, 4, 256, 2), (9, 4, 256, 0), (4, 64, 256, 3), (8, 64, 1, 3), (1, 64, 256, 0)],
)
def test_the_largest_step_uses_the_whole_budget(seqs: int, budget: int, length: int, drafts: int) -> None:
    support = SlowAttention().support(None)  # type: ignore[arg-type]
    layout = trial_layout([], [support])
    plan = largest_step(
        layout,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        vocab_size=9,
        num_drafts=drafts,
    )
    assert plan.num_rows == min(seqs, budget)
    assert plan.num_tokens == min(budget, plan.num_rows * length)
    assert (plan.num_computed + plan.num_scheduled).max() == length, "one context is of the full length"
    assert ((plan.num_computed + plan.num_scheduled) <= length).all()
    assert (plan.num_drafts < plan.num_scheduled).all()
    if drafts and budget >= seqs * (drafts + 1) and length > drafts:
        assert (plan.num_drafts == drafts).all()


def test_groups_of_a_trial_are_the_kinds_of_layers(wide: tuple[str, Any]) -> None:
    info = runner(wide[0], False).load()
    layout = trial_layout(info.specs, info.support)
    assert [(g.layers, g.kind, g.window) for g in layout.groups] == [((0, 1, 3), "sliding", 8), ((2,), "full", None)]
    assert {storage.num_blocks for storage in layout.storage} == {2}


# ------------------------------------------------------------------ how it is measured


def test_what_a_step_allocates_is_seen_on_a_cpu() -> None:
    def step() -> None:
        block = np.ones(80 * MIB, np.uint8)  # written to, so it is resident
        assert block[-1] == 1

    taken = measure(torch.device("cpu"), step)
    assert taken is not None
    assert 79 * MIB <= taken < 120 * MIB
    again = measure(torch.device("cpu"), lambda: None)
    assert again is not None
    assert again < 20 * MIB, "an earlier peak does not count"


def test_without_a_high_water_mark_the_life_of_the_process_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_PROC", tmp_path / "nothing")
    peaks = iter([100 * MIB, 130 * MIB, 130 * MIB, 130 * MIB])
    monkeypatch.setattr(trial, "_lifetime_peak", lambda: next(peaks))
    ran: list[int] = []
    assert measure(torch.device("cpu"), lambda: ran.append(1)) == 30 * MIB
    assert measure(torch.device("cpu"), lambda: ran.append(2)) is None, "below an earlier peak nothing can be told"
    assert ran == [1, 2]


def test_the_process_knows_its_peak() -> None:
    assert trial._lifetime_peak() > 50 * MIB


class FakeCuda:
    """torch.cuda's counters over a device on which a step takes memory in torch's allocator and past it."""

    def __init__(self) -> None:
        self.allocated, self.reserved, self.outside = 400 * MIB, 420 * MIB, 100 * MIB
        self.cached = self.peak = 0
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        extra = 0
        if self.steps == 1:  # kernels are tried out, and a library keeps memory on both sides of the allocator
            self.outside += 25 * MIB
            self.allocated += 8 * MIB
            self.reserved += 8 * MIB
            extra = 300 * MIB
        self.peak = max(self.peak, self.allocated + 50 * MIB + extra)
        self.cached = max(self.cached, 64 * MIB + extra)

    def synchronize(self, device: Any) -> None:
        assert device == CUDA

    def empty_cache(self) -> None:
        self.cached = 0

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def memory_reserved(self, device: Any) -> int:
        return self.reserved + self.cached

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.allocated

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1000 * MIB - self.outside - self.reserved - self.cached, 1000 * MIB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in [name for name in vars(FakeCuda) if not name.startswith("_") and name != "step"]:
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_on_a_gpu_the_peak_of_a_warm_step_and_what_libraries_keep_count(cuda: FakeCuda) -> None:
    taken = measure(CUDA, cuda.step)
    assert cuda.steps == 2
    assert taken == int((50 + 8) * MIB * 1.1) + 25 * MIB
    assert cuda.cached == 0, "what the step let go of is given back to the device"


def test_on_a_gpu_the_cache_gets_what_the_step_leaves(cuda: FakeCuda, wide: tuple[str, Any]) -> None:
    made = runner(wide[0], "auto")
    info = SimpleNamespace(vocab_size=VOCAB, hidden_size=32, dtype="float32")
    made._device = CUDA
    before = int(1000 * MIB * 0.9) - (420 + 100) * MIB
    assert made._profiles
    assert made._available_bytes(info) == before, "the measured step is taken off afterwards"  # type: ignore[arg-type]
    unmeasured = runner(wide[0], False)
    unmeasured._device = CUDA
    context = made.context  # type: ignore[attr-defined]
    unmeasured._model, unmeasured._attention = context.get("model"), context.get("attention")
    estimate = unmeasured._estimate(info)  # type: ignore[arg-type]
    assert unmeasured._available_bytes(info) == before - estimate  # type: ignore[arg-type]


def test_before_loading_a_gpu_promises_what_weights_and_a_step_would_leave(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet_torch.runner.resolve_device", lambda name: CUDA)
    made = runner("nothing is loaded", "auto")
    estimate = made.estimate(ModelInfo(VOCAB, 256, hidden_size=32), 100 * MIB, BUDGET)
    free = 900 * MIB - 520 * MIB
    workspace = 4 * ROWS * VOCAB * 4 + 16 * BUDGET * 32 * 4
    assert estimate == MemoryEstimate("cuda", free, workspace, free - 100 * MIB - workspace)
    assert made.context.device == "cuda"  # type: ignore[attr-defined]


def test_before_loading_a_cpu_promises_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: 1000 * MIB)
    for profile, workspace in (("auto", 0), (True, 4 * ROWS * VOCAB * 4 + 16 * BUDGET * 32 * 4)):
        estimate = runner("nothing is loaded", profile).estimate(
            ModelInfo(VOCAB, 256, hidden_size=32), 100 * MIB, BUDGET
        )
        assert estimate.free_bytes == 1000 * MIB
        assert estimate.available_bytes == 450 * MIB - workspace


def test_a_step_that_does_not_fit_names_the_settings(wide: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TransformersModel, "forward", short)
    with pytest.raises(CacheMemoryError, match="max_num_batched_tokens or max_num_seqs") as caught:
        runner(wide[0], True).load()
    assert "128 tokens and 80 requests" in str(caught.value)

"""Recorded decode steps: the same tokens as without, padding that disturbs nobody, and what is not replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_kit import Context, Driver, GreedySampler, SlowAttention, greedy, make_layout, make_model, save_model

from trivet.errors import CacheMemoryError
from trivet.roles import AttentionMetadata
from trivet_torch.graphs import GraphBackend, default_sizes
from trivet_torch.options import RunnerOptions
from trivet_torch.runner import TorchRunner
from trivet_transformers.model import TransformersModel

PROMPTS = [[3 + (7 * i + 13 * r) % 90 for i in range(4 + 5 * r)] for r in range(6)]


class Recorder(GraphBackend):
    """A replay does the recorded work again on the very tensors of the recording, as a graph does, and puts the outcome
    into those that the recording returned."""

    def __init__(self, replays: list[int]) -> None:
        self.replays = replays
        self.recorded: list[int] = []

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        output = work()
        rows = len(output.logits)
        self.recorded.append(rows)

        @torch.inference_mode()
        def replay() -> None:
            self.replays.append(rows)
            output.logits.copy_(work().logits)

        return replay, output

    def used_bytes(self) -> int:
        # The first graph takes 64 MiB, each further one 2.
        return sum(2 << 20 for _ in self.recorded) + (62 << 20 if self.recorded else 0)


class Attention(SlowAttention):
    """Plans a step on the host, and keeps the tensors of the plan, as a recorded pass needs."""

    capturable = True

    def __init__(self) -> None:
        self.planned: list[tuple[int, list[int]]] = []

    def prepare(self, meta: AttentionMetadata) -> None:
        self.planned.append((id(meta), meta.seq_lens.tolist()))


class Recorded(TransformersModel):
    capturable = True


class GraphRunner(TorchRunner):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replays: list[int] = []
        self.backends: list[Recorder] = []

    def _graph_backend(self) -> GraphBackend | None:
        self.backends.append(Recorder(self.replays))
        return self.backends[-1]

    @property
    def recorded(self) -> list[list[int]]:
        return [backend.recorded for backend in self.backends if backend.recorded]


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model(request.param)
    return save_model(model, tmp_path_factory.mktemp(request.param)), model


def start(name: str, *, attention: Any = None, model: type = Recorded, **options: Any) -> tuple[GraphRunner, Driver]:
    context = Context(name, max_num_seqs=8, max_model_len=64)
    context.roles = {"attention": attention or Attention(), "sampler": GreedySampler()}
    context.roles["model"] = model(context)
    made = GraphRunner(context, RunnerOptions(**options))
    layout = make_layout(made.load().specs, 4)
    made.allocate(layout)
    return made, Driver(made, layout)


def test_tokens_are_those_of_steps_that_are_launched_one_by_one(saved: tuple[str, Any]) -> None:
    name, model = saved
    made, driver = start(name, cudagraph_capture_sizes=[1, 4, 8])
    assert made.recorded == [[8, 4, 1]]
    driver.add(5, PROMPTS[0])
    for _ in range(4):
        driver.step()
    for slot in range(1, 5):
        driver.add(slot, PROMPTS[slot])
    driver.step()
    for _ in range(4):
        driver.step()
    # Alone: 1 prompt, 3 decodes of one row; then a step with prompts; then five rows, padded to eight.
    assert made.replays == [1, 1, 1, 8, 8, 8, 8]
    driver.drop(1)
    driver.step()
    assert made.replays[-1] == 4
    for slot in (5, 2, 3, 4):
        found = driver.outputs(slot)
        assert found == greedy(model, PROMPTS[0 if slot == 5 else slot], len(found))
    made.check_integrity()


def test_attention_plans_every_replayed_step_on_the_metadata_of_its_recording(saved: tuple[str, Any]) -> None:
    attention = Attention()
    made, driver = start(saved[0], attention=attention, cudagraph_capture_sizes=[2])
    recorded = {meta for meta, _ in attention.planned}
    driver.add(0, PROMPTS[0])
    driver.step()
    attention.planned.clear()
    for step in range(3):
        driver.step()
        # Once for the replay; the recorder of these tests does the model's own work again, a graph would not.
        groups = len(recorded)
        first = attention.planned[:groups]
        assert {meta for meta, _ in first} == recorded
        assert all(lengths == [len(PROMPTS[0]) + step + 1, 1] for _, lengths in first)
        assert len(attention.planned) == 2 * groups
        attention.planned.clear()
    assert made.replays == [2, 2, 2]


def test_chunks_and_larger_batches_are_launched_one_by_one(saved: tuple[str, Any]) -> None:
    name, model = saved
    made, driver = start(name, cudagraph_capture_sizes=[2])
    driver.add(0, PROMPTS[3])
    driver.step({0: 5})
    # A chunk of one token that ends before the prompt does has no logits.
    driver.step({0: 1})
    driver.step()
    assert made.replays == []
    driver.step()
    assert made.replays == [2]
    driver.add(1, PROMPTS[1])
    driver.add(2, PROMPTS[2])
    driver.step()
    driver.step()
    assert made.replays == [2]
    for slot, prompt in ((0, 3), (1, 1), (2, 2)):
        found = driver.outputs(slot)
        assert found == greedy(model, PROMPTS[prompt], len(found))


class Unrecordable(TransformersModel):
    capture_problem = "layer 3: qkv is a StrangeLinear"


@pytest.mark.parametrize(
    ("options", "level", "said"),
    [
        ({"enforce_eager": True}, None, ""),
        ({"cudagraph_capture_sizes": []}, None, ""),
        ({"attention": SlowAttention()}, "INFO", "attention SlowAttention cannot be recorded"),
        ({"model": Unrecordable}, "INFO", "model Unrecordable (layer 3: qkv is a StrangeLinear) cannot be recorded"),
        ({"model": TransformersModel, "cudagraph_capture_sizes": [2]}, "WARNING", "model TransformersModel cannot be"),
        ({"model": Unrecordable, "enforce_eager": False}, "WARNING", "layer 3: qkv is a StrangeLinear"),
    ],
)
def test_nothing_is_recorded_where_it_is_not_wanted_or_not_possible(
    saved: tuple[str, Any], caplog: pytest.LogCaptureFixture, options: dict[str, Any], level: str | None, said: str
) -> None:
    with caplog.at_level(logging.INFO, "trivet.runner"):
        made, driver = start(saved[0], **options)
    assert made.recorded == []
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if "CUDA graphs" in record.msg]
    assert [name for name, _ in lines] == ([] if level is None else [level])
    assert all(said in line for _, line in lines)
    driver.add(0, PROMPTS[0])
    for _ in range(3):
        driver.step()
    assert driver.outputs(0) == greedy(saved[1], PROMPTS[0], 3)


@pytest.mark.parametrize("sizes", [None, [1, 2]])
def test_a_device_without_graphs_is_named_where_sizes_are_given(
    saved: tuple[str, Any], caplog: pytest.LogCaptureFixture, sizes: list[int] | None
) -> None:
    context = Context(saved[0], max_num_seqs=8, max_model_len=64)
    context.roles = {"attention": Attention(), "sampler": GreedySampler()}
    context.roles["model"] = Recorded(context)
    made = TorchRunner(context, RunnerOptions(cudagraph_capture_sizes=sizes))
    made.allocate(make_layout(made.load().specs, 4))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ([] if sizes is None else ["decode steps run without CUDA graphs: device cpu has none"])


def test_a_profiled_start_keeps_memory_for_all_graphs(saved: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_torch.runner.measure", lambda device, step: 30 << 20)
    context = Context(saved[0], max_num_seqs=8, max_model_len=64)
    context.roles = {"attention": Attention(), "sampler": GreedySampler()}
    context.roles["model"] = Recorded(context)
    made = GraphRunner(context, RunnerOptions(profile=True, cudagraph_capture_sizes=[1, 2, 4, 8]))
    info = made.load()
    # 30 MiB for the step, 64 for the largest graph, and 2 for each of the three others, as the trial found out.
    assert info.workspace_bytes == (30 + 64 + 3 * 2) << 20
    assert sorted(made.recorded) == [[8], [8, 4]]


def loaded(name: str, **options: Any) -> GraphRunner:
    context = Context(name, max_num_seqs=8, max_model_len=64)
    context.roles = {"attention": Attention(), "sampler": GreedySampler()}
    context.roles["model"] = Recorded(context)
    made = GraphRunner(context, RunnerOptions(profile=False, **options))
    made.load()
    return made


def test_without_a_profile_what_graphs_take_is_estimated(
    saved: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: 64 << 30)
    monkeypatch.setattr("trivet_torch.memory._GRAPH_BYTES", 1 << 30)
    free = loaded(saved[0], enforce_eager=True)._info.available_bytes
    one, three = (loaded(saved[0], cudagraph_capture_sizes=sizes)._info.available_bytes for sizes in ([4], [1, 2, 4]))
    assert free - (3 << 30) - (64 << 20) < three < free - (3 << 30)
    assert one - three == 2 << 30


def test_graphs_that_took_more_than_was_kept_are_said(
    saved: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trivet_torch.memory._GRAPH_BYTES", 1)
    start(saved[0], cudagraph_capture_sizes=[8], profile=False)
    assert "CUDA graphs took 64MiB, and " in caplog.text
    assert "with profile: true what they take is measured" in caplog.text
    caplog.clear()
    monkeypatch.setattr("trivet_torch.memory._GRAPH_BYTES", 64 << 20)
    start(saved[0], cudagraph_capture_sizes=[8], profile=False)
    assert not caplog.text


def test_no_memory_left_for_graphs_names_the_options(saved: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(recorder: Recorder, work: Callable[[], Any]) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(Recorder, "capture", lacking)
    with pytest.raises(CacheMemoryError, match=r"gpu_memory_utilization lower, .* or enforce_eager.*2 GiB"):
        start(saved[0])


def test_sizes_reach_from_one_row_to_all_that_may_run() -> None:
    assert default_sizes(1) == [1]
    assert default_sizes(6) == [1, 2, 4, 6]
    assert default_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert default_sizes(256)[-3:] == [240, 248, 256]
    assert default_sizes(4096)[-2:] == [496, 512]


def test_sizes_beyond_the_slots_are_not_recorded(saved: tuple[str, Any]) -> None:
    made, _ = start(saved[0], cudagraph_capture_sizes=[1, 64, 128])
    assert made.recorded == [[8, 1]]


def test_a_size_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
        RunnerOptions(cudagraph_capture_sizes=[0])

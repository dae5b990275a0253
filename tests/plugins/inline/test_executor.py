"""The inline executor: a worker over the engine's own plugins; faults are raised where a result is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_kit import Driver, GreedySampler, SlowAttention, greedy, make_layout, make_model, save_model

from trivet.errors import ModelLoadError
from trivet.registry import Registry
from trivet.roles import Executor
from trivet_inline.executor import InlineExecutor
from trivet_schemas.config import EngineConfig

PROMPT = [5, 9, 40, 11]


class Wired(Driver):
    """Plans go through the executor instead of straight to a runner."""

    def __init__(self, executor: InlineExecutor, layout: Any) -> None:
        super().__init__(executor._runner, layout)
        self.runner = self
        self.executor = executor

    def execute(self, plan: Any) -> Any:
        step = self.executor.submit(plan)
        assert step.done()
        return step.result()


@pytest.fixture
def model() -> Any:
    return make_model("llama")


def make_registry(name: str, **changes: Any) -> Registry:
    config = EngineConfig(model=name, dtype="float32", device="cpu", **changes)
    registry = Registry(config, [GreedySampler(), SlowAttention()])
    registry.engine_context.prepare_workers(max_num_seqs=4, max_num_batched_tokens=64, tokenizer_size=90)
    return registry


@pytest.fixture
def executor(model: Any, tmp_path: Path) -> Iterator[Executor]:
    registry = make_registry(save_model(model, tmp_path))
    executor = registry.engine_context.get("executor")
    assert isinstance(executor, InlineExecutor)
    yield executor
    registry.engine_context.shutdown_all()


def start(executor: Any) -> Wired:
    info = executor.start()
    layout = make_layout(info.specs, 4)
    executor.configure_cache(layout)
    return Wired(executor, layout)


def test_it_runs_plans_through_the_runner_of_its_own_context(executor: InlineExecutor, model: Any) -> None:
    driver = start(executor)
    driver.add(0, PROMPT)
    for _ in range(3):
        driver.step()
    assert driver.outputs(0) == greedy(model, PROMPT, 3)
    assert executor.max_in_flight == 1
    assert not executor.token_feedback
    executor.check_integrity()


def test_the_worker_gets_the_sizes_that_the_engine_fixed(executor: InlineExecutor) -> None:
    start(executor)
    context = executor._runner._context
    assert (context.rank, context.world_size, context.max_num_seqs, context.tokenizer_size) == (0, 1, 4, 90)
    assert context.max_model_len == 256
    assert executor._runner._batch.tokens.shape[0] == 4


def test_a_fault_is_raised_when_the_result_is_taken(executor: InlineExecutor, model: Any) -> None:
    driver = start(executor)
    driver.add(0, PROMPT)
    driver.step()
    hooks = executor._runner._context.hooks
    inner = hooks.forward

    def broken(batch: Any) -> Any:
        raise RuntimeError("forward failed")

    hooks.forward = broken
    step = None

    def submit_only(plan: Any) -> Any:
        nonlocal step
        step = executor.submit(plan)
        return step.result()

    driver.execute = submit_only  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="forward failed"):
        driver.step()
    assert step is not None
    assert step.done()
    hooks.forward = inner
    del driver.execute
    driver.step()
    assert driver.outputs(0) == greedy(model, PROMPT, 2)


def test_public_methods_of_the_runner_can_be_called(executor: InlineExecutor) -> None:
    start(executor)
    assert executor.call("check_integrity") == [None]
    for name in ("_apply", "no_such_method", "role"):
        with pytest.raises(AttributeError, match=f"no public method '{name}'"):
            executor.call(name)


def test_wrappers_of_worker_phases_apply(model: Any, tmp_path: Path) -> None:
    from trivet.hookspecs import hookimpl

    class Never:
        """Keeps token 7 and the best token from being drawn."""

        calls = 0

        @hookimpl(wrapper=True)
        def trivet_sample(self, logits: torch.Tensor, rows: Any) -> Any:
            self.calls += 1
            logits.scatter_(1, logits.argmax(-1, keepdim=True), float("-inf"))
            return (yield)

    never = Never()
    config = EngineConfig(model=save_model(model, tmp_path), dtype="float32", device="cpu")
    registry = Registry(config, [GreedySampler(), SlowAttention(), never])
    registry.engine_context.prepare_workers(max_num_seqs=4, max_num_batched_tokens=64, tokenizer_size=None)
    driver = start(registry.engine_context.get("executor"))
    driver.add(0, PROMPT)
    driver.step()
    assert never.calls == 1
    with torch.inference_mode():
        second = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].topk(2).indices[1]
    assert driver.outputs(0) == [int(second)]
    registry.engine_context.shutdown_all()


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    registry = make_registry(str(tmp_path / "missing"))
    executor = registry.engine_context.get("executor")
    with pytest.raises(ModelLoadError, match="missing"):
        executor.start()
    registry.engine_context.shutdown_all()
    assert executor._worker is None

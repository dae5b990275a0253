"""The memory plan of ``trivet config check`` for real weights is what an engine then allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trivet.assembly import assemble, read_config
from trivet.errors import ModelLoadError
from trivet.launcher._memory import GroupPlan, MemoryPlan, plan_memory
from trivet.registry import Registry


def planned(config: Mapping[str, Any]) -> MemoryPlan:
    settings = read_config(config, ())
    registry = Registry(settings)
    try:
        return plan_memory(settings, registry)
    finally:
        registry.shutdown()


def check(path: Path, **settings: Any) -> MemoryPlan:
    """Compare the plan with a started engine; returns the plan."""
    cache = settings.pop("cache", {"memory": "256MiB"})
    plugins = {"cache": {"use": "paged", **cache}, **settings.pop("plugins", {})}
    config = {"model": str(path), "plugins": plugins, **settings}
    plan = planned(config)
    assert not plan.problems
    parts = assemble(config, ())
    try:
        layout = parts.layout
        assert plan.cache_bytes == layout.num_bytes
        assert plan.num_blocks == parts.cache.stats().total
        assert {storage.num_blocks - 1 for storage in layout.storage} == {plan.num_blocks}
        assert plan.max_model_len == parts.max_model_len
        assert plan.groups == [GroupPlan(len(g.layers), g.kind, g.window, g.block_size) for g in layout.groups]
        assert plan.kv_bytes_per_token == sum(spec.bytes_per_token for spec in layout.specs)
        assert plan.kv_dtype == layout.specs[0].dtype
        assert plan.weights_in_memory == pytest.approx(parts.info.weight_bytes, rel=0.001)
        assert plan.dtype == parts.info.model.dtype
        attention = parts.executor._worker.get("attention")  # type: ignore[attr-defined]
        tensors = [part for spec in layout.specs for part in attention.kv(spec.layer)]
        buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        # Each begins where a page does, with less than a page in front of it or behind it.
        assert 0 <= sum(buffers.values()) - plan.cache_bytes <= 4096 * len(buffers)
    finally:
        parts.shutdown()
    return plan


def test_gemma_from_a_gguf_file(demo_model: Path) -> None:
    plan = check(demo_model)
    assert [group.window for group in plan.groups] == [512] * 5 + [None]
    assert plan.dtype == "float32"


def test_gemma_from_a_folder(real_model: Callable[[str], Path]) -> None:
    plan = check(real_model("gemma270/hf"), max_num_batched_tokens=512)
    assert [group.window for group in plan.groups] == [512] * 5 + [None]
    assert plan.dtype == "bfloat16"
    short = check(real_model("gemma270/hf"), max_model_len=512)
    assert [(group.layers, group.window) for group in short.groups] == [(18, None)], "a window as long as the context"
    check(real_model("gemma270/hf"), cache={"memory": "64MiB", "block_size": 32, "dtype": "fp8_e4m3"})


@pytest.mark.parametrize("name", ["qwen05/hf", "qwen05/model.gguf"])
def test_qwen(real_model: Callable[[str], Path], name: str) -> None:
    plan = check(real_model(name))
    assert [(group.layers, group.kind) for group in plan.groups] == [(24, "full")]
    check(real_model(name), cache={"num_blocks": 300}, max_model_len=1024)


@pytest.mark.parametrize("name", ["qwen05/hf", "qwen05/model.gguf"])
@pytest.mark.parametrize("quantization", ["int8", "int4", {"use": "int4", "lm_head": False, "offsets": False}, "gguf"])
def test_quantised_weights(real_model: Callable[[str], Path], name: str, quantization: Any) -> None:
    path = real_model(name)
    plain = planned({"model": str(path)}).weights_in_memory
    if quantization == "gguf" and name.endswith("hf"):  # there are no blocks to take over
        for start in (planned, lambda config: assemble(config, ())):
            with pytest.raises(ModelLoadError, match="would change nothing"):
                start({"model": str(path), "plugins": {"quantization": quantization}})
        return
    plan = check(path, plugins={"quantization": quantization})
    assert plan.quantization == (quantization if isinstance(quantization, str) else quantization["use"])
    assert plan.weights_in_memory is not None
    assert plain is not None
    assert plan.weights_in_memory < 0.8 * plain
    assert not any("known after loading only" in note for note in plan.notes)


def test_other_types_and_models(real_model: Callable[[str], Path]) -> None:
    gemma = real_model("gemma270/hf")
    check(gemma, dtype="float32")
    check(real_model("gemma270/model.gguf"), dtype="bfloat16", plugins={"quantization": "int8"})
    tied = check(gemma, plugins={"model": "transformers"})
    assert tied.weights_in_memory is not None
    assert tied.weights_on_disk is not None
    assert tied.weights_in_memory == pytest.approx(tied.weights_on_disk, rel=0.001), "one matrix for both uses"
    check(real_model("gemma270/model.gguf"), plugins={"model": "transformers"})

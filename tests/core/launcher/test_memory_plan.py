"""The memory plan of ``trivet config check``: what fits, what does not, and what would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launcher_kit import LLAMA, Run, Site, llama_shapes, memory_plan, model_config, model_folder, write_zeros

from trivet.roles import AttentionSupport, LayerKVSpec, Model, ModelInfo, Quantization, Runner
from trivet_torch.memory import workspace_bytes
from trivet_torch_attention.attention import TorchAttention

MIB = 1 << 20
FREE = 100 * MIB
VOCAB, HIDDEN, WIDE = 64, 64, 128
#: of the matrices that are multiplied with: queries, keys and values, outputs, gate, up, down; the head
MATRICES = 2 * ((64 + 32 + 32) * HIDDEN + HIDDEN * HIDDEN + 3 * WIDE * HIDDEN) + VOCAB * HIDDEN
#: before attention and the feed-forward network, and the last one
NORMS = (2 + 2 + 1) * HIDDEN
NUMBERS = MATRICES + NORMS
#: norms are float32; embeddings are looked up in the file
WEIGHTS = 2 * MATRICES + 4 * NORMS
#: keys and values of one token in one layer of the model: heads, head size, bytes
LAYER = 2 * 2 * 16 * 2
WINDOWS: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 32,
    "max_position_embeddings": 1024,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with so much free, whatever others do on this one."""
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: FREE)


def refusal(run: Run, *arguments: Any) -> tuple[dict[str, Any], str]:
    """The plan of a configuration that does not fit, and the complaint about it."""
    result = run("config", "check", *arguments, "--json")
    assert result.code == 2
    plan: dict[str, Any] = json.loads(result.out)["memory"]
    assert plan["problems"]
    assert all(problem in result.err for problem in plan["problems"])
    text = run("config", "check", *arguments)
    assert text.code == 2
    assert "no problems found" not in text.out
    assert plan["problems"][0] in text.err
    assert plan["problems"][0] in text.out
    return plan, result.err


def test_the_plan_of_a_folder(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site), plugins={"cache": {"use": "paged", "memory": "1MiB"}})
    plan = memory_plan(run, config)
    blocks = MIB // (2 * LAYER * 16) - 1
    assert plan["kv_bytes_per_token"] == 2 * LAYER
    assert plan["weights_on_disk"] > 2 * (NUMBERS + VOCAB * HIDDEN)
    assert (plan["dtype"], plan["weights_in_memory"], plan["device"]) == ("bfloat16", WEIGHTS, "cpu")
    assert (plan["max_model_len"], plan["num_blocks"], plan["num_tokens"]) == (256, blocks, blocks * 16)
    assert plan["num_full_requests"] == blocks * 16 // 256
    assert plan["kv_bytes_per_request"] == 256 * 2 * LAYER
    assert plan["groups"] == [{"layers": 2, "kind": "full", "window": None, "block_size": 16}]
    assert plan["workspace"] == 4 * 256 * 64 * 4 + 16 * 2048 * 64 * 2, "256 rows of 64 words, 2048 tokens of 64"
    assert plan["total"] == WEIGHTS + plan["workspace"] + plan["cache_bytes"]
    assert (plan["free"], plan["problems"], plan["notes"]) == (FREE, [], [])
    assert memory_plan(run, config, "--set", "dtype=float32")["kv_bytes_per_token"] == 4 * LAYER


def test_the_plan_in_words(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site), plugins={"cache": {"use": "paged", "memory": "1MiB"}})
    text = run("config", "check", config).out
    for words in (
        "KV cache per token  256B\n",
        "256 tokens (max_model_len), 64KiB of KV cache",
        "2 layers, full, blocks of 16 tokens",
        "1MiB, 255 blocks",
        "4080 tokens, 15 requests of the full length at once",
        "of 100MiB free on cpu",
        "no problems found",
    ):
        assert words in text, words


def test_layers_with_windows_are_groups_of_their_own(site: Site, run: Run) -> None:
    cache = {"use": "paged", "memory": "4MiB"}
    config = model_config(site, model_folder(site, **WINDOWS), plugins={"cache": cache}, max_num_batched_tokens=64)
    plan = memory_plan(run, config)
    windowed = {"layers": 1, "kind": "sliding", "window": 32, "block_size": 16}
    assert plan["groups"] == [windowed] * 5 + [{**windowed, "kind": "full", "window": None}]
    page = LAYER * 16
    assert plan["num_blocks"] == 4 * MIB // page - 1
    # Blocks of 31 tokens before a step and of its 64, wherever they begin; the sixth group keeps everything.
    per_request = 5 * (1 + (31 + 64 + 14) // 16) + 1024 // 16
    assert plan["num_full_requests"] == plan["num_blocks"] // per_request
    assert plan["num_tokens"] == plan["num_full_requests"] * 1024
    assert plan["kv_bytes_per_request"] == per_request * page
    assert "5 x 1 layers, sliding, window 32, blocks of 16 tokens" in run("config", "check", config).out


def test_a_cache_that_reserves_is_counted_by_its_reservations(site: Site, run: Run) -> None:
    page = 2 * LAYER * 16
    cache: dict[str, Any] = {"use": "contiguous", "memory": 70 * page, "reservation": "pow2"}
    folder = model_folder(site, max_position_embeddings=160)
    plan = memory_plan(run, model_config(site, folder, plugins={"cache": cache}))
    assert (plan["num_blocks"], plan["num_full_requests"], plan["num_tokens"]) == (69, 6, 69 * 16)
    plan = memory_plan(run, model_config(site, folder, plugins={"cache": {**cache, "allocator": "buddy"}}))
    assert (plan["num_blocks"], plan["num_full_requests"], plan["num_tokens"]) == (69, 4, 4 * 160)
    assert plan["kv_bytes_per_request"] == 16 * page, "ten blocks, rounded up to a power of two"


def test_chunks_are_windows_that_begin_anew(site: Site, run: Run) -> None:
    chunked = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 64}
    plan = memory_plan(run, model_config(site, model_folder(site, **chunked)))
    assert [(group["kind"], group["window"]) for group in plan["groups"]] == [("chunked", 64), ("full", None)]


def test_a_window_as_long_as_the_context_hides_nothing(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site, **WINDOWS), max_model_len=32)
    plan = memory_plan(run, config)
    assert plan["groups"] == [{"layers": 6, "kind": "full", "window": None, "block_size": 16}]


def test_a_narrower_cache_is_counted_as_it_is(site: Site, run: Run) -> None:
    cache = {"use": "paged", "memory": "1MiB", "dtype": "bfloat16"}
    config = model_config(site, model_folder(site), dtype="float32", plugins={"cache": cache})
    plan = memory_plan(run, config)
    assert (plan["dtype"], plan["kv_dtype"], plan["kv_bytes_per_token"]) == ("float32", "bfloat16", 2 * LAYER)
    assert "256B, as bfloat16" in run("config", "check", config).out


def test_a_cache_without_a_size_gets_its_share_of_what_is_free(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site), plugins={"runner": {"use": "torch_runner"}})
    plan = memory_plan(run, config)
    assert plan["num_blocks"] == 256 * 256 // 16, "no more than all requests at their full length can use"
    assert any("plugins.cache.memory" in note for note in plan["notes"])
    share = ("--set", "plugins.runner.cpu_memory_share=0.05")
    page = 2 * LAYER * 16
    assert memory_plan(run, config, *share)["num_blocks"] == int((FREE - WEIGHTS) * 0.05) // page - 1
    measured = memory_plan(run, config, *share, "--set", "plugins.runner.profile=true")
    assert measured["num_blocks"] < int(FREE * 0.05) // page // 2, "a workspace that is measured is taken off"


def test_a_length_that_nobody_asked_for_is_lowered(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site), plugins={"cache": {"use": "paged", "memory": "32KiB"}})
    plan = memory_plan(run, config)
    assert plan["max_model_len"] == 7 * 16
    assert plan["num_full_requests"] == 1
    assert any("lowered from 256" in note for note in plan["notes"])


def test_tiers_count_where_they_are(site: Site, run: Run) -> None:
    tiers = [{"use": "offload", "host_memory": "10MiB"}]
    plugins: dict[str, Any] = {"cache": {"use": "paged", "memory": "1MiB"}}
    config = model_config(site, model_folder(site), plugins=plugins)
    without = memory_plan(run, config)
    plugins["cache_tier"] = tiers
    plan = memory_plan(run, model_config(site, site.folder / "model", plugins=plugins))
    assert plan["tiers"] == [{"name": "offload", "host_memory": 10 * MIB, "disk_memory": None}]
    assert plan["total"] == without["total"] + 10 * MIB
    tiers[0] |= {"path": str(site.folder / "blocks"), "disk_memory": "1GiB"}
    config = model_config(site, site.folder / "model", plugins=plugins)
    assert memory_plan(run, config)["tiers"][0]["disk_memory"] == 1 << 30
    assert "host memory 10MiB, disk 1GiB" in run("config", "check", config).out


# ------------------------------------------------------------------ what does not fit


def test_a_cache_too_small_for_the_length_names_length_and_memory(site: Site, run: Run) -> None:
    cache = {"use": "paged", "memory": "32KiB"}
    config = model_config(site, model_folder(site), max_model_len=256, plugins={"cache": cache})
    plan, error = refusal(run, config)
    assert plan["weights_in_memory"] == WEIGHTS, "what is known is shown all the same"
    assert "max_model_len to 112 or less" in error
    assert "plugins.cache.memory to at least 68KiB" in error
    memory_plan(run, config, "--set", "max_model_len=112")
    memory_plan(run, config, "--set", "plugins.cache.memory=68KiB")


def test_a_narrower_type_is_named_where_it_would_do(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"use": "paged", "memory": "36KiB"}
    plugins = {"cache": cache, "attention": "torch"}
    config = model_config(site, model_folder(site), max_model_len=256, plugins=plugins)
    _, error = refusal(run, config)
    assert "plugins.cache.dtype: fp8_e4m3" in error
    memory_plan(run, config, "--set", "plugins.cache.dtype=fp8_e4m3")
    monkeypatch.setattr(TorchAttention, "support", lambda self, spec: AttentionSupport())
    _, error = refusal(run, config)
    assert "plugins.cache.dtype" not in error, "the attention plugin could not read it"


def test_a_smaller_step_is_named_where_it_would_do(site: Site, run: Run) -> None:
    page = LAYER * 16
    cache = {"use": "paged", "memory": 200 * page}
    config = model_config(site, model_folder(site, **WINDOWS), max_model_len=1024, plugins={"cache": cache})
    _, error = refusal(run, config)
    assert "max_num_batched_tokens of 256 or less" in error
    memory_plan(run, config, "--set", "max_num_batched_tokens=256")


def test_a_cache_larger_than_the_machine_names_what_is_free(site: Site, run: Run) -> None:
    config = model_config(site, model_folder(site), plugins={"cache": {"use": "paged", "memory": "1GiB"}})
    plan, error = refusal(run, config)
    assert plan["total"] > plan["free"]
    room = FREE - plan["workspace"] - plan["weights_in_memory"]
    assert "plugins.cache.memory from 68KiB to " in error
    most = error.partition("from 68KiB to ")[2].split("MiB")[0]
    assert float(most) == pytest.approx(room / MIB, abs=0.01)
    memory_plan(run, config, "--set", f"plugins.cache.memory={most}MiB")


def test_a_tier_larger_than_the_machine_is_what_is_blamed(site: Site, run: Run) -> None:
    plugins = {"cache": {"use": "paged", "memory": "1MiB"}, "cache_tier": [{"use": "offload", "host_memory": "1GiB"}]}
    config = model_config(site, model_folder(site), plugins=plugins)
    _, error = refusal(run, config)
    assert "No setting" not in error
    most = error.partition("host_memory of at most ")[2].split("MiB")[0]
    memory_plan(run, config, "--set", f"plugins.cache_tier.0.host_memory={most}MiB")


def test_what_is_free_may_hold_a_shorter_request_only(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(site)
    config = model_config(site, folder, max_model_len=256, plugins={"cache": {"use": "paged", "memory": "1GiB"}})
    info = memory_plan(run, model_config(site, folder))
    config = model_config(site, folder, max_model_len=256, plugins={"cache": {"use": "paged", "memory": "1GiB"}})
    free = info["weights_in_memory"] + info["workspace"] + 32 * 1024
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: free)
    _, error = refusal(run, config)
    assert "plugins.cache.memory: 32KiB, all that is free, with max_model_len: 112" in error
    memory_plan(run, config, "--set", "plugins.cache.memory=32KiB", "--set", "max_model_len=112")


def test_weights_that_do_not_fit_need_another_model(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: 1000)
    cache = {"use": "paged", "memory": "1MiB"}
    config = model_config(site, model_folder(site), dtype="float32", plugins={"cache": cache})
    _, error = refusal(run, config)
    assert "dtype: bfloat16, a smaller model or a larger device" in error


def test_a_length_beyond_the_model_is_a_problem(site: Site, run: Run) -> None:
    _, error = refusal(run, model_config(site, model_folder(site), max_model_len=300))
    assert "300 exceeds the 256 positions" in error


def test_layers_that_the_attention_plugin_cannot_serve_are_a_problem(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def support(attention: Any, spec: LayerKVSpec) -> AttentionSupport:
        return AttentionSupport(problem="no windows" if spec.kind == "sliding" else None)

    monkeypatch.setattr(TorchAttention, "support", support)
    plugins = {"attention": "torch"}
    memory_plan(run, model_config(site, model_folder(site), plugins=plugins))
    _, error = refusal(run, model_config(site, model_folder(site, **WINDOWS), plugins=plugins))
    assert "layer 0 (sliding): no windows" in error


# ------------------------------------------------------------------ what nobody can tell


def test_without_an_estimate_only_a_fixed_size_is_planned(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet_torch.runner.TorchRunner.estimate", Runner.estimate)
    folder = model_folder(site)
    plan = memory_plan(run, model_config(site, folder))
    assert (plan["num_blocks"], plan["max_model_len"], plan["workspace"], plan["total"]) == (None, 256, None, None)
    assert any("plugins.cache.memory" in note for note in plan["notes"])
    config = model_config(site, folder, plugins={"cache": {"use": "paged", "memory": "1MiB"}})
    assert memory_plan(run, config)["num_blocks"] == 255
    cache = {"use": "paged", "memory": "32KiB"}
    _, error = refusal(run, model_config(site, folder, max_model_len=256, plugins={"cache": cache}))
    assert "max_model_len to 112 or less" in error


def test_the_estimate_is_the_runners(site: Site, run: Run) -> None:
    plan = memory_plan(run, model_config(site, model_folder(site), max_num_batched_tokens=512, max_num_seqs=8))
    info = ModelInfo(vocab_size=VOCAB, max_model_len=256, hidden_size=64, dtype="bfloat16")
    assert plan["workspace"] == workspace_bytes(info, 8, 512)


def test_quantised_weights_are_counted_as_they_will_be(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config(site, model_folder(site))
    plan = memory_plan(run, config, "--set", "quantization=int8")
    assert plan["quantization"] == "int8"
    assert not any("int8" in note for note in plan["notes"])
    assert MATRICES < plan["weights_in_memory"] < 0.7 * WEIGHTS, "a byte each, and scales"
    assert "as int8 and bfloat16\n" in run("config", "check", config, "--set", "quantization=int8").out
    monkeypatch.setattr("trivet_native.model.NativeModel.plan_weights", Model.plan_weights)
    assert memory_plan(run, config)["quantization"] is None


def test_a_quantization_that_does_not_say_what_it_saves_is_noted(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet_quantization.base.PackingQuantization.planned_bytes", Quantization.planned_bytes)
    config = model_config(site, model_folder(site))
    plain, quantised = memory_plan(run, config), memory_plan(run, config, "--set", "quantization=int8")
    assert not any("int8" in note for note in plain["notes"])
    assert any("weights are counted as bfloat16" in note and "int8" in note for note in quantised["notes"])
    assert quantised["weights_in_memory"] == 2 * (NUMBERS + VOCAB * HIDDEN), "all numbers in the files"


def test_weights_that_are_not_there_yet_are_noted(site: Site, run: Run) -> None:
    folder = model_folder(site)
    (folder / "model.safetensors").unlink()
    plan = memory_plan(run, model_config(site, folder))
    assert plan["weights_in_memory"] is None
    assert plan["notes"][0] == "the weights are not there yet"
    assert plan["kv_bytes_per_token"] == 2 * LAYER, "what is known is shown all the same"


def test_weights_of_another_model_are_refused_before_a_start(site: Site, run: Run) -> None:
    folder = model_folder(site)
    shapes = llama_shapes(LLAMA)
    del shapes["model.layers.1.mlp.up_proj.weight"]
    write_zeros(folder / "model.safetensors", shapes)
    result = run("config", "check", model_config(site, folder))
    assert result.code == 2
    assert "model.layers.1.mlp.up_proj.weight" in result.err


def test_a_model_of_others_says_what_its_weights_take(site: Site, run: Run) -> None:
    site.plugin(
        "sized",
        """
        from trivet.testing.fake_model import FakeModel

        class Sized(FakeModel):
            def plan_weights(self):
                return 3 << 20 if self._context.device == "cpu" else None

        def make(context, options):
            model = Sized(context)
            model._context = context
            return model

        @hookimpl
        def trivet_providers():
            return [Provider(role="model", name="sized", factory=f"{__name__}:make")]
        """,
    )
    result = run("config", "check", site.config(plugins={"model": {"use": "sized"}}))
    assert result.code == 0, result.err
    assert "weights in memory  3MiB\n" in result.out
    assert "the rest is known when the model is loaded" in result.out

"""Models from GGUF files are the models that were saved, and files that do not hold a whole model are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from trivet.errors import ModelLoadError
from trivet_torch.weights import load_causal_lm
from trivet_torch.weights.gguf_config import ARCHITECTURES

F32 = {"dtype": torch.float32, "attn_implementation": "eager"}
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(theta: float = 5000.0, **more: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"} | more


LLAMA3 = rope(
    500000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LONG = rope(
    rope_type="longrope",
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    original_max_position_embeddings=64,
    attention_factor=1.25,
)
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

# Name -> (architecture in GGUF, configuration).
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", lambda: transformers.LlamaConfig(**COMMON, rope_parameters=rope())),
    "llama-tied": (
        "llama",
        lambda: transformers.LlamaConfig(**COMMON, rope_parameters=rope(), tie_word_embeddings=True),
    ),
    "llama-biases": (
        "llama",
        lambda: transformers.LlamaConfig(**COMMON, rope_parameters=rope(), attention_bias=True, mlp_bias=True),
    ),
    "llama3": ("llama", lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3, head_dim=32)),
    "llama-linear": (
        "llama",
        lambda: transformers.LlamaConfig(**COMMON, rope_parameters=rope(rope_type="linear", factor=4.0)),
    ),
    "mistral": ("llama", lambda: transformers.MistralConfig(**COMMON, rope_parameters=rope(), sliding_window=32)),
    "mixtral": (
        "llama",
        lambda: transformers.MixtralConfig(
            **COMMON, rope_parameters=rope(), num_local_experts=4, num_experts_per_tok=2, head_dim=16
        ),
    ),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Config(**COMMON, rope_parameters=rope(), tie_word_embeddings=True)),
    "qwen2-yarn": (
        "qwen2",
        lambda: transformers.Qwen2Config(
            **COMMON, rope_parameters=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
        ),
    ),
    "qwen3": ("qwen3", lambda: transformers.Qwen3Config(**COMMON, rope_parameters=rope(), head_dim=32)),
    "qwen2moe": (
        "qwen2moe",
        lambda: transformers.Qwen2MoeConfig(
            **COMMON, **MOE, rope_parameters=rope(), shared_expert_intermediate_size=40, norm_topk_prob=True
        ),
    ),
    "qwen3moe": (
        "qwen3moe",
        lambda: transformers.Qwen3MoeConfig(**COMMON, **MOE, rope_parameters=rope(), head_dim=32, norm_topk_prob=True),
    ),
    "gemma2": (
        "gemma2",
        lambda: transformers.Gemma2Config(
            **COMMON, rope_parameters=rope(), head_dim=32, query_pre_attn_scalar=32, sliding_window=16
        ),
    ),
    "gemma3": (
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **(COMMON | {"num_hidden_layers": 7}),
            rope_parameters={
                "full_attention": rope(1e6, rope_type="linear", factor=8.0),
                "sliding_attention": rope(10000.0),
            },
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=16,
        ),
    ),
    "phi3": (
        "phi3",
        lambda: transformers.Phi3Config(
            **COMMON, rope_parameters=rope(), sliding_window=20, original_max_position_embeddings=128
        ),
    ),
    "phi3-long": (
        "phi3",
        lambda: transformers.Phi3Config(**COMMON, rope_parameters=dict(LONG), original_max_position_embeddings=64),
    ),
    "gptneox": (
        "gptneox",
        lambda: transformers.GPTNeoXConfig(
            **{k: v for k, v in COMMON.items() if k != "num_key_value_heads"},
            rope_parameters=rope(10000.0, partial_rotary_factor=0.25),
            use_parallel_residual=False,
        ),
    ),
}


def make_model(name: str, seed: int = 0) -> Any:
    """A random model whose weights are exact in float16 (and in ``1 + weight``, as Gemma's norms are stored)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name][1](), dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = torch.randint(-64, 65, parameter.shape) / 256
    model.tie_weights()
    return model


# --- a converter that changes tensors as llama.cpp's does -----------------------------------------------------------


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def converted(arch: str, config: Any, name: str, data: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors, by names that gguf's own table knows, which the converter makes of a parameter."""
    if arch == "llama" and "q_proj" in name:
        return [(name, permuted(data, config.num_attention_heads))]
    if arch == "llama" and "k_proj" in name:
        return [(name, permuted(data, config.num_key_value_heads))]
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return [(name, data + 1)]
    if arch == "gptneox" and "query_key_value" in name:
        heads = data.reshape(config.num_attention_heads, 3, -1, *data.shape[1:])
        return [(name, np.concatenate([heads[:, i].reshape(-1, *data.shape[1:]) for i in range(3)]))]
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(data, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", data)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, data.reshape(-1))]
    return [(name, data)]


def rope_tensors(config: Any) -> dict[str, np.ndarray]:
    parameters = config.rope_parameters
    if parameters.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(parameters["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(parameters["short_factor"], np.float32),
        }
    if parameters.get("rope_type") == "llama3":
        plain = parameters["rope_theta"] ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        return {"rope_freqs.weight": (plain / scaled).numpy()}
    return {}


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    arch = writer.arch
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(parameters["factor"])
    if "original_max_position_embeddings" in parameters and parameters["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if "attention_factor" in parameters:
        writer.add_rope_scaling_attn_factors(parameters["attention_factor"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
    if arch == "gptneox":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in {"gemma2", "gemma3", "phi3"} or config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "mixtral" or arch.endswith("moe"):
        writer.add_expert_count(config.num_local_experts if arch == "llama" else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    *,
    dtype: Any = np.float32,
    change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None] = lambda _writer, _tensors: None,
) -> Path:
    """Write ``model``; ``change`` may edit the metadata and the tensors first."""
    config = model.config
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    tensors = dict(rope_tensors(config))
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for source, data in converted(arch, config, name, parameter.numpy()):
            target = names.get_name(source, try_suffixes=(".weight", ".bias"))
            assert target is not None, source
            tensors[target] = data
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config)
    change(writer, tensors)
    for name, data in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data.astype(dtype if data.ndim > 1 else np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- GGUF ------------------------------------------------------------------------------------------------------------

# Of no effect on the computation, or of the checkpoint's history.
INCIDENTAL = {"architectures", "_name_or_path", "transformers_version", "initializer_range", "router_aux_loss_coef"}


def compare_configs(loaded: Any, original: Any) -> None:
    ours, theirs = loaded.to_dict(), original.to_dict()
    differing = {key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys() if key not in INCIDENTAL}
    differing = {key: pair for key, pair in differing.items() if pair[0] != pair[1]}
    for key in ("rms_norm_eps", "layer_norm_eps"):  # the file has float32
        if key in differing:
            assert differing.pop(key)[0] == pytest.approx(getattr(original, key), rel=1e-6)
    assert differing == {}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_gguf_gives_back_the_model(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    path = write_gguf(tmp_path / "model.gguf", model, MODELS[name][0])

    loaded, info = load_causal_lm(path, **F32)

    assert type(loaded) is type(model)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for parameter, value in loaded.state_dict().items():
        assert torch.equal(value, expected[parameter]), parameter
    for (buffer, value), (_, wanted) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        assert value.dtype == wanted.dtype
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0, msg=buffer)
    compare_configs(loaded.config, model.config)
    ids = torch.arange(24).reshape(1, 24)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert info.eos_token_ids == [2]
    assert not loaded.training
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())


def test_every_supported_architecture_is_tested() -> None:
    assert {arch for arch, _ in MODELS.values()} == set(ARCHITECTURES)


def greedy(model: Any, steps: int = 16) -> list[int]:
    ids = torch.tensor([[1, 17, 5, 60, 33]])
    for _ in range(steps):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma3"])
def test_tied_f16_file_without_output_weight_speaks_like_the_safetensors(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", model, MODELS[name][0], dtype=np.float16)
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(path).tensors}

    from_gguf, _ = load_causal_lm(path, **F32)
    from_folder, _ = load_causal_lm(tmp_path / "hf", **F32)

    assert from_gguf.lm_head.weight is from_gguf.model.embed_tokens.weight
    assert greedy(from_gguf) == greedy(from_folder) == greedy(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_have_the_requested_dtype_and_frequencies_stay_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    loaded, _ = load_causal_lm(path, dtype=dtype, attn_implementation="eager")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype))
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_loading_uses_threads_and_leaves_torchs_setting_alone(tmp_path: Path) -> None:
    model = make_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loaded, _ = load_causal_lm(path, **F32)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_random_generator_is_left_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    load_causal_lm(path, **F32)
    assert torch.equal(torch.get_rng_state(), state)


def refused(tmp_path: Path, message: str, change: Callable[..., None], name: str = "llama") -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model(name), MODELS[name][0], change=change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_causal_lm(path, **F32)
    assert str(path) in str(caught.value)


def test_unmapped_tensor_is_named(tmp_path: Path) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.attn_sinks.weight"] = np.zeros((4, 4))

    refused(tmp_path, r"no parameter of a 'llama' model corresponds to 'blk\.1\.attn_sinks\.weight'", change)


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"), ("output_norm.weight", "model.norm.weight")],
)
def test_unfilled_parameter_is_named(tensor: str, parameter: str, tmp_path: Path) -> None:
    refused(tmp_path, f"no tensor for the parameters '{parameter}'", lambda _, tensors: tensors.pop(tensor))


def test_half_filled_parameter_is_named(tmp_path: Path) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        del tensors["blk.0.ffn_gate_exps.weight"]

    refused(tmp_path, r"'model\.layers\.0\.mlp\.experts\.gate_up_proj'", change, name="mixtral")


def test_tensor_for_a_parameter_that_the_model_lacks(tmp_path: Path) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.attn_q.bias"] = np.zeros(64)  # layer 0 has none, so the model has none

    refused(tmp_path, r"'blk\.1\.attn_q\.bias' belongs to .*'model\.layers\.1\.self_attn\.q_proj\.bias'", change)


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.ffn_up.weight"] = np.zeros((80, 32))

    refused(tmp_path, r"'blk\.0\.ffn_up\.weight' has the shape \[80, 32\], but .* needs \[80, 64\]", change)


def test_unsupported_type_names_tensor_and_type(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        del tensors["blk.0.ffn_up.weight"]
        blocks = np.zeros((80, 66), np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)

    refused(tmp_path, r"tensor 'blk\.0\.ffn_up\.weight' has the type IQ2_XXS.*supported: F32, F16, Q4_0", change)


def test_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported.*gemma3.*llama.*qwen2"):
        load_causal_lm(tmp_path / "m.gguf", **F32)


def test_missing_key_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'llama\.[a-z_.]+' is missing"):
        load_causal_lm(tmp_path / "m.gguf", **F32)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("split over 3 files", lambda writer, _: writer.add_uint16("split.count", 3)),
        (
            "not those of Llama 3",
            lambda _, tensors: tensors.update({"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}),
        ),
        ("differs between layers", lambda writer, _: writer.add_array("llama.attention.head_count_kv", [1, 2])),
    ],
)
def test_what_transformers_cannot_express_is_refused(message: str, change: Any, tmp_path: Path) -> None:
    def without_duplicate(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        if "layers" in message:
            del writer.kv_data[0]["llama.attention.head_count_kv"]
        change(writer, tensors)

    refused(tmp_path, message, without_duplicate)


@pytest.mark.parametrize("pattern", [3, [True, False, False, True, True, True, False]])
def test_gemma3_window_pattern_of_the_file(pattern: Any, tmp_path: Path) -> None:
    model = make_model("gemma3")
    path = write_gguf(
        tmp_path / "model.gguf", model, "gemma3", change=lambda writer, _: writer.add_sliding_window_pattern(pattern)
    )
    expected = [bool((i + 1) % 3) for i in range(7)] if pattern == 3 else pattern
    loaded, _ = load_causal_lm(path, **F32)
    assert [kind == "sliding_attention" for kind in loaded.config.layer_types] == expected


# --- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma270", "qwen05"])
def test_real_file_equals_its_dequantised_safetensors(name: str, real_model: Callable[[str], Path]) -> None:
    from_gguf, _ = load_causal_lm(real_model(f"{name}/model.gguf"), dtype=torch.bfloat16, attn_implementation="sdpa")
    from_folder, _ = load_causal_lm(real_model(f"{name}/hf"), dtype=torch.bfloat16, attn_implementation="sdpa")
    expected = from_folder.state_dict()
    assert from_gguf.state_dict().keys() == expected.keys()
    for parameter, value in from_gguf.state_dict().items():
        assert torch.equal(value, expected[parameter]), parameter
    for key in ("_model_name_or_path", "unk_token_id"):
        from_folder.config.__dict__.pop(key, None)  # remarks of the converter
    compare_configs(from_gguf.config, from_folder.config)

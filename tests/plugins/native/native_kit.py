"""Tiny random models of every family that the native model serves, and a runner around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from worker_kit import Context, Driver, GreedySampler, make_layout

from trivet.testing.fakes import FakeTokenizer
from trivet_native.model import NativeModel
from trivet_native.options import NativeOptions
from trivet_torch_attention.attention import TorchAttention

VOCAB = FakeTokenizer().size
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

#: name of the case → class of the configuration, and its fields
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama biases, tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama head_dim, gelu": ("LlamaConfig", {"head_dim": 24, "hidden_act": "gelu"}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mistral, no window": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "gemma2": ("Gemma2Config", _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", _GEMMA | {"layer_types": _MIXED, "tie_word_embeddings": True}),
    "gemma3 softcap": (
        "Gemma3TextConfig",
        _GEMMA | {"layer_types": _MIXED, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0},
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3 partial": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", _QWEN_MOE | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3MoeConfig", _QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": _YARN | {"truncate": False},
            "swiglu_limit": 0.5,
        },
    ),
    "llama3 rope": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "yarn": ("Qwen2Config", {"rope_parameters": _YARN}),
    "linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "dynamic rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "proportional rope": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 10.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "longrope": ("Phi3Config", {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    "gemma3 scaled rope": (
        "Gemma3TextConfig",
        _GEMMA
        | {
            "layer_types": _MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}
#: up to here all frequencies are constant in every case
LONGEST = 64


def make_model(case: str, **changes: Any) -> Any:
    """A random model in float32 whose logits vary by more than 1, in evaluation mode."""
    import transformers

    name, own = CASES[case]
    config = getattr(transformers, name)(**(_COMMON | own | changes))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.get_output_embeddings().weight.mul_(2)
        else:
            model.get_input_embeddings().weight.mul_(1.5)
    return model.train(mode=False)


def save(model: Any, folder: Path) -> str:
    """The model's folder, as a model name."""
    model.save_pretrained(folder)
    return str(folder)


def make_native(name: str, *, dtype: str = "float32", max_model_len: int | None = LONGEST, **given: Any) -> NativeModel:
    """A native model that is not loaded yet; ``given``: its options, and ``quantization``."""
    roles = {role: given.pop(role) for role in ("quantization",) if role in given}
    context = Context(name, max_model_len=max_model_len, **roles)
    context.config.dtype = dtype
    return NativeModel(context, NativeOptions(**given))


def native_runner(name: str, *, block_size: int = 4, attention: Any = None, **given: Any) -> Driver:
    """A loaded runner with the native model, torch's attention unless another is given, and greedy sampling, behind a
    driver."""
    from trivet_torch.options import RunnerOptions
    from trivet_torch.runner import TorchRunner

    model = make_native(name, **given)
    context: Any = model._context
    context.roles |= {
        "attention": attention or TorchAttention(SimpleNamespace(device="cpu")),
        "sampler": GreedySampler(),
        "model": model,
    }
    runner = TorchRunner(context, RunnerOptions())
    info = runner.load()
    layout = make_layout(info.specs, block_size)
    runner.allocate(layout)
    driver = Driver(runner, layout)
    driver.context, driver.info, driver.model = context, info, model  # type: ignore[attr-defined]
    return driver

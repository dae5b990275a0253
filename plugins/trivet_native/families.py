"""From a configuration to a :class:`~trivet_native.spec.DecoderSpec`, one function per family.

What each field means follows the modelling code of transformers for the model type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trivet.errors import ModelLoadError
from trivet_native.fields import ACTIVATIONS, FAMILIES, problem
from trivet_native.spec import DecoderSpec, ExpertsSpec, LayerSpec, RopeSpec
from trivet_torch.weights.plain_config import PlainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORMS = MappingProxyType({"attention": "input_layernorm", "mlp": "post_attention_layernorm"})
_FOUR_NORMS = MappingProxyType(
    {
        "attention": "input_layernorm",
        "attention_output": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "mlp_output": "post_feedforward_layernorm",
    }
)
_GATED = ("gate_proj", "up_proj")


def make_spec(location: str, config: PreTrainedConfig | PlainConfig) -> DecoderSpec:
    """The decoder that ``config`` describes.

    Raises:
        ModelLoadError: The configuration has something that is not implemented; the message names the field.
    """
    given = {"model_type": config.model_type} | config.to_dict()
    known = None
    if not isinstance(config, PlainConfig):
        known = {field.name for field in dataclasses.fields(config)} | {"quantization_config"}
    reason = problem(given, known=known)
    if reason is not None:
        raise ModelLoadError(
            f"{location}: the native model cannot serve it: {reason}; set plugins.model to transformers"
        )
    return _MAKERS[config.model_type](config)


def _decoder(config: Any, layers: Sequence[LayerSpec] | None = None, **changes: Any) -> DecoderSpec:
    """What every family has; ``changes`` replace its own."""
    family = FAMILIES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "architecture": family.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_positions": config.max_position_embeddings,
        "eps": config.rms_norm_eps,
        "activation": ACTIVATIONS[getattr(config, family.activation)],
        "scale": head_dim**-0.5,
        "layers": tuple(layers or [LayerSpec()] * config.num_hidden_layers),
        "ropes": (RopeSpec(config.rope_parameters, head_dim),),
        "tied": bool(config.tie_word_embeddings),
        "norms": _NORMS,
    }
    return DecoderSpec(**(values | changes))


def _windows(config: Any) -> list[LayerSpec]:
    """All layers with the window of ``sliding_window``, if it is set."""
    window = config.sliding_window
    return [LayerSpec() if window is None else LayerSpec("sliding", window)] * config.num_hidden_layers


def _typed(config: Any) -> list[LayerSpec]:
    """Layers with a window or without, as ``layer_types`` says."""
    if len(config.layer_types) < config.num_hidden_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers"
        )
    if "sliding_attention" in config.layer_types and not config.sliding_window:
        raise ModelLoadError("config.json: layer_types has sliding_attention, and sliding_window is not set")
    return [
        LayerSpec("sliding", config.sliding_window) if kind == "sliding_attention" else LayerSpec()
        for kind in config.layer_types[: config.num_hidden_layers]
    ]


def _llama(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    return _decoder(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config: Any) -> DecoderSpec:
    return _decoder(config, _windows(config))


def _qwen2(config: Any) -> DecoderSpec:
    return _decoder(config, _typed(config), qkv_bias=True)


def _qwen3(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    return _decoder(config, _typed(config), qkv_bias=bias, out_bias=bias, query_key_norms=True)


def _gemma2(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    return _decoder(
        config,
        _typed(config),
        qkv_bias=bias,
        out_bias=bias,
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping,
        final_softcap=config.final_logit_softcapping,
        embed_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        output_norms=True,
        norms=_FOUR_NORMS,
    )


def _gemma3(config: Any) -> DecoderSpec:
    layers = [dataclasses.replace(layer, rope=int(layer.kind == "sliding")) for layer in _typed(config)]
    ropes = [
        RopeSpec(config.rope_parameters[kind], config.head_dim, kind)
        for kind in ("full_attention", "sliding_attention")
    ]
    # Gemma 3's attention has the field of the soft cap, and does not apply it.
    return dataclasses.replace(
        _gemma2(config), layers=tuple(layers), ropes=tuple(ropes), query_key_norms=True, softcap=None
    )


def _phi3(config: Any) -> DecoderSpec:
    return _decoder(config, _windows(config), qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def _mixtral(config: Any) -> DecoderSpec:
    experts = ExpertsSpec(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return _decoder(config, [dataclasses.replace(layer, experts=experts) for layer in _windows(config)])


def _sparse(config: Any, layers: Sequence[LayerSpec], experts: ExpertsSpec) -> list[LayerSpec]:
    """The layers that Qwen's configurations make mixtures of experts."""
    return [
        dataclasses.replace(layer, experts=experts)
        if index not in config.mlp_only_layers and experts.count > 0 and (index + 1) % config.decoder_sparse_step == 0
        else layer
        for index, layer in enumerate(layers)
    ]


def _qwen_experts(config: Any, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        router="mlp.gate",
        expert="mlp.experts.{}",
        gate_up=_GATED,
        down="down_proj",
        normalise=config.norm_topk_prob,
        **changes,
    )


def _qwen2_moe(config: Any) -> DecoderSpec:
    experts = _qwen_experts(config, shared_size=config.shared_expert_intermediate_size)
    return _decoder(config, _sparse(config, _typed(config), experts), qkv_bias=config.qkv_bias)


def _qwen3_moe(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    layers = _sparse(config, _windows(config), _qwen_experts(config))
    return _decoder(config, layers, qkv_bias=bias, out_bias=bias, query_key_norms=True)


def _gpt_oss(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    experts = ExpertsSpec(
        count=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router="mlp.router",
        expert="mlp.experts.{}",
        gate_up=("gate_up_proj",),
        down="down_proj",
        softmax_of_chosen=True,
        bias=True,
        clamped=(config.swiglu_alpha, config.swiglu_limit),
    )
    layers = [dataclasses.replace(layer, experts=experts) for layer in _typed(config)]
    return _decoder(config, layers, qkv_bias=bias, out_bias=bias, sinks=True)


_MAKERS: MappingProxyType[str, Callable[[Any], DecoderSpec]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "phi3": _phi3,
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
        "gpt_oss": _gpt_oss,
    }
)

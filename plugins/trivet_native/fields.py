"""Which configurations the native model understands, told from plain data: ``suits`` must not import transformers.

A configuration is served if all that it says is either used or known to change nothing. Everything else is declined by
the name of its field, so that a feature that is not implemented is never computed as if it were not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

#: types of rotary embeddings
ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"})
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: transformers' names of activations
ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
    }
)

# What says nothing about the forward pass: origins, training, generation, tokens, how transformers is to run it.
_NEUTRAL = frozenset(
    {
        "architectures", "attention_dropout", "attn_implementation", "auto_map", "cache_implementation",
        "chunk_size_feed_forward", "dtype", "embd_pdrop", "experts_implementation", "finetuning_task",
        "hidden_dropout", "id2label", "initializer_range", "is_encoder_decoder", "is_llama_config", "label2id",
        "max_window_layers", "model_name", "model_type", "name_or_path", "output_attentions", "output_hidden_states",
        "output_router_logits", "pretraining_tp", "problem_type", "quantization_config", "resid_pdrop", "return_dict",
        "rope_interleaved", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype", "transformers.js_config",
        "transformers_version", "transformers_weights", "unsloth_fixed", "unsloth_version", "use_cache",
    }
)  # fmt: skip
_SIZES = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "rope_parameters", "rope_scaling", "rope_theta", "hidden_act",
    }
)  # fmt: skip
_EXPERTS = frozenset({"num_experts_per_tok"})
_QWEN_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "layer_types"})
_QWEN_EXPERTS = _EXPERTS | frozenset(
    {"num_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}
)
_GEMMA = frozenset(
    {
        "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping",
        "attn_logit_softcapping", "attention_bias", "use_bidirectional_attention",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers: the class of its causal language model, and the fields that are understood."""

    architecture: str
    fields: frozenset[str]
    activation: str = "hidden_act"

    @property
    def classifier(self) -> str:
        """The class with a head for scores of sequences in place of the language model's."""
        stem = (
            "Gemma3Text" if self.architecture == "Gemma3ForCausalLM" else self.architecture.removesuffix("ForCausalLM")
        )
        return f"{stem}ForSequenceClassification"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM", _SIZES | {"attention_bias", "mlp_bias"}),
        "mistral": Family("MistralForCausalLM", _SIZES | {"sliding_window"}),
        "qwen2": Family("Qwen2ForCausalLM", _SIZES | _QWEN_WINDOWS),
        "qwen3": Family("Qwen3ForCausalLM", _SIZES | _QWEN_WINDOWS | {"attention_bias"}),
        "gemma2": Family("Gemma2ForCausalLM", _SIZES | _GEMMA, "hidden_activation"),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            _SIZES | _GEMMA | {"rope_local_base_freq", "sliding_window_pattern"},
            "hidden_activation",
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            _SIZES | {"sliding_window", "original_max_position_embeddings", "partial_rotary_factor"},
        ),
        "mixtral": Family("MixtralForCausalLM", _SIZES | _EXPERTS | {"num_local_experts", "sliding_window"}),
        "qwen2_moe": Family(
            "Qwen2MoeForCausalLM",
            _SIZES | _QWEN_WINDOWS | _QWEN_EXPERTS | {"qkv_bias", "shared_expert_intermediate_size"},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            _SIZES | _QWEN_EXPERTS | {"use_sliding_window", "sliding_window", "attention_bias", "num_local_experts"},
        ),
        # Its files say some things twice: experts_per_token and initial_context_length are never read.
        "gpt_oss": Family(
            "GptOssForCausalLM",
            _SIZES
            | _EXPERTS
            | {"num_local_experts", "sliding_window", "layer_types", "attention_bias", "swiglu_alpha", "swiglu_limit"}
            | {"experts_per_token", "initial_context_length"},
        ),
    }
)

#: ``general.architecture`` of GGUF files whose models are of these families
GGUF_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen2moe", "qwen3moe"})


def problem(config: Mapping[str, Any], *, known: Collection[str] | None = None) -> str | None:
    """Why a configuration is not served, or None.

    Args:
        config: Fields as in ``config.json``; those left out have transformers' defaults.
        known: Fields that transformers' class of this configuration has. Others are of no consequence there, and so
            are not looked at; None: all are.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        return f"its model_type {model_type!r} is not one of {', '.join(FAMILIES)}"
    architectures = config.get("architectures") or [family.architecture]
    if not {family.architecture, family.classifier} & set(architectures):
        return f"its architectures {architectures!r} are neither {family.architecture} nor {family.classifier}"
    if reason := _quantization_problem(family, config.get("quantization_config")):
        return reason
    for name, value in config.items():
        understood = name in family.fields or name in _NEUTRAL or name.startswith("_") or name.endswith("_token_id")
        if not understood and value is not None and (known is None or name in known):
            return f"its field {name} ({value!r}) is not known here"
    return _activation_problem(family, config) or _rope_problem(family, config) or _layer_problem(config)


def _quantization_problem(family: Family, given: Any) -> str | None:
    """Weights must be plain, but for GPT-OSS's experts; a checkpoint that was calibrated for a cache of 8-bit floats
    alone says so here too."""
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method == "compressed-tensors" and not given.get("config_groups"):
        return None
    if method == "modelopt" and given.get("quant_algo", "") is None:
        return None
    if method == "mxfp4" and family is FAMILIES["gpt_oss"]:
        return None
    return f"its weights are quantised{f' in {method}' if method else ''} (quantization_config)"


def _activation_problem(family: Family, config: Mapping[str, Any]) -> str | None:
    name = config.get(family.activation)
    return None if name is None or name in ACTIVATIONS else f"its {family.activation} {name!r} is not implemented"


def _rope_problem(family: Family, config: Mapping[str, Any]) -> str | None:
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        # Phi-3's first name for it.
        if kind not in ROPE_TYPES and not (kind == "su" and family.architecture == "Phi3ForCausalLM"):
            return f"its rope_type {kind!r} is not implemented"
    return None


def _layer_problem(config: Mapping[str, Any]) -> str | None:
    if config.get("use_bidirectional_attention"):
        return "it attends in both directions (use_bidirectional_attention)"
    other = sorted({str(kind) for kind in config.get("layer_types") or ()} - LAYER_TYPES)
    return f"its layer_types {', '.join(other)} are not implemented" if other else None


def rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope parameters of the model, or one by one those of its layer types."""
    for field in ("rope_parameters", "rope_scaling"):
        given = config.get(field)
        if not isinstance(given, Mapping):
            continue
        nested = [value for value in given.values() if isinstance(value, Mapping)]
        yield from nested or [given]

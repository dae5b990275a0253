"""A transformers configuration from the metadata of a GGUF file.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's ``llama-arch.cpp``; what a key
means for a model follows llama.cpp's converter (``convert_hf_to_gguf.py``) and its graph builders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trivet.gguf import GGUFFile

# llama.cpp's default for files without the key.
_DEFAULT_ROPE_THETA = 10000.0
# The wavelength bounds with which every published model of the Llama 3 family scales its frequencies.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Models with this many layers scale attention by the hidden size per head, not by the head size (as in llama.cpp).
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62

_Config = dict[str, Any]


class Metadata:
    """The metadata and tensor table of a file, read by key names without the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.error("the metadata key 'general.architecture' is missing")
        self.architecture = architecture

    def error(
        self, problem: str, remedy: str = "convert the model again with a current version of llama.cpp"
    ) -> Exception:
        return ModelLoadError(f"{self.file.path}: {problem}; {remedy}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``; a list of one value per layer is accepted where all are the same."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return default
        if isinstance(value, np.ndarray):
            distinct = np.unique(value)
            if distinct.size != 1:
                raise self.error(
                    f"the metadata key {self.architecture + '.' + key!r} differs between layers ({value.tolist()}), "
                    f"which is not supported for the architecture {self.architecture!r}",
                    "use the model's safetensors instead",
                )
            return distinct[0].item()
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.error(f"the metadata key {self.architecture + '.' + key!r} is missing")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    @property
    def head_dim(self) -> int:
        """Elements of a query or key head."""
        default = self.need("embedding_length") // self.need("attention.head_count")
        key_length = int(self.get("attention.key_length", default))
        value_length = int(self.get("attention.value_length", default))
        if key_length != value_length:
            raise self.error(
                f"keys have {key_length} elements per head and values {value_length}, which is not supported",
                "use the model's safetensors instead",
            )
        return key_length

    def rope(self, *, partial: bool = False) -> _Config:
        """``rope_parameters`` of a model whose layers all rotate alike.

        With ``partial`` the model may rotate the first ``rope.dimension_count`` elements of a head only.
        """
        rope = {"rope_theta": float(self.get("rope.freq_base", _DEFAULT_ROPE_THETA)), **self.rope_scaling()}
        dimensions = int(self.get("rope.dimension_count", self.head_dim))
        if partial:
            rope["partial_rotary_factor"] = dimensions / self.head_dim
        elif dimensions != self.head_dim:
            raise self.error(
                f"{dimensions} of {self.head_dim} elements per head are rotated, which is not supported for the "
                f"architecture {self.architecture!r}",
                "use the model's safetensors instead",
            )
        return rope

    def rope_scaling(self) -> _Config:
        kind = self.get("rope.scaling.type", "none")
        factor = float(self.get("rope.scaling.factor", 1.0))
        original = self.get("rope.scaling.original_context_length")
        if self.has_tensor("rope_factors_long.weight"):
            return self._long_rope()
        if self.has_tensor("rope_freqs.weight"):
            return self._llama3_rope()
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            yarn: _Config = {"rope_type": "yarn", "factor": factor}
            yarn["original_max_position_embeddings"] = original or self.need("context_length")
            for theirs, ours in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
                value = self.get(f"rope.scaling.yarn_{theirs}")
                if value is not None:
                    yarn[ours] = float(value)
            if self.get("rope.scaling.attn_factor", 1.0) != 1.0:
                raise self.error(
                    "rope.scaling.attn_factor is not supported together with yarn",
                    "use the model's safetensors instead",
                )
            return yarn
        raise self.error(f"rope.scaling.type {kind!r} is not supported", "use the model's safetensors instead")

    def _tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        info = self.file.tensors[name]
        if info.ggml_type.name != "F32":
            raise self.error(f"tensor {name!r} has the type {info.ggml_type.name}, it must be F32")
        return self.file.raw(name).view(np.float32)

    def _long_rope(self) -> _Config:
        """LongRoPE as in Phi-3: one list of divisors within the original context, another beyond it."""
        rope: _Config = {
            "rope_type": "longrope",
            "long_factor": self._tensor("rope_factors_long.weight").tolist(),
            "short_factor": self._tensor("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": self.need("rope.scaling.original_context_length"),
        }
        attention_factor = self.get("rope.scaling.attn_factor")
        if attention_factor is not None:
            rope["attention_factor"] = float(attention_factor)
        return rope

    def _llama3_rope(self) -> _Config:
        """The Llama 3 parameters whose frequency divisors the file holds; refused if they fit none."""
        divisors = self._tensor("rope_freqs.weight")
        factor = float(divisors.max())
        if np.all(divisors == 1.0):
            return {"rope_type": "default"}
        dim = self.head_dim
        theta = float(self.get("rope.freq_base", _DEFAULT_ROPE_THETA))
        wavelengths = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
        smooth = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = np.clip(smooth, 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
            raise self.error(
                "the frequency divisors in the tensor 'rope_freqs.weight' are not those of Llama 3",
                "use the model's safetensors instead",
            )
        return {
            "rope_type": "llama3",
            "factor": round(factor, 4),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }


def _common(meta: Metadata) -> _Config:
    """What every supported architecture has."""
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise meta.error("the tensor 'token_embd.weight' is missing")
    heads = meta.need("attention.head_count")
    tokenizer = meta.file.metadata
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": meta.need("embedding_length"),
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": meta.need("context_length"),
        # The converter leaves the output projection out if it is the embedding matrix.
        "tie_word_embeddings": not meta.has_tensor("output.weight"),
        # Set even if absent: the defaults of the configuration classes are those of one checkpoint.
        "bos_token_id": tokenizer.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": tokenizer.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": tokenizer.get("tokenizer.ggml.padding_token_id"),
    }


def _decoder(meta: Metadata) -> _Config:
    """Decoders with RMS norms, grouped queries and a gated MLP."""
    return _common(meta) | {
        "num_key_value_heads": meta.get("attention.head_count_kv", meta.need("attention.head_count")),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
    }


def _dense(meta: Metadata) -> _Config:
    return _decoder(meta) | {"intermediate_size": meta.need("feed_forward_length")}


def _llama(meta: Metadata) -> _Config:
    """Llama, and the models that llama.cpp runs as Llama: Mistral and Mixtral."""
    config = _dense(meta) | {"head_dim": meta.head_dim, "rope_parameters": meta.rope()}
    window = meta.get("attention.sliding_window")
    if meta.get("expert_count", 0):
        return config | {
            "model_type": "mixtral",
            "num_local_experts": meta.need("expert_count"),
            "num_experts_per_tok": meta.need("expert_used_count"),
            "sliding_window": window,
        }
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {
        "model_type": "llama",
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": meta.has_tensor("blk.0.ffn_up.bias"),
    }


def _qwen2(meta: Metadata) -> _Config:
    config = _dense(meta) | {"model_type": "qwen2", "rope_parameters": meta.rope()}
    if meta.head_dim * config["num_attention_heads"] != config["hidden_size"]:
        config["head_dim"] = meta.head_dim
    return config


def _qwen3(meta: Metadata) -> _Config:
    return _dense(meta) | {
        "model_type": "qwen3",
        "head_dim": meta.head_dim,
        "rope_parameters": meta.rope(),
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
    }


def _experts(meta: Metadata) -> _Config:
    return _decoder(meta) | {
        "rope_parameters": meta.rope(),
        "num_experts": meta.need("expert_count"),
        "num_experts_per_tok": meta.need("expert_used_count"),
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "intermediate_size": meta.get("feed_forward_length", meta.need("expert_feed_forward_length")),
    }


def _qwen2moe(meta: Metadata) -> _Config:
    return _experts(meta) | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": meta.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", False)),
    }


def _qwen3moe(meta: Metadata) -> _Config:
    # llama.cpp always normalises the weights of the chosen experts.
    return _experts(meta) | {"model_type": "qwen3_moe", "head_dim": meta.head_dim, "norm_topk_prob": True}


def _gemma(meta: Metadata, model_type: str, layers_of_27b: int) -> _Config:
    config = _dense(meta)
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config | {
        "model_type": model_type,
        "head_dim": meta.head_dim,
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else meta.head_dim,
        "sliding_window": meta.need("attention.sliding_window"),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _layer_types(meta: Metadata, default_period: int) -> list[str]:
    """Every ``period``-th layer attends to the whole context, the others to a window; or as a list in the file says."""
    num_layers = meta.need("block_count")
    pattern = meta.file.metadata.get(f"{meta.architecture}.attention.sliding_window_pattern", default_period)
    if isinstance(pattern, int):
        is_sliding = [bool((layer + 1) % pattern) for layer in range(num_layers)]
    else:
        is_sliding = [bool(value) for value in np.asarray(pattern)]
        if len(is_sliding) != num_layers:
            raise meta.error(f"the sliding window pattern has {len(is_sliding)} entries for {num_layers} layers")
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


def _gemma2(meta: Metadata) -> _Config:
    return _gemma(meta, "gemma2", _GEMMA2_27B_LAYERS) | {
        "rope_parameters": meta.rope(),
        "layer_types": _layer_types(meta, 2),
    }


def _gemma3(meta: Metadata) -> _Config:
    # Scaling applies to the layers with full attention only; windowed layers have a base of their own.
    local_theta = float(meta.get("rope.freq_base_swa", 10000.0))
    return _gemma(meta, "gemma3_text", _GEMMA3_27B_LAYERS) | {
        "rope_parameters": {
            "full_attention": meta.rope(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "layer_types": _layer_types(meta, 6),
    }


def _phi3(meta: Metadata) -> _Config:
    rope = meta.rope(partial=True)
    return _dense(meta) | {
        "model_type": "phi3",
        "rope_parameters": rope,
        "original_max_position_embeddings": meta.get(
            "rope.scaling.original_context_length", meta.need("context_length")
        ),
        # The converter writes 0 for a model without a window.
        "sliding_window": meta.get("attention.sliding_window") or None,
    }


def _gptneox(meta: Metadata) -> _Config:
    return _common(meta) | {
        "model_type": "gpt_neox",
        "intermediate_size": meta.need("feed_forward_length"),
        "layer_norm_eps": meta.need("attention.layer_norm_epsilon"),
        "use_parallel_residual": bool(meta.get("use_parallel_residual", True)),
        "attention_bias": meta.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": meta.rope(partial=True),
    }


_BUILDERS: Mapping[str, Callable[[Metadata], _Config]] = MappingProxyType(
    {
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "gptneox": _gptneox,
        "llama": _llama,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen2moe": _qwen2moe,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3moe,
    }
)

ARCHITECTURES: tuple[str, ...] = tuple(_BUILDERS)
"""The values of ``general.architecture`` that can be loaded."""


def config_from_gguf(file: GGUFFile) -> PreTrainedConfig:
    """The transformers configuration that the metadata and the tensor table of ``file`` describe.

    Raises:
        ModelLoadError: As :func:`config_values`, or transformers refuses the configuration.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**config_values(file))
    except (ValueError, StrictDataclassError) as error:
        raise Metadata(file).error(f"the metadata describe no valid model: {error}", "the file is damaged") from error


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The fields of that configuration which differ from transformers' defaults, or may.

    Raises:
        ModelLoadError: The architecture is not supported (lists those that are), a key is missing, or the file asks for
            something that transformers' model cannot do. Split files are refused.
    """
    meta = Metadata(file)
    num_parts = file.metadata.get("split.count", 1)
    if isinstance(num_parts, int) and num_parts > 1:
        raise meta.error(f"the model is split over {num_parts} files", "join them with `llama-gguf-split --merge`")
    builder = _BUILDERS.get(meta.architecture)
    if builder is None:
        raise meta.error(
            f"the architecture {meta.architecture!r} is not supported",
            f"use the model's safetensors instead (architectures supported in GGUF: {', '.join(ARCHITECTURES)})",
        )
    return builder(meta)

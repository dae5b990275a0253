"""Where each tensor of a GGUF file belongs in transformers' model, and how llama.cpp's converter had changed it.

Names: ``gguf-py/gguf/tensor_mapping.py`` of llama.cpp. Changes of values and layout, undone here:
``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Tensors that are no parameters: frequencies, which the configuration carries.
_NOT_PARAMETERS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor of the file goes.

    Attributes:
        parameter: Name of the model's parameter.
        part: ``(index, count)``: the tensor fills this share of the parameter's second-to-last dimension, which joins
            ``count`` tensors; ``None``: it fills all of it.
        reorder: Gives a view of the parameter whose elements are in the file's order.
        offset: Added to the values in float32.
    """

    parameter: str
    part: tuple[int, int] | None = None
    reorder: Callable[[Tensor], Tensor] | None = None
    offset: float = 0.0


_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOE_LAYER = _LLAMA_LAYER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEOX_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_LAYERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": _GEMMA_LAYER,
        "gemma3": _GEMMA_LAYER,
        "gptneox": _NEOX_LAYER,
        "llama": _MOE_LAYER,
        "phi3": _PHI3_LAYER,
        "qwen2": _LLAMA_LAYER,
        "qwen2moe": _MOE_LAYER,
        "qwen3": _LLAMA_LAYER,
        "qwen3moe": _MOE_LAYER,
    }
)
_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
# The experts of a layer are one tensor, with gate and up joined: [num_experts, 2 * intermediate, hidden].
_EXPERTS = {
    "ffn_gate_exps.weight": ("mlp.experts.gate_up_proj", (0, 2)),
    "ffn_up_exps.weight": ("mlp.experts.gate_up_proj", (1, 2)),
    "ffn_down_exps.weight": ("mlp.experts.down_proj", None),
}


def place(architecture: str, name: str, config: Any) -> Placement | None:
    """Where the tensor ``name`` goes, or ``None`` if the model has no place for it (see :func:`is_parameter`).

    Args:
        architecture: ``general.architecture`` of the file, one of ``gguf_config.ARCHITECTURES``.
        name: The tensor's name in the file.
        config: The model's transformers configuration.
    """
    block = _BLOCK.fullmatch(name)
    is_neox = architecture == "gptneox"
    if block is None:
        stem, _, kind = name.rpartition(".")
        module = (_NEOX_TOP if is_neox else _LLAMA_TOP).get(stem)
        return None if module is None else Placement(f"{module}.{kind}", offset=_offset(architecture, name))

    prefix = f"{'gpt_neox' if is_neox else 'model'}.layers.{block[1]}."
    rest = block[2]
    if rest in _EXPERTS and _LAYERS[architecture] is _MOE_LAYER:
        module, part = _EXPERTS[rest]
        return Placement(prefix + module, part)
    stem, _, kind = rest.rpartition(".")
    module = _LAYERS[architecture].get(stem, "")
    if not module:
        return None
    return Placement(
        f"{prefix}{module}.{kind}", reorder=_reorder(architecture, stem, config), offset=_offset(architecture, name)
    )


def is_parameter(name: str) -> bool:
    """Whether a tensor has to find its place in the model; those that have not are read with the configuration."""
    return _NOT_PARAMETERS.fullmatch(name) is None


def _offset(architecture: str, name: str) -> float:
    # Gemma's norms multiply by 1 + weight; the file stores the sum.
    return -1.0 if architecture in {"gemma2", "gemma3"} and name.endswith("norm.weight") else 0.0


def _reorder(architecture: str, stem: str, config: Any) -> Callable[[Tensor], Tensor] | None:
    if architecture == "llama" and stem in {"attn_q", "attn_k"}:
        # llama.cpp rotates neighbouring elements, transformers the two halves of a head.
        heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
        return lambda parameter: parameter.view(heads, 2, -1, *parameter.shape[1:]).transpose(1, 2)
    if architecture == "gptneox" and stem == "attn_qkv":
        # The file has all queries, then all keys, then all values; the model has them head by head.
        return lambda parameter: parameter.view(config.num_attention_heads, 3, -1, *parameter.shape[1:]).transpose(0, 1)
    return None

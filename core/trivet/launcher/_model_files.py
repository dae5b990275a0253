"""What a model's configuration or header says of its size and of what its layers keep, before anything is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trivet.errors import ModelLoadError
from trivet.gguf import GGUFFile
from trivet.model_defaults import context_length
from trivet.model_source import ModelLocation, read_json
from trivet.roles import LayerKVSpec, ModelInfo
from trivet.roles.kv import KVKind

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KINDS: dict[str, KVKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
# Keys of models that keep something else than keys and values per layer and head.
_OTHER_STATES = (
    "kv_lora_rank",
    "mamba_d_state",
    "state_size",
    "ssm_cfg",
    "linear_num_value_heads",
    "rwkv_version",
    "num_kv_shared_layers",
    "multi_query",
)
# What the configuration classes of transformers take for keys that a config.json lacks, by model_type.
_HEAD_DIMS = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "llama4_text": 128}
_WINDOWS = {
    **dict.fromkeys(("mistral", "ministral", "gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4"), 4096),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), 4096),
    "gpt_oss": 128,
}
_CHUNKS = {"llama4_text": 8192}
# Whose window counts only where use_sliding_window is set.
_OPT_IN = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"})
# Every so many layers one attends to everything, the others to a window.
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4}
# All of whose layers have the window.
_UNIFORM = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2", "qwen3_moe"})
_GGUF_PERIODS = {"gemma2": 2, "gemma3": 6}

Layer = tuple[KVKind, int | None]
"""Kind, and tokens that it sees if not all."""


@dataclass(slots=True)
class ModelFiles:
    """Sizes in bytes; None for what the files do not tell."""

    dtype: str
    weights_on_disk: int | None = None
    weights_in_memory: int | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    max_model_len: int | None = None
    num_kv_heads: tuple[int, ...] = ()  #: of each layer
    key_dim: int = 0
    value_dim: int = 0
    layers: tuple[Layer, ...] | None = None  #: None: known when the model is loaded
    notes: list[str] = field(default_factory=list)

    @property
    def info(self) -> ModelInfo:
        """What the model would say of itself."""
        return ModelInfo(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len or 0,
            num_layers=len(self.layers or ()),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
        )

    def specs(self, max_model_len: int) -> tuple[LayerKVSpec, ...]:
        """What its layers keep; a window as long as the context hides nothing."""
        made: list[LayerKVSpec] = []
        for index, ((kind, window), heads) in enumerate(zip(self.layers or (), self.num_kv_heads, strict=True)):
            hides = window is not None and window < max_model_len
            value_dim = None if self.value_dim == self.key_dim else self.value_dim
            made.append(
                LayerKVSpec(
                    index,
                    kind if hides else "full",
                    heads,
                    self.key_dim,
                    self.dtype,
                    window if hides else None,
                    value_dim,
                )
            )
        return tuple(made)


def read_model(location: ModelLocation, dtype: str, device: str, max_model_len: int | None = None) -> ModelFiles:
    """Read a folder's config.json and the headers of its weights, or a GGUF file's header.

    Args:
        location: Where the files are.
        dtype: As configured; ``auto`` is what is stored, and for GGUF files float32 on a CPU, bfloat16 elsewhere.
        device: Where the weights will be.
        max_model_len: As configured; some models have a longer context where that is asked for.

    Raises:
        ModelLoadError: The files are missing or damaged.
    """
    if location.kind == "gguf":
        default = "float32" if device == "cpu" else "bfloat16"
        return _read_gguf(location.path, default if dtype == "auto" else dtype, max_model_len)
    return _read_folder(location.path, dtype, max_model_len)


# ---------------------------------------------------------------------- GGUF


def _read_gguf(path: Path, dtype: str, max_model_len: int | None) -> ModelFiles:
    file = GGUFFile(path)
    elements = sum(prod(info.shape) for info in file.tensors.values())
    found = ModelFiles(dtype, path.stat().st_size, elements * _ITEM_SIZES[dtype])
    metadata: Mapping[str, Any] = file.metadata
    arch = metadata.get("general.architecture")

    def get(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    layers, heads, length = get("block_count"), get("attention.head_count"), get("context_length")
    if not (layers and heads and length) or any(get(key) for key in ("attention.kv_lora_rank", "ssm.state_size")):
        return found
    embedding = file.tensors.get("token_embd.weight")
    found.vocab_size = embedding.shape[0] if embedding is not None else 0
    found.hidden_size, found.max_model_len = int(get("embedding_length") or 0), int(length)
    if "rope_factors_long.weight" in file.tensors:
        rope = {
            "rope_type": "longrope",
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
        found.max_model_len = context_length({"rope_parameters": rope}, int(length), max_model_len)
    key_dim = get("attention.key_length") or found.hidden_size // _maximum(heads)
    kv_heads = get("attention.head_count_kv") or heads
    found.num_kv_heads = (int(kv_heads),) * layers if isinstance(kv_heads, int) else tuple(int(n) for n in kv_heads)
    found.key_dim, found.value_dim = int(key_dim), int(get("attention.value_length") or key_dim)
    found.layers = _gguf_layers(str(arch), int(layers), get)
    return found


def _gguf_layers(arch: str, count: int, get: Callable[[str], Any]) -> tuple[Layer, ...] | None:
    """As the loader of GGUF files reads them (:mod:`trivet_torch.weights.gguf_config`)."""
    window = get("attention.sliding_window")
    if not window or arch.startswith("qwen"):
        return (("full", None),) * count
    if arch in {"llama", "phi3"}:
        return (("sliding", int(window)),) * count
    if arch not in _GGUF_PERIODS:
        return None
    pattern = get("attention.sliding_window_pattern")
    pattern = _GGUF_PERIODS[arch] if pattern is None else pattern
    if isinstance(pattern, int):
        return _periodic(pattern, count, int(window))
    slides = [bool(value) for value in np.asarray(pattern)]
    return tuple(("sliding", int(window)) if slide else ("full", None) for slide in slides[:count])


def _maximum(value: Any) -> int:
    return value if isinstance(value, int) else int(max(value))


# ---------------------------------------------------------------------- folders


def _read_folder(path: Path, dtype: str, max_model_len: int | None) -> ModelFiles:
    values = read_json(path / "config.json")
    inner = values.get("text_config") or {}
    text: dict[str, Any] = {**values, **inner}
    found = ModelFiles(_stored_dtype(values, inner) if dtype == "auto" else dtype)
    files = _weight_files(path)
    if files:
        found.weights_on_disk = sum(file.stat().st_size for file in files)
        found.weights_in_memory = sum(_count_elements(file) for file in files) * _ITEM_SIZES[found.dtype]
    else:
        found.notes.append("the weights are not there yet")
    layers = _number(text, "num_hidden_layers", "n_layer")
    heads = _number(text, "num_attention_heads", "n_head")
    found.hidden_size = _number(text, "hidden_size", "n_embd")
    found.vocab_size = _number(text, "vocab_size")
    length = _number(text, "max_position_embeddings", "n_positions")
    if min(layers, heads, found.hidden_size, length) < 1 or any(text.get(key) for key in _OTHER_STATES):
        return found
    found.max_model_len = context_length(text, length, max_model_len)
    found.num_kv_heads = (_number(text, "num_key_value_heads") or heads,) * layers
    default = _HEAD_DIMS.get(text.get("model_type", ""), found.hidden_size // heads)
    found.key_dim = _number(text, "head_dim") or default
    found.value_dim = _number(text, "v_head_dim") or found.key_dim
    found.layers = folder_layers(text, layers)
    return found


def folder_layers(text: Mapping[str, Any], count: int) -> tuple[Layer, ...] | None:
    """Kind and window of every layer by a config.json (that of the decoder); None where it does not say."""
    model_type = text.get("model_type", "")
    window = text["sliding_window"] if "sliding_window" in text else _WINDOWS.get(model_type)
    if not text.get("use_sliding_window", model_type not in _OPT_IN):
        window = None
    chunk = text["attention_chunk_size"] if "attention_chunk_size" in text else _CHUNKS.get(model_type)
    types = text.get("layer_types")
    if types:
        widths = {"full": None, "sliding": window or None, "chunked": chunk or None}
        if not set(types) <= set(_KINDS) or len(types) != count:
            return None
        kinds = [_KINDS[name] for name in types]
        return tuple((kind, widths[kind]) if widths[kind] else ("full", None) for kind in kinds)
    if chunk:
        rotated = text.get("no_rope_layers") or [
            (layer + 1) % text.get("no_rope_layer_interval", 4) for layer in range(count)
        ]
        return tuple(("chunked", int(chunk)) if has_rope else ("full", None) for has_rope in rotated)
    if not window:
        return (("full", None),) * count
    return _windowed(text, model_type, count, int(window))


def _windowed(text: Mapping[str, Any], model_type: str, count: int, window: int) -> tuple[Layer, ...] | None:
    """Which layers have the window where no list says so."""
    first_windows = text.get("max_window_layers", 28)
    if model_type in {"qwen2", "qwen3"}:
        return tuple(("sliding", window) if layer >= first_windows else ("full", None) for layer in range(count))
    if model_type == "qwen2_moe":
        return tuple(
            ("sliding", window) if (layer + 1) % 2 and layer < first_windows else ("full", None)
            for layer in range(count)
        )
    period = text.get("sliding_window_pattern", _PERIODS.get(model_type))
    if isinstance(period, int):
        return _periodic(period, count, window)
    return (("sliding", window),) * count if model_type in _UNIFORM else None


def _periodic(period: int, count: int, window: int) -> tuple[Layer, ...]:
    """Every ``period``-th layer attends to everything; 0: none does."""
    return tuple(
        ("full", None) if period and not (layer + 1) % period else ("sliding", window) for layer in range(count)
    )


def _stored_dtype(*parts: Mapping[str, Any]) -> str:
    for part in parts:
        stored = part.get("dtype") or part.get("torch_dtype")
        if stored in _ITEM_SIZES:
            return str(stored)
    quantized = parts[0].get("quantization_config") or {}
    return "bfloat16" if quantized.get("quant_method") == "mxfp4" else "float32"


def _number(values: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that holds a number; 0 if none does."""
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _weight_files(folder: Path) -> list[Path]:
    """The files of an index, or every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    files = sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{index} names {file.name}, which is missing; download the model again")
    return files


def _count_elements(path: Path) -> int:
    """Numbers in a safetensors file by its header. Raises ModelLoadError when the file is shorter than that says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        header = file.read(min(length, size))
    try:
        tensors = [info for name, info in json.loads(header).items() if name != "__metadata__"]
        end = 8 + length + max((int(info["data_offsets"][1]) for info in tensors), default=0)
        count = sum(int(prod(info["shape"])) for info in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{path} is truncated or no safetensors file: its header cannot be read") from error
    if size < end:
        raise ModelLoadError(f"{path} is truncated: it has {size} of {end} bytes; download the model again")
    return count

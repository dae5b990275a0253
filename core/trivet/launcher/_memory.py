"""The memory plan of ``trivet config check``: what a model's files tell before anything is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.assembly import negotiate
from trivet.errors import CacheMemoryError, ModelLoadError
from trivet.gguf import GGUFFile
from trivet.model_source import ModelLocation, is_hub_id, resolve_model
from trivet.registry.records import Origin
from trivet.roles import AttentionSupport, KVLayout, LayerKVSpec, ModelInfo, WorkerInfo
from trivet_schemas.options import format_size

if TYPE_CHECKING:
    from trivet.registry import Registry
    from trivet_schemas.config import EngineConfig

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Keys of models that keep something else than keys and values per head.
_OTHER_STATES = ("kv_lora_rank", "mamba_d_state", "state_size", "ssm_cfg", "linear_num_value_heads", "rwkv_version")
_UNLIMITED = 1 << 60


@dataclass(slots=True)
class MemoryPlan:
    """Sizes in bytes; None for what the files do not tell."""

    model: str
    dtype: str | None = None
    weights_on_disk: int | None = None
    weights_in_memory: int | None = None
    kv_bytes_per_token: int | None = None
    max_model_len: int | None = None
    cache_bytes: int | None = None
    num_blocks: int | None = None
    num_tokens: int | None = None
    num_full_requests: int | None = None
    notes: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Lines for people."""
        yield "model", self.model
        if self.weights_on_disk is not None:
            yield "weights on disk", format_size(self.weights_on_disk)
        if self.weights_in_memory is not None:
            yield "weights in memory", f"{format_size(self.weights_in_memory)} as {self.dtype}"
        if self.kv_bytes_per_token is not None:
            yield "KV cache per token", format_size(self.kv_bytes_per_token)
        if self.max_model_len is not None:
            yield "longest request", f"{self.max_model_len} tokens (max_model_len)"
        if self.cache_bytes is not None:
            yield "KV cache", f"{format_size(self.cache_bytes)}, {self.num_blocks} blocks"
        if self.num_tokens is not None:
            yield "", f"{self.num_tokens} tokens, {self.num_full_requests} requests of the full length at once"
        for note in self.notes:
            yield "note", note


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the KV cache keeps for a token, and the model's own context length."""

    num_kv_heads: tuple[int, ...]  #: of each layer
    key_dim: int
    value_dim: int
    max_model_len: int


def plan_memory(config: EngineConfig, registry: Registry) -> MemoryPlan:
    """Read the model's configuration or header, and let the selected cache plan its blocks.

    Raises:
        ModelLoadError: The model's files are missing or damaged.
        CacheMemoryError: The cache cannot hold one request of the full length; the message says what would help.
    """
    plan = MemoryPlan(config.model)
    (model,) = registry.selection("model").choices
    if model.offer.plugin.origin is not Origin.BUNDLED:
        plan.notes.append(f"known when the model is loaded, by {model.offer.label}")
        return plan
    location = _locate(config)
    if location is None:
        plan.notes.append("a hub model that is not in the local cache; its sizes are known when it is loaded")
        return plan
    plan.model = str(location.path)
    shape = (_read_gguf if location.kind == "gguf" else _read_folder)(location.path, config, plan)
    if shape is None:
        plan.notes.append("the KV cache of this architecture is known when the model is loaded")
        return plan
    dtype = plan.dtype or "float32"
    specs = tuple(
        LayerKVSpec(layer, "full", heads, shape.key_dim, dtype, v_head_dim=shape.value_dim)
        for layer, heads in enumerate(shape.num_kv_heads)
    )
    plan.kv_bytes_per_token = sum(spec.bytes_per_token for spec in specs)
    _plan_cache(config, registry, plan, specs, shape.max_model_len)
    return plan


def _plan_cache(
    config: EngineConfig, registry: Registry, plan: MemoryPlan, specs: tuple[LayerKVSpec, ...], longest: int
) -> None:
    cache, limits = registry.engine_context.get("cache"), registry.engine_context.get("scheduler").limits

    def attempt(available: int) -> tuple[KVLayout, int]:
        model = ModelInfo(vocab_size=0, max_model_len=longest)
        info = WorkerInfo(model, specs, (AttentionSupport(),) * len(specs), available)
        return negotiate(cache, info, limits, config.max_model_len, limits.max_num_batched_tokens)

    try:
        layout, plan.max_model_len = attempt(0)
    except CacheMemoryError:
        # Either the options' size is too small, or there is none and the cache takes what is left after loading.
        _, plan.max_model_len = attempt(_UNLIMITED)
        plan.notes.append("the KV cache takes what is left after loading; set plugins.cache.memory for a fixed size")
        return
    plan.cache_bytes = layout.num_bytes
    plan.num_blocks = cache.stats().total
    if len(layout.groups) == 1:
        size = layout.groups[0].block_size
        plan.num_tokens = plan.num_blocks * size
        plan.num_full_requests = plan.num_blocks // -(-plan.max_model_len // size)


def _locate(config: EngineConfig) -> ModelLocation | None:
    """The model's files; None for a hub model that would have to be downloaded."""
    if not is_hub_id(config.model):
        return resolve_model(config.model)
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = config.model.partition("@")
    found = try_to_load_from_cache(repository, "config.json", revision=revision or config.revision)
    return ModelLocation("hf", Path(found).parent, revision or config.revision) if isinstance(found, str) else None


def _read_gguf(path: Path, config: EngineConfig, plan: MemoryPlan) -> _Shape | None:
    file = GGUFFile(path)
    plan.weights_on_disk = path.stat().st_size
    plan.dtype = "float32" if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and not config.device.startswith("cpu"):
        plan.notes.append("a GGUF file becomes bfloat16 on an accelerator, which halves these sizes")
    plan.weights_in_memory = sum(prod(info.shape) for info in file.tensors.values()) * _ITEM_SIZES[plan.dtype]
    metadata: Mapping[str, Any] = file.metadata
    arch = metadata.get("general.architecture")

    def get(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    layers, heads, length = get("block_count"), get("attention.head_count"), get("context_length")
    if not (layers and heads and length) or any(get(key) for key in ("attention.kv_lora_rank", "ssm.state_size")):
        return None
    key_dim = get("attention.key_length") or get("embedding_length") // _maximum(heads)
    kv_heads = get("attention.head_count_kv") or heads
    per_layer = [int(kv_heads)] * layers if isinstance(kv_heads, int) else [int(count) for count in kv_heads]
    return _Shape(tuple(per_layer), int(key_dim), int(get("attention.value_length") or key_dim), int(length))


def _maximum(value: Any) -> int:
    return value if isinstance(value, int) else int(max(value))


def _read_folder(path: Path, config: EngineConfig, plan: MemoryPlan) -> _Shape | None:
    values = _read_json(path / "config.json")
    text: dict[str, Any] = {**values, **(values.get("text_config") or {})}
    stored = text.get("dtype") or text.get("torch_dtype")
    plan.dtype = config.dtype if config.dtype != "auto" else stored if stored in _ITEM_SIZES else "float32"
    files = _weight_files(path)
    if files:
        plan.weights_on_disk = sum(file.stat().st_size for file in files)
        plan.weights_in_memory = sum(_count_elements(file) for file in files) * _ITEM_SIZES[plan.dtype]
    else:
        plan.notes.append("the weights are not there yet")
    sizes = [text.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    layers, heads, hidden, length = (
        value if isinstance(value, int) else 0 for value in (*sizes, text.get("max_position_embeddings"))
    )
    known = set(text.get("layer_types") or ()) <= _KNOWN_LAYERS and not any(text.get(key) for key in _OTHER_STATES)
    if not known or min(layers, heads, hidden, length) < 1:
        return None
    head_dim = text.get("head_dim") or hidden // heads
    return _Shape((text.get("num_key_value_heads") or heads,) * layers, head_dim, head_dim, length)


def _weight_files(folder: Path) -> list[Path]:
    """The files of an index, or every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    files = sorted({folder / name for name in _read_json(index).get("weight_map", {}).values()})
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object; download the model again")
    return value

"""What a loaded model asks of attention, found by watching it compute two tokens; what cannot be served is refused."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trivet.errors import ModelLoadError
from trivet.model_source import resolve_model
from trivet.roles.kv import KVKind
from trivet_transformers.interface import KEYWORD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: keywords of an attention call that the provider honours, or that change nothing when tokens are flattened
_KNOWN = frozenset({
    "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout", "position_ids", "cache_position",
    "layer_idx", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
})  # fmt: skip

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention call: its module, shapes and window (tokens, the current one included)."""

    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None


class _Recorder:
    def __init__(self, refuse: _Refusal) -> None:
        self.calls: list[LayerCall] = []
        self._refuse = refuse

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        given: dict[str, Any],
    ) -> torch.Tensor:
        name = type(module).__name__
        if not getattr(module, "is_causal", True) or given.get("is_causal") is False:
            raise self._refuse(f"{name} attends in both directions, so it is no decoder")
        extra = sorted(key for key, value in given.items() if value is not None and key not in _KNOWN)
        if extra:
            raise self._refuse(f"{name} passes {', '.join(extra)} to attention, which paged attention does not take")
        if key.shape[2] != query.shape[2]:
            raise self._refuse(f"{name} attends to {key.shape[2]} keys for {query.shape[2]} tokens")
        window = given.get("sliding_window")
        self.calls.append(LayerCall(module, query.shape[1], key.shape[1], key.shape[3], value.shape[3], window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Refusal:
    def __init__(self, location: str, model: PreTrainedModel) -> None:
        self._prefix = f"{location}: the transformers plugin cannot run {type(model).__name__}: "

    def __call__(self, reason: str) -> ModelLoadError:
        return ModelLoadError(self._prefix + reason)


def text_config(config: PreTrainedConfig) -> Any:
    """The configuration of the decoder; that of a model with several parts is one of its sub-configurations."""
    return config.get_text_config(decoder=True)


def refuse_classifier(location: str) -> None:
    """Refuse a model with a head for scores of sequences, before its weights are read as those of a language model.

    Raises:
        ModelLoadError: Naming the architecture.
    """
    found = resolve_model(location)
    if found.kind != "hf":
        return
    try:
        config = json.loads((found.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # said by what loads the model
    architectures = (config.get("architectures") if isinstance(config, dict) else None) or []
    heads = [name for name in architectures if str(name).endswith("ForSequenceClassification")]
    if heads:
        raise ModelLoadError(
            f"{location}: the transformers plugin runs language models only, and this is {', '.join(heads)}; the "
            "native plugin serves such heads of the decoder families that it knows: set plugins.model to native"
        )


def probe(location: str, model: PreTrainedModel) -> tuple[list[LayerCall], int]:
    """Every attention layer of ``model`` in the order of its calls, and the width of its logits.

    Args:
        location: What the user named, for messages.
        model: Loaded with the attention implementation of :mod:`trivet_transformers.interface`.

    Raises:
        ModelLoadError: If the model is not decoder-only, keeps state other than keys and values, or needs more of
            attention than the attention role offers.
    """
    refuse = _Refusal(location, model)
    config = text_config(model.config)
    _check_kind(model, config, refuse)
    device = next(model.parameters()).device
    recorder = _Recorder(refuse)
    inputs = {
        "input_ids": torch.zeros(1, 2, dtype=torch.long, device=device),
        "position_ids": torch.arange(2, device=device)[None],
    }
    try:
        with torch.inference_mode():
            output = model(**inputs, use_cache=False, **{KEYWORD: recorder})
    except KeyError as exc:
        if exc.args != (KEYWORD,):
            raise
        raise refuse("it does not hand keywords down to its attention") from None
    _check_layers(recorder.calls, config, refuse)
    return recorder.calls, output.logits.shape[-1]


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """The module that computes hidden states; the model itself when there is none of its own."""
    if model.base_model is not model:
        return model.base_model
    # The prefix of Llama 4's text model is its place in the larger one; its body has the name that most have.
    body: torch.nn.Module = getattr(model, "model", model)
    return body


def head_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The module that maps hidden states to logits; None when there is none of its own."""
    return model.get_output_embeddings()  # type: ignore[no-any-return, no-untyped-call]


def spans(calls: list[LayerCall], config: Any) -> list[tuple[KVKind, int | None]]:
    """The kind of every layer and the length of its window or chunks. The layer types decide, as they do for
    transformers' own mask; without them, what each layer hands to its attention."""
    found: list[tuple[KVKind, int | None]] = []
    for call, layer_type in zip(calls, getattr(config, "layer_types", None) or [None] * len(calls), strict=False):
        window = call.window if layer_type in {None, "sliding_attention"} else None
        if layer_type == "sliding_attention":
            window = window or getattr(config, "sliding_window", None)
        elif layer_type == "chunked_attention":
            window = config.attention_chunk_size
        kind: KVKind = "chunked" if layer_type == "chunked_attention" else "sliding"
        found.append(("full", None) if window is None else (kind, window))
    return found


def _check_kind(model: PreTrainedModel, config: Any, refuse: _Refusal) -> None:
    if model.config.is_encoder_decoder:
        raise refuse("it has an encoder and a decoder; only decoder-only models are served")
    if not model._supports_attention_backend:
        raise refuse("it does not use transformers' attention interface")
    if getattr(config, "alibi", False):
        raise refuse("it biases attention by distance (ALiBi), which the attention interface does not carry")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) and not getattr(
        config, "attention_chunk_size", None
    ):
        raise refuse("it has layers of type chunked_attention, and config.json lacks attention_chunk_size")
    body = body_of(model)
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise refuse("its forward takes no position_ids")
    if body is model or head_of(model) is None:
        raise refuse("it has no separate body and head")


def _check_layers(calls: list[LayerCall], config: Any, refuse: _Refusal) -> None:
    types = list(getattr(config, "layer_types", None) or [])
    other = sorted({kind for kind in types if kind not in _LAYER_TYPES})
    if other:
        raise refuse(f"its layers of type {', '.join(other)} need more than keys and values of a window")
    expected = config.num_hidden_layers
    if len(calls) != expected:
        raise refuse(f"{len(calls)} of its {expected} layers call attention; recurrent or mixed layers are not served")
    if len({id(call.module) for call in calls}) != len(calls):
        raise refuse("layers share an attention module, so their keys cannot be told apart")
    indices = [getattr(call.module, "layer_idx", index) for index, call in enumerate(calls)]
    if indices != list(range(len(calls))):
        raise refuse(f"its attention layers are numbered {indices}")

"""The two functions that transformers calls in place of its own attention: attention itself, and the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

if TYPE_CHECKING:
    from trivet.roles import Attention, AttentionMetadata

#: name in transformers' attention and mask interfaces
NAME = "trivet"
#: keyword of a model's forward that carries the :class:`Handler` down to every attention call
KEYWORD = "trivet"


class Handler(Protocol):
    """Computes one attention call of a forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        given: dict[str, Any],
    ) -> torch.Tensor:
        """One call. ``query`` is ``[1, num_heads, T, head_dim]``, ``key`` and ``value`` ``[1, num_kv_heads, T,
        head_dim]``; returns ``[1, T, num_heads, v_head_dim]``. ``given`` holds the other keywords of
        transformers' interface."""
        ...


@dataclass(frozen=True, slots=True)
class Temperature:
    """Llama 4's factor of queries in layers without rotary embedding: ``1 + factor * log(1 + floor((p + 1) /
    interval))`` at position ``p`` (after "Scalable-Softmax Is Superior for Attention", 2025)."""

    interval: float
    factor: float

    def apply(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``query`` ``[1, num_heads, T, head_dim]`` for tokens at ``positions`` ``[T]``, in its own dtype."""
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / self.interval)) * self.factor + 1.0
        return (query * scales[:, None]).to(query.dtype)


def take_temperature(module: Any) -> Temperature | None:
    """The temperature of an attention module, which from now on leaves it to the caller: it would take the places of
    tokens in the batch for their positions."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    module.attn_temperature_tuning = False
    return Temperature(module.floor_scale, module.attn_scale)


@dataclass(frozen=True, slots=True)
class Layer:
    """How a model calls attention in one layer."""

    index: int
    window: int | None
    temperature: Temperature | None = None


class PagedHandler:
    """Sends the attention calls of one forward pass to the attention provider."""

    __slots__ = ("_attention", "_layers", "_metas", "_positions")

    def __init__(
        self,
        attention: Attention,
        layers: dict[int, Layer],
        metas: list[AttentionMetadata],
        positions: torch.Tensor,
    ) -> None:
        """``layers`` by module identity; ``metas`` by layer index; ``positions`` ``[T]`` of the tokens."""
        self._attention, self._layers, self._metas, self._positions = attention, layers, metas, positions

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        given: dict[str, Any],
    ) -> torch.Tensor:
        layer = self._layers[id(module)]
        scale = given.get("scaling")
        if layer.temperature is not None:
            query = layer.temperature.apply(query, self._positions)
        out: torch.Tensor = self._attention.forward(
            layer.index,
            query[0].transpose(0, 1),
            # Some models rotate keys in float32; the cache has one type.
            key[0].transpose(0, 1).to(value.dtype),
            value[0].transpose(0, 1),
            self._metas[layer.index],
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=layer.window,
            softcap=given.get("softcap"),
            sinks=given.get("s_aux"),
        )
        return out.unsqueeze(0)


def register() -> None:
    """Make both functions known to transformers. They hold no state, so every engine of the process shares them."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    handler: Handler = given.pop(KEYWORD)
    if attention_mask is not None:
        given["attention_mask"] = attention_mask  # the probe refuses a model that makes its own
    return handler.attend(module, query, key, value, given), None


def _mask(*args: Any, **given: Any) -> None:
    """No mask: the attention provider masks by the positions in its metadata."""

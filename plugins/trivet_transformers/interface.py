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
class Layer:
    """How a model calls attention in one layer."""

    index: int
    window: int | None


class PagedHandler:
    """Sends the attention calls of one forward pass to the attention provider."""

    __slots__ = ("_attention", "_layers", "_metas")

    def __init__(self, attention: Attention, layers: dict[int, Layer], metas: list[AttentionMetadata]) -> None:
        """``layers`` by module identity; ``metas`` by layer index."""
        self._attention, self._layers, self._metas = attention, layers, metas

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

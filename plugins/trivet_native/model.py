"""The model: common decoder families with fused matrices, in the engine's own operations."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from trivet.errors import ModelLoadError
from trivet.model_defaults import pooling_defaults
from trivet.model_source import find_model
from trivet.plan import Task
from trivet.roles.kv import LayerKVSpec
from trivet.roles.model import ForwardBatch, ForwardOutput, Model, ModelInfo
from trivet_kernels.ops import ops_for
from trivet_kernels.reference.ops import ReferenceOps
from trivet_kernels.transfer import to_device
from trivet_native.decoder import Decoder
from trivet_native.families import make_spec
from trivet_native.fields import FAMILIES
from trivet_native.fused import fused_head
from trivet_native.loading import Loader
from trivet_native.planning import plan_decoder
from trivet_native.rope import rope_table
from trivet_native.scales import cache_scales
from trivet_torch.allocator import Trimmer
from trivet_torch.dtypes import resolve_dtype
from trivet_torch.rope import context_length
from trivet_torch.weights.safetensors_dir import has_weights
from trivet_torch.weights.stored import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from trivet.context import WorkerContext
    from trivet.plan import Int32, NewRequest
    from trivet.roles import Attention, AttentionMetadata, KVLayout
    from trivet_kernels.ops import Ops
    from trivet_native.options import NativeOptions
    from trivet_native.spec import DecoderSpec, LayerSpec
    from trivet_torch.weights.stored import StoredWeights


#: logits rows up to which it is worth a look whether they are all rows
_FEW = 256


class NativeModel(Model):
    """Decoders of the families in :mod:`trivet_native.fields`.

    Matrices that multiply the same input are one, the residual stream is in the model's type, everything between
    matrix products goes through :class:`trivet_kernels.ops.Ops`, and only rows of ``logits_indices`` reach the head.
    """

    role: ClassVar[str] = "model"

    def __init__(self, context: WorkerContext, options: NativeOptions) -> None:
        self._context, self._options = context, options
        self._weights: StoredWeights | None = None
        self._trimmer = Trimmer()

    # ------------------------------------------------------------------ start

    def check(self) -> None:
        if self._options.compile and self._context.get("quantization") is not None:
            raise ModelLoadError(
                "plugins.model.compile and plugins.quantization exclude each other: what is compiled multiplies with "
                "plain weights; leave one of them out"
            )

    def plan_weights(self) -> int | None:
        """See :meth:`Model.plan_weights`."""
        config, device = self._context.config, self._context.device
        found = find_model(config.model, config.revision)
        if found is None or (found.kind == "hf" and not has_weights(found.path)):
            return None
        name = str(found.path)
        weights = open_weights(name, trust_remote_code=config.trust_remote_code)
        try:
            spec = make_spec(name, weights.config)
            return plan_decoder(
                weights,
                spec,
                dtype=resolve_dtype(config.dtype, name, device),
                device=torch.device(device),
                quantization=self._context.get("quantization"),
                plain=self._options.compile,
                scores=_classifies(weights, spec),
            )
        finally:
            weights.close()

    def load(self) -> ModelInfo:
        """See :meth:`Model.load`. Embeddings of a model on a CPU stay in its file, which is kept mapped."""
        self.check()
        config, device = self._context.config, torch.device(self._context.device)
        name = config.model if config.revision is None else f"{config.model}@{config.revision}"
        self._dtype = resolve_dtype(config.dtype, name, self._context.device)
        self._weights = weights = open_weights(name, trust_remote_code=config.trust_remote_code)
        self._spec = spec = make_spec(name, weights.config)
        location = Path(weights.location)
        pooling_type, normalizes = pooling_defaults(location) if location.is_dir() else ("last", True)
        longest = context_length(weights.config, spec.max_positions, config.max_model_len)
        self._max_len = min(longest, config.max_model_len or longest)
        self._layers = [_limited(layer, self._max_len) for layer in spec.layers]
        self._score: torch.Tensor | None = None
        self._pooling: dict[int, int] = {}
        self._scales = cache_scales(weights, len(spec.layers), spec.num_kv_heads, device)
        self._decoder = self._build(weights, device)
        self.capture_problem = self._capture_problem(device)
        self.capturable = self.capture_problem is None
        return ModelInfo(
            vocab_size=spec.vocab_size,
            max_model_len=longest,
            eos_token_ids=weights.eos_token_ids,
            num_layers=len(spec.layers),
            hidden_size=spec.hidden_size,
            dtype=self._dtype_name,
            architecture=self._architecture,
            tasks=self._tasks,
            num_labels=0 if self._score is None else len(self._score),
            problem_type=getattr(weights.config, "problem_type", None),
            pooling_type=pooling_type,
            normalizes=normalizes,
        )

    def _build(self, weights: StoredWeights, device: torch.device) -> Decoder:
        spec = self._spec
        compiled = self._options.compile
        ops: Ops = ReferenceOps() if compiled else ops_for(device)
        loader = Loader(
            weights,
            spec,
            dtype=self._dtype,
            device=device,
            quantization=self._context.get("quantization"),
            ops=ops,
            tables=[rope_table(weights.config, rope, self._max_len).to(device) for rope in spec.ropes],
            max_tokens=self._context.max_num_batched_tokens,
            plain=compiled,
        )
        embedding, blocks = loader.embedding(), [loader.block(index) for index in range(len(spec.layers))]
        norm, head = loader.final_norm(), None if self._classifies else loader.head()
        decoder = Decoder(
            spec,
            embedding,
            blocks,
            norm,
            head,
            ops,
            native_head=fused_head(head, ops, self._dtype, self._context.max_num_seqs),
            scratch=loader.scratch,
            compiled=compiled,
        )
        if self._classifies:
            self._score = loader.score_head()
        loader.finish()
        return decoder

    @property
    def _classifies(self) -> bool:
        assert self._weights is not None
        return _classifies(self._weights, self._spec)

    @property
    def _architecture(self) -> str:
        assert self._weights is not None
        return FAMILIES[self._weights.config.model_type].classifier if self._classifies else self._spec.architecture

    @property
    def _tasks(self) -> tuple[str, ...]:
        if self._score is None:
            return ("generate", "embed")
        return ("embed", "classify", "score") if len(self._score) == 1 else ("embed", "classify")

    def _capture_problem(self, device: torch.device) -> str | None:
        """See :attr:`Model.capture_problem`."""
        if device.type == "cpu":
            return "on a CPU embeddings are read from the model's file"
        if self._classifies:
            return "a classifier draws no tokens"
        if self._options.compile:
            return "plugins.model.compile is set"
        return self._decoder.capture_problem

    def kv_specs(self) -> list[LayerKVSpec]:
        spec = self._spec
        return [
            LayerKVSpec(
                index,
                layer.kind,
                spec.num_kv_heads,
                spec.head_dim,
                self._dtype_name,
                layer.window,
                needs=() if self._scales[index] is None else ("key_scale", "value_scale"),
            )
            for index, layer in enumerate(self._layers)
        ]

    def bind(self, attention: Attention, layout: KVLayout) -> None:
        self._attention = attention
        groups = {layer: group.index for group in layout.groups for layer in group.layers}
        self._groups = [groups[index] for index in range(len(self._layers))]
        # Wider types hold keys and values as they are.
        narrow = {spec.layer for spec in layout.specs if spec.dtype.startswith("fp8")}
        extras = [scale if layer in narrow else None for layer, scale in enumerate(self._scales)]
        #: what of every layer's call is the same in all steps
        self._calls: list[Callable[..., Any]] = [
            functools.partial(
                attention.forward,
                index,
                scale=self._spec.scale,
                window=layer.window,
                softcap=self._spec.softcap,
                sinks=sinks,
                extras=extra,
            )
            for index, (layer, sinks, extra) in enumerate(zip(self._layers, self._decoder.sinks, extras, strict=True))
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take; embeddings that are read from their file take none."""
        return self._decoder.weight_bytes + (0 if self._score is None else self._score.nbytes)

    def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # ------------------------------------------------------------------ a step

    def add(self, request: NewRequest) -> None:
        if request.task != Task.GENERATE:
            self._pooling[request.slot] = request.task

    def remove(self, slot: int) -> None:
        self._pooling.pop(slot, None)

    @torch.inference_mode()
    def pool(self, hidden: Any, last: Int32, slots: Int32) -> Any:
        """See :meth:`Model.pool`: ``[n, num_labels]`` in float32 where scores are asked for."""
        chosen = hidden[to_device(last.astype(np.int64), hidden.device)]
        if self._score is None or self._pooling[int(slots[0])] == Task.EMBED:
            return chosen
        return chosen.float() @ self._score.t()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if torch.is_inference_mode_enabled():  # a runner's, already
            return self._forward(batch)
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.multimodal or (batch.adapters is not None and (batch.adapters >= 0).any()):
            raise ValueError("the native model serves neither multimodal inputs nor adapters")
        for meta in batch.attention:
            self._attention.prepare(meta)
        attend = _Attend(self._calls, [batch.attention[group] for group in self._groups])
        decoder, rows = self._decoder, batch.logits_indices
        is_long = batch.input_ids.shape[0] >= Trimmer.MANY_TOKENS
        if is_long:
            decoder.release()
        residual, delta, outputs = decoder.layers(batch.input_ids, batch.positions, attend, batch.hidden_layers)
        device, num_tokens = residual.device, residual.shape[0]
        hidden = chosen = None
        if _are_all(rows, num_tokens) and not batch.wants_hidden:
            chosen = decoder.final_norm(residual, delta)
        else:
            if delta is not None:
                residual.add_(delta)
            if batch.wants_hidden:
                hidden = decoder.final_norm(residual)
                chosen = hidden[rows]
            elif rows.shape[0]:
                chosen = decoder.final_norm(residual[rows])
        del residual, delta
        if is_long and device.type == "cpu":  # logits of many rows take as much as everything before them
            decoder.release()
            self._trimmer.within(num_tokens)
        if self._score is not None:  # there is nothing to sample from
            return ForwardOutput(None, hidden, outputs)
        if chosen is not None and chosen.shape[0]:
            logits = decoder.logits(chosen)
        else:
            logits = torch.empty(0, self._spec.vocab_size, dtype=self._dtype, device=device)
        return ForwardOutput(logits, hidden, outputs)

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")


class _Attend:
    """The attention calls of one forward pass: of each layer the function, and what it takes of the step."""

    __slots__ = ("_calls", "_metas")

    def __init__(self, calls: list[Callable[..., Any]], metas: list[AttentionMetadata]) -> None:
        self._calls, self._metas = calls, metas

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return self._calls[layer](query, key, value, self._metas[layer])


def _are_all(rows: torch.Tensor, count: int) -> bool:
    """Whether ``rows`` are 0 to ``count - 1``, in order, as where every request decodes; no device is asked."""
    return rows.is_cpu and rows.shape[0] == count <= _FEW and rows.tolist() == list(range(count))


def _classifies(weights: StoredWeights, spec: DecoderSpec) -> bool:
    """Whether the model has a head for scores of sequences instead of one for tokens."""
    architectures = getattr(weights.config, "architectures", None) or [spec.architecture]
    return spec.architecture not in architectures


def _limited(layer: LayerSpec, max_len: int) -> LayerSpec:
    """The layer in a context of ``max_len`` tokens: a window as long as that hides nothing."""
    if layer.window is None or layer.window < max_len:
        return layer
    return replace(layer, kind="full", window=None)

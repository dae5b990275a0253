"""The model: common decoder families with fused matrices, in the engine's own operations."""

from __future__ import annotations

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
    from trivet.context import WorkerContext
    from trivet.plan import Int32, NewRequest
    from trivet.roles import Attention, AttentionExtras, AttentionMetadata, KVLayout
    from trivet_kernels.ops import Ops
    from trivet_native.options import NativeOptions
    from trivet_native.spec import DecoderSpec, LayerSpec
    from trivet_torch.weights.stored import StoredWeights


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
        decoder = Decoder(
            spec,
            loader.embedding(),
            [loader.block(index) for index in range(len(spec.layers))],
            loader.final_norm(),
            None if self._classifies else loader.head(),
            ops,
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
        self._extras = [scale if layer in narrow else None for layer, scale in enumerate(self._scales)]

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

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.multimodal or (batch.adapters is not None and (batch.adapters >= 0).any()):
            raise ValueError("the native model serves neither multimodal inputs nor adapters")
        for meta in batch.attention:
            self._attention.prepare(meta)
        metas = [batch.attention[group] for group in self._groups]
        attend = _Attend(
            self._attention,
            metas,
            self._layers,
            self._spec.scale,
            self._spec.softcap,
            self._decoder.sinks,
            self._extras,
        )
        residual, outputs = self._decoder.body(batch.input_ids, batch.positions, attend, batch.hidden_layers)
        rows = batch.logits_indices
        hidden = None
        if batch.wants_hidden:
            hidden = self._decoder.final_norm(residual)
            chosen = hidden[rows]
        elif len(rows):
            chosen = self._decoder.final_norm(residual[rows])
        device, num_tokens = residual.device, len(residual)
        del residual
        if device.type == "cpu":  # logits of many rows take as much as everything before them
            self._trimmer.within(num_tokens)
        if self._score is not None:  # there is nothing to sample from
            return ForwardOutput(None, hidden, outputs)
        if len(rows):
            logits = self._decoder.logits(chosen)
        else:
            logits = torch.empty(0, self._spec.vocab_size, dtype=self._dtype, device=device)
        return ForwardOutput(logits, hidden, outputs)

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")


class _Attend:
    """The attention calls of one forward pass."""

    __slots__ = ("_attention", "_extras", "_layers", "_metas", "_scale", "_sinks", "_softcap")

    def __init__(
        self,
        attention: Attention,
        metas: list[AttentionMetadata],
        layers: list[LayerSpec],
        scale: float,
        softcap: float | None,
        sinks: list[torch.Tensor | None],
        extras: list[AttentionExtras | None],
    ) -> None:
        self._attention, self._metas, self._layers = attention, metas, layers
        self._scale, self._softcap, self._sinks, self._extras = scale, softcap, sinks, extras

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return self._attention.forward(
            layer,
            query,
            key,
            value,
            self._metas[layer],
            scale=self._scale,
            window=self._layers[layer].window,
            softcap=self._softcap,
            sinks=self._sinks[layer],
            extras=self._extras[layer],
        )


def _classifies(weights: StoredWeights, spec: DecoderSpec) -> bool:
    """Whether the model has a head for scores of sequences instead of one for tokens."""
    architectures = getattr(weights.config, "architectures", None) or [spec.architecture]
    return spec.architecture not in architectures


def _limited(layer: LayerSpec, max_len: int) -> LayerSpec:
    """The layer in a context of ``max_len`` tokens: a window as long as that hides nothing."""
    if layer.window is None or layer.window < max_len:
        return layer
    return replace(layer, kind="full", window=None)

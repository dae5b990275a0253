"""The model: transformers' forward pass over flattened tokens, with paged attention in place of its own."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trivet.errors import ModelLoadError
from trivet.model_defaults import pooling_defaults
from trivet.model_source import find_model
from trivet.roles.kv import KVKind, LayerKVSpec
from trivet.roles.model import ForwardBatch, ForwardOutput, Model, ModelInfo
from trivet_torch.dtypes import resolve_dtype
from trivet_torch.rope import context_length, fix_frequencies
from trivet_torch.weights import load_causal_lm
from trivet_transformers.interface import KEYWORD, NAME, Layer, PagedHandler, register, take_temperature
from trivet_transformers.planning import plan_causal_lm
from trivet_transformers.probe import body_of, head_of, probe, refuse_classifier, spans, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trivet.context import WorkerContext
    from trivet.roles import Attention, KVLayout

logger = logging.getLogger("trivet.model")


class TransformersModel(Model):
    """Any decoder-only model of transformers that goes through the attention interface.

    All rows of a step are one sequence ``[1, T]`` to transformers; which token sees which is the attention provider's
    business. Only the rows of ``logits_indices`` reach the LM head, and whatever the model does to logits behind its
    head (scaling, soft caps) is done to them.
    """

    role: ClassVar[str] = "model"

    def __init__(self, context: WorkerContext, options: object = None) -> None:
        self._context = context
        self._hidden: torch.Tensor | None = None
        self._head_rows: torch.Tensor | None = None

    # ------------------------------------------------------------------ start

    def check(self) -> None:
        if self._context.get("quantization") is None:
            return
        remedy = "set plugins.model to native if it serves this model, or leave plugins.quantization out"
        use = " and ".join(repr(name) for name, _ in self._context.selected("quantization"))
        if reasons := "; ".join(f"{name}: {reason}" for name, reason in self._passed_over()):
            remedy = f"leave plugins.quantization out. Of the models that could, auto had to pass over {reasons}"
        raise ModelLoadError(
            f"{self._location}: plugins.quantization is {use}, and the model plugin transformers does not quantise "
            f"weights: {remedy}"
        )

    def plan_weights(self) -> int | None:
        config = self._context.config
        found = find_model(config.model, config.revision)
        if found is None:
            return None
        register()
        dtype = resolve_dtype(config.dtype, str(found.path), self._context.device)
        return plan_causal_lm(found, dtype, trust_remote_code=config.trust_remote_code)

    def load(self) -> ModelInfo:
        register()
        self.check()
        config, device, name = self._context.config, self._context.device, self._location
        refuse_classifier(name)
        self._dtype = resolve_dtype(config.dtype, name, device)
        self._model, loaded = load_causal_lm(
            name,
            dtype=self._dtype,
            device=device,
            attn_implementation=NAME,
            trust_remote_code=config.trust_remote_code,
        )
        self._calls, vocab_size = probe(name, self._model)
        decoder = text_config(self._model.config)
        longest = getattr(decoder, "max_position_embeddings", None) or config.max_model_len
        if longest is None:
            raise ModelLoadError(
                f"{name}: config.json does not say how many positions the model has; set max_model_len"
            )
        longest = context_length(decoder, longest, config.max_model_len)
        self._max_len = min(longest, config.max_model_len or longest)
        fix_frequencies(name, self._model, decoder, self._max_len)
        # A window as long as the context hides nothing.
        self._spans: list[tuple[KVKind, int | None]] = [
            ("full", None) if window is None or window >= self._max_len else (kind, window)
            for kind, window in spans(self._calls, decoder)
        ]
        self._layers = {
            id(call.module): Layer(index, window, take_temperature(call.module))
            for index, (call, (_, window)) in enumerate(zip(self._calls, self._spans, strict=True))
        }
        folder = loaded.location.path
        pooling_type, normalizes = pooling_defaults(folder) if loaded.location.kind == "hf" else ("last", True)
        self._install_hooks()
        self._say_what_auto_passed_over()
        return ModelInfo(
            vocab_size=vocab_size,
            max_model_len=longest,
            eos_token_ids=tuple(loaded.eos_token_ids),
            num_layers=len(self._calls),
            hidden_size=decoder.hidden_size,
            dtype=str(self._dtype).removeprefix("torch."),
            architecture=type(self._model).__name__,
            tasks=("generate", "embed"),
            pooling_type=pooling_type,
            normalizes=normalizes,
        )

    def kv_specs(self) -> list[LayerKVSpec]:
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            LayerKVSpec(
                layer=index,
                kind=kind,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.head_dim,
                dtype=dtype,
                window=window,
                v_head_dim=None if call.v_head_dim == call.head_dim else call.v_head_dim,
            )
            for index, (call, (kind, window)) in enumerate(zip(self._calls, self._spans, strict=True))
        ]

    def bind(self, attention: Attention, layout: KVLayout) -> None:
        self._attention = attention
        groups = {layer: group.index for group in layout.groups for layer in group.layers}
        self._groups = [groups[index] for index in range(len(self._calls))]

    @property
    def weight_bytes(self) -> int:
        tensors = {
            t.data_ptr(): t.numel() * t.element_size() for t in (*self._model.parameters(), *self._model.buffers())
        }
        return sum(tensors.values())

    def shutdown(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()

    # ------------------------------------------------------------------ a step

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.multimodal or (batch.adapters is not None and (batch.adapters >= 0).any()):
            raise ValueError("the transformers model serves neither multimodal inputs nor adapters")
        if batch.hidden_layers:
            raise ValueError("the transformers model gives out its last hidden states only, not those of single layers")
        for meta in batch.attention:
            self._attention.prepare(meta)
        metas = [batch.attention[group] for group in self._groups]
        given: dict[str, Any] = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
            KEYWORD: PagedHandler(self._attention, self._layers, metas, batch.positions),
        }
        rows: torch.Tensor = batch.logits_indices
        try:
            if len(rows) == 0:
                body_of(self._model)(**given)
                logits = None
            else:
                if self._takes_rows:
                    given["logits_to_keep"] = rows
                else:
                    self._head_rows = rows
                logits = self._model(**given).logits[0]
            hidden = self._hidden[0] if batch.wants_hidden and self._hidden is not None else None
        finally:
            self._hidden = self._head_rows = None
        if logits is None:
            logits = torch.empty(0, 0, dtype=self._dtype, device=batch.input_ids.device)
        return ForwardOutput(logits, hidden)

    # ------------------------------------------------------------------ parts

    @property
    def _location(self) -> str:
        """What the user named, for messages."""
        config = self._context.config
        return config.model if config.revision is None else f"{config.model}@{config.revision}"

    def _passed_over(self) -> list[tuple[str, str]]:
        """Models that ``use: auto`` would have taken rather than this one, and why they cannot serve."""
        registry: Any = getattr(self._context, "registry", None)  # not in contexts that tests make
        candidates = [] if registry is None else registry.selection("model").candidates
        return [(candidate.offer.name, candidate.reason) for candidate in candidates if candidate.rank is None]

    def _say_what_auto_passed_over(self) -> None:
        """Where ``use: auto`` chose this model for want of a faster one, log why: it makes a difference in speed."""
        for name, reason in self._passed_over():
            logger.warning(
                "model: the transformers library computes %s; not %s: %s", type(self._model).__name__, name, reason
            )

    def _install_hooks(self) -> None:
        """Keep what the body returns, and let only the wanted rows into a head that cannot choose them itself."""
        model: PreTrainedModel = self._model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._hooks = [body_of(model).register_forward_hook(self._keep_hidden)]
        if not self._takes_rows:
            head = head_of(model)
            assert head is not None, "the probe refuses models without a head"
            self._hooks.append(head.register_forward_pre_hook(self._choose_rows))

    def _keep_hidden(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def _choose_rows(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = args
        return (hidden if self._head_rows is None else hidden[:, self._head_rows], *rest)

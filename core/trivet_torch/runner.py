"""The runner in PyTorch: devices, memory and tensors for the step logic of :class:`trivet.worker.StepRunner`."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivet.errors import CacheMemoryError, ModelLoadError
from trivet.plan import Ragged
from trivet.roles import DraftInputs, MemoryEstimate
from trivet.worker import PersistentBatch, StepRunner, forward_batch, prepare_inputs
from trivet_kernels.transfer import to_device
from trivet_schemas.options import format_size
from trivet_schemas.sampling import SamplingParams
from trivet_torch.allocator import Trimmer, loading
from trivet_torch.graphs import CudaBackend, DecodeGraphs, GraphBackend, default_sizes
from trivet_torch.memory import available_bytes, device_memory, graph_bytes, workspace_bytes
from trivet_torch.options import RunnerOptions
from trivet_torch.trial import largest_step, measure, trial_layout

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.plan import StepPlan
    from trivet.result import StepResult
    from trivet.roles import ForwardBatch, ForwardOutput, KVLayout, ModelInfo, WorkerInfo

logger = logging.getLogger("trivet.runner")


def resolve_device(name: str) -> torch.device:
    """The torch device for a configured name; ``auto`` is the first CUDA device, or the CPU.

    Raises:
        ModelLoadError: If torch does not know the name, or has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ModelLoadError(f"device: torch does not know {name!r}: {exc}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device: {name!r} was asked for, but torch finds no CUDA device; use device: cpu")
    if device.type != "cpu":
        try:
            torch.zeros(1, device=device).item()  # what is missing shows in use only, and differs by kind of device
        except (RuntimeError, AssertionError) as exc:
            reason = re.split(r"\n|\. ", str(exc), maxsplit=1)[0]  # torch adds lists of backends
            raise ModelLoadError(f"device: torch cannot compute on {name!r}: {reason}; use device: cpu") from None
    return device


class TorchRunner(StepRunner):
    """One worker's share of a step, in PyTorch."""

    def __init__(self, context: WorkerContext, options: RunnerOptions) -> None:
        super().__init__(context)
        self._options = options
        self._graphs: DecodeGraphs | None = None
        self._trimmer = Trimmer()
        self._inference = torch.inference_mode()  # steps come one after the other, so one will do for all
        self.grammar_threads = options.grammar_threads

    def load(self) -> WorkerInfo:
        """See :meth:`trivet.roles.Runner.load`. With ``profile`` the largest step is carried out on a cache of one
        block, and what it took is kept free.

        Raises:
            CacheMemoryError: If the largest step does not fit into what the weights leave.
        """
        with loading():
            info = super().load()
        if self._profiles:
            workspace = self._measure_step(info)
            info = replace(info, workspace_bytes=workspace, available_bytes=max(0, info.available_bytes - workspace))
        self._info = info
        return info

    def estimate(self, model: ModelInfo, weight_bytes: int, max_num_batched_tokens: int) -> MemoryEstimate:
        """See :meth:`trivet.roles.Runner.estimate`."""
        self._context.device = self._prepare_device()
        workspace = workspace_bytes(model, self._context.max_num_seqs, max_num_batched_tokens)
        share = self._options.gpu_memory_utilization
        free, total = device_memory(self._device)
        on_gpu = self._device.type == "cuda"
        return MemoryEstimate(
            device=self._context.device,
            free_bytes=max(0, int(total * share) - (total - free)) if on_gpu else free,
            workspace_bytes=workspace,
            available_bytes=available_bytes(
                self._device,
                workspace=workspace if on_gpu or self._profiles else 0,
                gpu_share=share,
                cpu_share=self._options.cpu_memory_share,
                to_load=weight_bytes,
            ),
        )

    def allocate(self, layout: KVLayout) -> None:
        """See :meth:`trivet.roles.Runner.allocate`; records decode steps as graphs where the device has them, and logs
        what the memory goes to."""
        super().allocate(layout)
        self._graphs = self._make_graphs(layout, self._graph_sizes)
        if self._graphs is None:
            self._say_why_not_recorded()
        else:
            self._record_all(self._graphs)
        measured = self._info.workspace_bytes
        workspace, how = (self._estimate(self._info.model), "estimated") if measured is None else (measured, "measured")
        logger.info(
            "%s: weights %s, workspace %s (%s), KV cache %s in %d blocks",
            self._device,
            format_size(self._info.weight_bytes),
            format_size(workspace),
            how,
            format_size(layout.num_bytes),
            max((storage.num_blocks - 1 for storage in layout.storage), default=0),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """See :meth:`trivet.roles.Runner.execute`."""
        if self._device.type == "cpu":
            self._trimmer.begins(plan.num_tokens)
        with self._inference:
            return super().execute(plan)

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self._graphs is not None and (output := self._graphs.forward(batch)) is not None:
            return output
        return super()._forward(batch)

    def _graph_backend(self) -> GraphBackend | None:
        """What records graphs on the device, None where nothing does."""
        return CudaBackend(self._device) if self._device.type == "cuda" else None

    @property
    def _graph_sizes(self) -> list[int]:
        limit = self._context.max_num_seqs
        given = self._options.cudagraph_capture_sizes
        return default_sizes(limit) if given is None else sorted({min(size, limit) for size in given})

    def _make_graphs(self, layout: KVLayout, sizes: list[int]) -> DecodeGraphs | None:
        """Graphs yet to be recorded; None where there are none."""
        backend = self._graph_backend()
        if backend is None or self._options.enforce_eager or not sizes or self._not_recordable() is not None:
            return None
        return DecodeGraphs(
            backend,
            self._model,
            self._attention,
            layout,
            sizes=sizes,
            max_model_len=self._context.max_model_len,
            device=self._device,
        )

    def _not_recordable(self) -> str | None:
        """What stands against recording decode steps."""
        if self._relays:
            return "a connector or cache tier is told of every layer"
        model, attention = self._model, self._attention
        lacking = []
        if not model.capturable:
            because = "" if model.capture_problem is None else f" ({model.capture_problem})"
            lacking.append(f"model {type(model).__name__}{because}")
        if not attention.capturable:
            lacking.append(f"attention {type(attention).__name__}")
        return f"{' and '.join(lacking)} cannot be recorded" if lacking else None

    def _say_why_not_recorded(self) -> None:
        """A warning if graphs were asked for, else a line in the log; nothing where nobody would expect any."""
        options = self._options
        if options.enforce_eager or options.cudagraph_capture_sizes == []:
            return
        if self._graph_backend() is None:
            asked, problem = options.cudagraph_capture_sizes is not None, f"device {self._device} has none"
            if not asked:
                return
        else:
            asked = bool(options.model_fields_set & {"enforce_eager", "cudagraph_capture_sizes"})
            problem = self._not_recordable() or "no batch size is left to record"
        logger.log(logging.WARNING if asked else logging.INFO, "decode steps run without CUDA graphs: %s", problem)

    def _record_all(self, graphs: DecodeGraphs) -> None:
        try:
            taken = self._record(graphs)
        except torch.OutOfMemoryError as exc:
            raise CacheMemoryError(
                f"recording decode steps as CUDA graphs takes more than weights and KV cache leave of the memory of "
                f"{self._device}; set gpu_memory_utilization lower, cudagraph_capture_sizes shorter, or enforce_eager: "
                f"{exc}"
            ) from exc
        kept = self._estimated_graph_bytes(self._info.model)
        if not self._profiles and taken > kept:
            logger.warning(
                "CUDA graphs took %s, and %s were kept for them: with profile: true what they take is measured",
                format_size(taken),
                format_size(kept),
            )

    @torch.inference_mode()
    def _record(self, graphs: DecodeGraphs) -> int:
        return graphs.capture()

    def _estimated_graph_bytes(self, info: ModelInfo) -> int:
        if self._graph_backend() is None or self._options.enforce_eager or self._not_recordable() is not None:
            return 0
        return graph_bytes(info, self._graph_sizes)

    def _prepare_device(self) -> str:
        self._device = resolve_device(self._context.device)
        return str(self._device)

    def _available_bytes(self, info: ModelInfo) -> int:
        # What is measured is taken off later; on a CPU the estimate is part of what the share leaves free.
        estimated = self._device.type == "cuda" and not self._profiles
        graphs = 0 if self._profiles else self._estimated_graph_bytes(info)
        return available_bytes(
            self._device,
            workspace=(self._estimate(info) if estimated else 0) + graphs,
            gpu_share=self._options.gpu_memory_utilization,
            cpu_share=self._options.cpu_memory_share,
        )

    @property
    def _profiles(self) -> bool:
        wanted = self._options.profile
        return self._device.type == "cuda" if wanted == "auto" else wanted

    def _estimate(self, info: ModelInfo) -> int:
        return workspace_bytes(info, self._context.max_num_seqs, self._context.max_num_batched_tokens)

    @torch.inference_mode()
    def _measure_step(self, info: WorkerInfo) -> int:
        context = self._context
        layout = trial_layout(info.specs, info.support)
        # The costliest way to draw: a sort of every row.
        fields = {"temperature": 1.0, "top_p": 0.5, "min_p": 0.01, "seed": 0}
        plan = largest_step(
            layout,
            max_num_seqs=context.max_num_seqs,
            max_num_batched_tokens=context.max_num_batched_tokens,
            max_model_len=context.max_model_len,
            vocab_size=info.model.vocab_size,
            num_drafts=info.draft_tokens,
            params=SamplingParams(**{k: v for k, v in fields.items() if k in info.sampling_fields}),
        )
        try:
            context.layout = layout
            self._attention.allocate(layout)
            self._model.bind(self._attention, layout)
            self._drafters.bind(self._attention, layout)
            for group in range(len(layout.groups)):
                self._attention.zero_blocks(group, self._tensor(np.array([0, 1], np.int32)))
            taken = measure(self._device, lambda: self._try_step(plan, layout))
            graphs = self._graph_bytes(layout)
        except torch.OutOfMemoryError as exc:
            raise CacheMemoryError(
                f"a step of {context.max_num_batched_tokens} tokens and {context.max_num_seqs} requests does not fit "
                f"into what the weights leave of the memory of {self._device}; set max_num_batched_tokens or "
                f"max_num_seqs of the scheduler lower: {exc}"
            ) from exc
        return (self._estimate(info.model) if taken is None else taken) + graphs

    def _graph_bytes(self, layout: KVLayout) -> int:
        """What all graphs will take: recorded on the trial's cache, the largest shows what their common memory is, the
        second largest what each further one adds."""
        sizes = self._graph_sizes
        first = self._make_graphs(layout, sizes[-2:])
        if first is None:
            return 0
        largest = self._make_graphs(layout, sizes[-1:])
        assert largest is not None
        alone, both = self._record(largest), self._record(first)
        return alone + max(0, both - alone) * (len(sizes) - 1)

    def _try_step(self, plan: StepPlan, layout: KVLayout) -> None:
        """Compute, draw and draft without anybody's hooks: these are nobody's requests."""
        context = self._context
        sizes = [group.block_size for group in layout.groups]
        batch = PersistentBatch(context.max_num_seqs, context.max_model_len, sizes)
        batch.apply(plan)
        listeners: list[Any] = [self._model, self._sampler, self._drafters]
        told: list[tuple[Any, int]] = []
        try:
            for request in plan.new:
                for listener in listeners:
                    listener.add(request)
                    told.append((listener, request.slot))
            inputs = prepare_inputs(batch, plan, np.zeros(plan.num_rows, np.bool_))
            hidden, layers = self._drafters.wants_hidden, self._drafters.hidden_layers
            step = forward_batch(plan, inputs, batch, self._tensor, wants_hidden=hidden, hidden_layers=layers)
            output = self._model.forward(step)
            if output.logits is None:
                return  # a pipeline stage before the last one
            rows = inputs.sampling(batch)
            self._sampler.sample(output.logits, rows)
            if self._drafters:
                drawn = Ragged.from_rows([[0]] * plan.num_rows)
                batch.set_known(plan.slots, inputs.known, drawn)
                self._drafters.propose(
                    DraftInputs(
                        plan.slots,
                        plan.draft_k,
                        batch.tokens,
                        batch.lengths,
                        step,
                        output,
                        accepted=drawn,
                        num_drafts=plan.num_drafts,
                        tables=batch.tables,
                        block_sizes=batch.block_sizes,
                    )
                )
        finally:
            for listener, slot in told:
                listener.remove(slot)

    def _tensor(self, array: Any) -> torch.Tensor:
        return to_device(array, self._device)

    def _floats(self, values: Any) -> Any:
        return values.float().cpu().numpy()

"""The runner in PyTorch: devices, memory and tensors for the step logic of :class:`trivet.worker.StepRunner`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivet.errors import ModelLoadError
from trivet.worker import StepRunner
from trivet_torch.memory import available_bytes
from trivet_torch.options import RunnerOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet.context import WorkerContext
    from trivet.plan import StepPlan
    from trivet.result import StepResult
    from trivet.roles import ModelInfo


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A tensor of the array's type on the device; on a CPU it shares the array's memory where that is writable."""
    if not array.flags.writeable:
        array = array.copy()  # a view of a message; torch has no read-only tensors
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


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
        self.grammar_threads = options.grammar_threads

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """See :meth:`trivet.roles.Runner.execute`."""
        return super().execute(plan)

    def _prepare_device(self) -> str:
        self._device = resolve_device(self._context.device)
        return str(self._device)

    def _available_bytes(self, info: ModelInfo) -> int:
        return available_bytes(
            self._device,
            info,
            self._context.max_num_seqs,
            self._context.max_num_batched_tokens,
            gpu_share=self._options.gpu_memory_utilization,
            cpu_share=self._options.cpu_memory_share,
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return to_device(array, self._device)

    def _floats(self, values: Any) -> Any:
        return values.float().cpu().numpy()

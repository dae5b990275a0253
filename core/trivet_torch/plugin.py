"""Plugin ``torch_runner``: the worker's side of a step in PyTorch."""

from __future__ import annotations

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the runner."""
    return [
        Provider(
            role="runner",
            name="torch_runner",
            factory="trivet_torch.runner:TorchRunner",
            options="trivet_torch.options:RunnerOptions",
            summary="Batch state, input preparation, phases and results in PyTorch, on CPU or an accelerator.",
        )
    ]

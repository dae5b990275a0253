"""Options of the runner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trivet_schemas.options import Options, flat


class RunnerOptions(Options):
    """Options of ``torch_runner``."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, json_schema_extra=flat("gpu_memory_utilization"))
    """Share of an accelerator's memory that weights, workspace and KV cache may take together."""
    cpu_memory_share: float = Field(0.5, gt=0, le=1)
    """Share of the RAM free after loading that the KV cache may take on a CPU, when the cache names no size."""
    profile: Literal["auto"] | bool = "auto"
    """Whether the largest step is tried out at the start, to measure the memory that it takes: `auto` does so on
    accelerators only, since it takes seconds on a CPU. Without it the workspace is estimated on an accelerator, and on
    a CPU it is part of what `cpu_memory_share` leaves free."""
    grammar_threads: int = Field(2, ge=1)
    """Most structured outputs that are compiled at once."""

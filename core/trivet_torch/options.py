"""Options of the runner."""

from __future__ import annotations

from typing import Annotated, Literal

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
    accelerators only, since it takes seconds on a CPU. Without it the workspace and what CUDA graphs take are estimated
    on an accelerator; on a CPU the workspace is part of what `cpu_memory_share` leaves free."""
    enforce_eager: bool = Field(False, json_schema_extra=flat("enforce_eager"))
    """Launch every kernel of a decode step by itself instead of replaying CUDA graphs: starts faster, decodes slower.
    Without effect on a CPU."""
    cudagraph_capture_sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, json_schema_extra=flat("cudagraph_capture_sizes")
    )
    """Batch sizes whose decode steps are recorded as CUDA graphs; smaller batches are padded to the next one, larger
    ones are not replayed. By default 1, 2, 4 and every eighth size, up to `max_num_seqs` or 512. With sizes (or with
    `enforce_eager: false`) given, what cannot be recorded is a warning that names the part."""
    grammar_threads: int = Field(2, ge=1)
    """Most structured outputs that are compiled at once."""

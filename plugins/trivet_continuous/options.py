"""Options of the ``continuous`` scheduler."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivet_schemas.options import Options, flat


class ContinuousOptions(Options):
    """Continuous batching with a token budget."""

    max_num_seqs: Annotated[int, Field(ge=1)] = Field(256, json_schema_extra=flat("max_num_seqs"))
    """Most requests that run at once."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = Field(2048, json_schema_extra=flat("max_num_batched_tokens"))
    """Token budget of a step; a longer prompt is computed in chunks."""
    max_num_queued_reqs: Annotated[int, Field(ge=1)] | None = Field(None, json_schema_extra=flat("max_num_queued_reqs"))
    """Most requests that wait; a further one is refused as overload. By default there is no bound."""
    policy: str = Field("fcfs", json_schema_extra=flat("scheduling_policy"))
    """Order of the waiting queue: the name of a `scheduling_policy` component."""
    victim: str = "newest"
    """Who is preempted when memory is short: the name of a `victim_policy` component."""

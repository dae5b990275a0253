"""Options of the ``inline`` executor."""

from __future__ import annotations

from pydantic import Field

from trivet_schemas.options import Options, flat


class InlineOptions(Options):
    """One worker in the engine's process."""

    async_scheduling: bool = Field(False, json_schema_extra=flat("async_scheduling"))
    """Whether the worker has a thread of its own, so that the next step is planned, and the one before committed and
    turned into text, while a step computes. Worth it where the processor that plans is not the one that computes."""

"""Options of the ``static`` scheduler."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivet_schemas.options import Options, flat


class StaticOptions(Options):
    """The classic batch."""

    max_num_seqs: Annotated[int, Field(ge=1)] = Field(32, json_schema_extra=flat("max_num_seqs"))
    """Requests in a batch."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = Field(2048, json_schema_extra=flat("max_num_batched_tokens"))
    """Token budget of a step; a longer prompt is computed in chunks."""

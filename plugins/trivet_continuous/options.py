"""Options of the ``continuous`` scheduler."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from trivet_schemas.options import Options, flat

_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


class ContinuousOptions(Options):
    """Continuous batching with a token budget."""

    max_num_seqs: _Count = Field(256, json_schema_extra=flat("max_num_seqs"))
    """Most requests that run at once."""
    max_num_batched_tokens: _Count = Field(2048, json_schema_extra=flat("max_num_batched_tokens"))
    """Token budget of a step; a longer prompt is computed in chunks."""
    long_prefill_token_threshold: _Count | None = Field(None, json_schema_extra=flat("long_prefill_token_threshold"))
    """Most tokens of one prompt in a step, so that a long prompt leaves room for those behind it. By default a prompt
    may take the whole budget."""
    max_num_mixed_prefill_tokens: _Count | None = Field(None, json_schema_extra=flat("max_num_mixed_prefill_tokens"))
    """Most prompt tokens in a step that also decodes, so that running outputs keep their pace while a prompt is
    computed. By default there is no bound but the token budget."""
    target_inter_token_latency: _Seconds | None = Field(None, json_schema_extra=flat("target_inter_token_latency"))
    """Seconds that a step should take which decodes: the prompt tokens in it are as many as fit, by the duration of
    the steps before."""
    min_num_mixed_prefill_tokens: _Count = 8
    """Prompt tokens that a step has in any case while `target_inter_token_latency` is set."""
    max_num_queued_reqs: _Count | None = Field(None, json_schema_extra=flat("max_num_queued_reqs"))
    """Most requests that wait; a further one is refused as overload. By default there is no bound."""
    max_num_queued_tokens: _Count | None = Field(None, json_schema_extra=flat("max_num_queued_tokens"))
    """Most prompt tokens of all requests that wait; one that would make it more is refused as overload, unless none
    waits. By default there is no bound."""
    max_queue_seconds: _Seconds | None = Field(None, json_schema_extra=flat("max_queue_seconds"))
    """How long a request waits to run for the first time before it ends with an error. By default there is no bound."""
    max_recomputed_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """While more than this share of all tokens is computed again after preemptions, requests are admitted only with
    room for the longest that they and all running ones may become. 1: never mind."""
    policy: str | dict[str, Any] = Field("fcfs", json_schema_extra=flat("scheduling_policy"))
    """Order of the waiting queue: the name of a `scheduling_policy` component, or `{use: NAME, ...}` with options of
    its own."""
    victim: str | dict[str, Any] = Field("newest", json_schema_extra=flat("victim_policy"))
    """Who is preempted when memory is short: the name of a `victim_policy` component, or `{use: NAME, ...}` with
    options of its own."""

    @field_validator("long_prefill_token_threshold", "max_num_mixed_prefill_tokens")
    @classmethod
    def _within_the_budget(cls, value: int | None, info: ValidationInfo) -> int | None:
        budget = info.data.get("max_num_batched_tokens")  # absent if it is wrong itself
        if value is not None and budget is not None and value > budget:
            raise ValueError(f"must not exceed max_num_batched_tokens={budget}, or it has no effect, got {value}")
        return value

    @field_validator("policy", "victim")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if type(value) is dict and type(value.get("use")) is not str:
            raise ValueError(f"must name a policy: {{use: NAME, ...}}, got {value!r}")
        return value

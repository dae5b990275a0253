"""Role ``frontend``: ways in, such as an HTTP server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.model import ModelInfo
    from trivet.roles.scheduler import Wait
    from trivet.roles.tokenizer import Tokenizer
    from trivet.timeline import RequestTimeline
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
    from trivet_schemas.prompts import PromptType
    from trivet_schemas.sampling import PoolingParams, SamplingParams


class EngineClient(Protocol):
    """What a front end may ask of an engine, which may live in its process (:class:`trivet.AsyncEngine`), in another
    one, or be several. Everything that goes in and out is plain data; errors are those of :mod:`trivet.errors`."""

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The configuration."""
        ...

    @property
    def model(self) -> ModelInfo:
        """Facts about the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or one like it in this process."""
        ...

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs for a prompt as they come; leaving the iteration early aborts the request."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As :meth:`generate`, for a conversation."""
        ...

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """The pooled output of a prompt."""
        ...

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; unknown ids have no effect."""
        ...

    async def explain(self, request_id: str) -> Wait | None:
        """Why a request does not advance."""
        ...

    async def timeline(self, request_id: str) -> RequestTimeline | None:
        """What a request lived through, while it is unfinished and for some time after its end."""
        ...

    async def check_health(self) -> None:
        """Raise :class:`trivet.errors.EngineUnhealthyError` unless requests are taken."""
        ...


class Frontend(Role):
    """Runs on the event loop of ``trivet serve`` until cancelled."""

    role: ClassVar[str] = "frontend"

    @abstractmethod
    async def serve(self, engine: EngineClient) -> None:
        """Serve requests; returns when the front end ends by itself, is cancelled to stop it. In the engine's own
        process ``engine`` is a :class:`trivet.AsyncEngine`, which can do more."""

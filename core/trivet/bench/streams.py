"""An :class:`~trivet.AsyncEngine` for benchmarks that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from trivet.async_engine import AsyncEngine
from trivet.errors import RequestError

if TYPE_CHECKING:
    from trivet.engine import Engine
    from trivet.roles.tokenizer import Tokenizer
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.outputs import RequestOutput
    from trivet_schemas.sampling import SamplingParams


class Streams:
    """What benchmarks need of an :class:`~trivet.LLM`; every request is a stream of its own, on one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the engine.

        Raises:
            trivet.errors.TrivetError: As :class:`trivet.Engine` does.
        """
        self._runner = asyncio.Runner()
        self._async = AsyncEngine(config)
        try:
            self._runner.run(self._async.start())
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._runner.run(self._async.shutdown())
        self._runner.close()

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._async.engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises RequestError when the engine has none."""
        if self._async.tokenizer is None:
            raise RequestError("this engine has no tokenizer")
        return self._async.tokenizer

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: Callable[..., Any] | bool = False,
    ) -> list[RequestOutput]:
        """The last outputs, in the order of the prompts; see :meth:`trivet.LLM.generate`."""
        bar = use_tqdm() if callable(use_tqdm) else None
        return self._runner.run(self._all(prompts, params, None if bar is None else bar.update))

    async def _all(
        self,
        prompts: Sequence[Mapping[str, Any]],
        params: Sequence[SamplingParams],
        ended: Callable[[int], None] | None,
    ) -> list[RequestOutput]:
        async def last(prompt: Any, own: SamplingParams) -> RequestOutput:
            async for output in self._async.generate(prompt, own):
                found = output
            if ended is not None:
                ended(1)
            return found

        try:
            async with asyncio.TaskGroup() as group:  # cancels the others when one is refused
                tasks = [group.create_task(last(prompt, own)) for prompt, own in zip(prompts, params, strict=True)]
        except ExceptionGroup as raised:
            raise raised.exceptions[0] from None
        return [task.result() for task in tasks]

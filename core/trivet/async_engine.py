"""Serving: an engine for many concurrent consumers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from trivet.beam_search import BeamSearch, step_params, whole_params
from trivet.conversations import check_conversation, template_variables
from trivet.engine_thread import EngineThread
from trivet.errors import EngineUnhealthyError, RequestError
from trivet.output.stage import Output, OutputStage
from trivet.output.stream import Stream
from trivet.output.thread import OutputThread
from trivet.submission import AnyParams, Preparer, Submission, default_sampling_params, eos_token_ids
from trivet_schemas.outputs import BeamSearchOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from trivet_schemas.sampling import BeamSearchParams, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from trivet.engine import Engine
    from trivet.roles.model import ModelInfo
    from trivet.roles.scheduler import Wait
    from trivet.roles.tokenizer import Tokenizer
    from trivet.state import Request
    from trivet.timeline import RequestTimeline
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.prompts import PromptType


_T = TypeVar("_T")


class AsyncEngine:
    """An engine that serves any number of concurrent requests, from any number of event loops and threads.

    ::

        async with AsyncEngine("config.yaml") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(output_kind="delta")):
                print(output.outputs[0].text, end="")

    The engine runs on its own thread and sleeps while there is nothing to do; text is made on another thread. A
    consumer that is slower than the model gets fewer, larger outputs.
    """

    def __init__(self, config: EngineConfig | Mapping[str, Any] | str | Path, plugins: Sequence[object] = ()) -> None:
        """Prepare; nothing is loaded before :meth:`start`.

        Args:
            config: A YAML file, a mapping like one, or a configuration.
            plugins: Plugin objects, as for :class:`trivet.Engine`.
        """
        self._make = lambda: _make_engine(config, plugins)
        self._thread: EngineThread | None = None
        self._output: OutputThread | None = None
        self._preparer: Preparer | None = None
        self._engine: Engine | None = None
        self._defaults: SamplingParams | None = None
        self._fault: str | None = None
        self._starting = threading.Lock()
        self._active: dict[str, Submission] = {}  # requests whose last output was not delivered
        self._streams: dict[str, Stream] = {}  # touched by the output thread alone

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Use an engine that nothing else uses; it is shut down with this object."""
        this = cls({})
        this._make = lambda: engine
        return this

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Build the engine on its thread and wait until it is ready. Further calls wait for the same start.

        Raises:
            trivet.errors.TrivetError: As :class:`trivet.Engine` does.
        """
        with self._starting:
            if self._thread is None:
                self._thread = EngineThread(
                    self._make,
                    ready=self._ready,
                    publish=self._publish,
                    closing=self._abort_all,
                    closed=self._closed,
                    hangs=self._hangs,
                )
        await asyncio.wrap_future(self._thread.started)

    async def shutdown(self) -> None:
        """Abort what is unfinished, whose streams end with finish reason ``abort``, and stop. May be called again."""
        thread = self._thread
        if thread is not None:
            thread.close()
            await asyncio.to_thread(thread.join)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and self._thread.running and self.fault is None

    @property
    def fault(self) -> str | None:
        """What made the engine unhealthy, or None."""
        return self._fault or (None if self._engine is None else self._engine.fault)

    async def check_health(self) -> None:
        """Raise :class:`EngineUnhealthyError` unless requests are taken."""
        if self.fault is not None:
            raise EngineUnhealthyError(f"the engine stopped after a fault and must be restarted: {self.fault}")
        if not self.is_running:
            raise EngineUnhealthyError("the engine is not running")

    # ------------------------------------------------------------------ what it is

    @property
    def engine(self) -> Engine:
        """The engine; to be called only on its thread, see :meth:`call`. Raises RuntimeError before the start."""
        if self._engine is None:
            raise RuntimeError("the engine has not been started; call start() first")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which any thread may use; None when the engine has none."""
        return self.engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The configuration."""
        return self.engine.config

    @property
    def model(self) -> ModelInfo:
        """Facts about the model."""
        return self.engine.model

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters are sampled with, see :meth:`trivet.LLM.get_default_sampling_params`.

        Raises:
            RuntimeError: Before the start.
        """
        if self._defaults is None:
            self._defaults = default_sampling_params(self.engine)
        return self._defaults.detached()

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield outputs as ``sampling_params.output_kind`` says, the last one ``finished``.

        Leaving the iteration early, or cancelling the task, aborts the request. A request that fails while it runs, or
        that an unhealthy engine takes with it, ends with an output of finish reason ``error`` and the message in
        ``error``.

        Args:
            prompt: Text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``.
            sampling_params: None: :meth:`get_default_sampling_params`.
            request_id: Unique among unfinished requests; None makes one.
            priority: Lower runs first under a scheduling policy that looks at it; None: the parameters' own.

        Raises:
            RequestError: If the request is refused; when the iteration begins, like the next.
            EngineUnhealthyError: If the engine is not running.
        """
        return cast(
            "AsyncGenerator[RequestOutput, None]", self._run(lambda _: prompt, sampling_params, request_id, priority)
        )

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
        """Answer a conversation; ``template`` (tools, ...) goes to :meth:`trivet.roles.Tokenizer.chat`, and
        ``chat_template_kwargs`` are further variables of the template."""

        def prompt(preparer: Preparer) -> PromptType:
            tokenizer = preparer.tokenizer
            text = tokenizer.chat(check_conversation(messages), **(template_variables(chat_template_kwargs) | template))
            return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

        return cast("AsyncGenerator[RequestOutput, None]", self._run(prompt, sampling_params, request_id, priority))

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> BeamSearchOutput:
        """Search for the likeliest outputs of a prompt, see :meth:`trivet.LLM.beam_search`; cancelling the task aborts
        it. Raises as :meth:`generate`."""
        await self._be_ready()
        assert self._preparer is not None
        eos_ids, name = eos_token_ids(self.engine), request_id or uuid.uuid4().hex
        step = step_params(params, eos_ids, self.model.vocab_size)
        submission = await asyncio.to_thread(
            self._preparer.prepare, name, prompt, whole_params(params, step), priority=priority
        )
        await self.call(submission.validate)
        search = BeamSearch(submission, params, eos_token_ids=eos_ids, max_model_len=self.max_model_len)
        count = 0
        while not search.done:
            submissions = search.step_submissions(step, count)
            try:
                async with asyncio.TaskGroup() as group:  # cancels the others when one is refused
                    tasks = [group.create_task(self._last(one)) for one in submissions]
            except ExceptionGroup as raised:
                raise raised.exceptions[0] from None
            search.take([task.result() for task in tasks])
            count += 1
        return search.output(self.tokenizer)

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Pool the hidden states of a prompt; cancelling the task aborts the request. Raises as :meth:`generate`."""
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise TypeError(f"params must be PoolingParams, got {type(params).__name__}")
        outputs = [output async for output in self._run(lambda _: prompt, params, request_id, priority)]
        return cast("PoolingRequestOutput[PoolingOutput]", outputs[-1])

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; their streams end with finish reason ``abort``. Unknown and finished ids have no effect."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)

        def abort(engine: Engine) -> None:
            found = [self._active[i] for i in ids if i in self._active]
            engine.abort([child for submission in found for child in submission.child_ids])

        if self._thread is not None and self._thread.running:
            await asyncio.wrap_future(self._thread.call(abort))

    async def explain(self, request_id: str) -> Wait | None:
        """Why a request does not advance, see :meth:`trivet.Engine.explain`."""
        return await self.call(lambda engine: engine.explain(request_id))

    async def timeline(self, request_id: str) -> RequestTimeline | None:
        """The whole story of a request, see :meth:`trivet.Engine.timeline`; output ``i`` of several is ``id#i``."""
        return await self.call(lambda engine: engine.timeline(request_id))

    async def reset_prefix_cache(self) -> bool:
        """Forget what the KV cache keeps of earlier requests, in tiers too; False, with no effect, while any run."""
        return await self.call(lambda engine: engine.parts.cache.reset())

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """What ``function`` returns, called with the engine on its thread between two steps; raises what it raises."""
        await self.check_health()
        assert self._thread is not None
        return await asyncio.wrap_future(self._thread.call(function))

    # ------------------------------------------------------------------ inside

    async def _run(
        self,
        prompt: Callable[[Preparer], PromptType],
        params: AnyParams | None,
        request_id: str | None,
        priority: int | None,
    ) -> AsyncGenerator[Output, None]:
        arrival = time.monotonic()
        await self._be_ready()
        preparer = self._preparer
        assert preparer is not None

        def prepare() -> Submission:
            given = self.get_default_sampling_params() if params is None else params
            return preparer.prepare(request_id or uuid.uuid4().hex, prompt(preparer), given, priority=priority)

        # Rendering and tokenising a long text takes a while, in which other streams go on.
        async for output in self._follow(await asyncio.to_thread(prepare), arrival):
            yield output

    async def _be_ready(self) -> None:
        """Start, or wait for the start that is under way; raises unless requests are taken then."""
        if self._thread is None or not self._thread.started.done():
            await self.start()
        await self.check_health()

    async def _last(self, submission: Submission) -> RequestOutput:
        outputs = [output async for output in self._follow(submission, time.monotonic())]
        return cast("RequestOutput", outputs[-1])

    async def _follow(self, submission: Submission, arrival: float) -> AsyncGenerator[Output, None]:
        thread = self._thread
        assert thread is not None
        stream = Stream(submission)
        try:
            await asyncio.wrap_future(thread.call(lambda engine: self._admit(engine, stream, arrival)))
            while not stream.finished:
                yield await stream.next()
        finally:
            if not stream.finished:
                self._drop(submission)

    def _admit(self, engine: Engine, stream: Stream, arrival: float) -> None:
        """On the engine's thread: queue every child, or none."""
        submission = stream.submission
        request_id = submission.request_id
        if request_id in self._active:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", param="request_id")
        requests: list[Request] = []
        try:
            for index in range(len(submission.children)):
                requests.append(submission.add(engine, index, arrival_time=arrival))  # noqa: PERF401  # kept if one raises
        except BaseException:
            engine.abort([request.request_id for request in requests])
            raise
        self._active[request_id] = submission

        def follow(stage: OutputStage) -> None:
            self._streams[request_id] = stream
            for index, request in enumerate(requests):
                stage.add(submission, index, request)

        assert self._output is not None
        self._output.put(follow)

    def _drop(self, submission: Submission) -> None:
        """Nobody listens any longer: abort, and make no further output."""

        def forget(stage: OutputStage) -> None:
            stage.drop(submission)
            stream = self._streams.get(submission.request_id)
            if stream is not None and stream.submission is submission:
                del self._streams[submission.request_id]

        def drop(engine: Engine) -> None:
            if self._active.get(submission.request_id) is submission:
                del self._active[submission.request_id]
                engine.abort(submission.child_ids)
                assert self._output is not None
                self._output.put(forget)

        if self._thread is not None:
            self._thread.post(drop)

    # ------------------------------------------------------------------ on the engine's thread

    def _ready(self, engine: Engine) -> None:
        self._engine = engine
        self._preparer = Preparer(engine.tokenizer, engine.config.seed)
        stage = OutputStage(engine.tokenizer, stop=self._stop, abort=self._abort, eos_token_ids=eos_token_ids(engine))
        self._output = OutputThread(stage, self._deliver, self._output_failed)

    def _publish(self, events: Any) -> None:
        assert self._output is not None
        self._output.put(events)

    def _abort_all(self, engine: Engine) -> None:
        engine.abort([child for submission in list(self._active.values()) for child in submission.child_ids])

    def _closed(self, reason: str | None) -> None:
        assert self._output is not None
        if reason is not None:
            self._fault = self._fault or reason
            self._output.put(lambda stage: self._deliver(stage.fail_all(f"the engine stopped after a fault: {reason}")))
        self._output.close()
        self._end_streams(EngineUnhealthyError(reason or "the engine has been shut down"))

    def _hangs(self, reason: str) -> None:
        """On a monitor's thread: a step does not return, and the streams end without it."""
        assert self._output is not None
        self._fault = self._fault or reason
        self._output.put(lambda stage: self._deliver(stage.fail_all(f"the engine stopped after a fault: {reason}")))

    # ------------------------------------------------------------------ on the output thread

    def _stop(self, request: Request, num_tokens: int, stop_string: str) -> None:
        assert self._thread is not None

        def stop(engine: Engine) -> None:
            if request.finish_reason is None:  # else its id may be in use again
                engine.stop(request.request_id, num_tokens, stop_string)

        self._thread.post(stop)

    def _abort(self, requests: list[Request]) -> None:
        assert self._thread is not None
        self._thread.post(lambda engine: engine.abort([r.request_id for r in requests if r.finish_reason is None]))

    def _deliver(self, outputs: list[Output]) -> None:
        woken: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                self._forget(stream)
            stream.put(output)
            woken.setdefault(stream.loop, []).append(stream)
        for loop, streams in woken.items():
            self._wake(loop, streams)

    def _forget(self, stream: Stream) -> None:
        request_id = stream.submission.request_id
        del self._streams[request_id]
        if self._active.get(request_id) is stream.submission:
            self._active.pop(request_id, None)

    def _wake(self, loop: asyncio.AbstractEventLoop, streams: list[Stream]) -> None:
        def wake() -> None:
            for stream in streams:
                stream.arrived.set()

        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the consumers' loop is closed: nobody listens any longer
            for stream in streams:
                self._drop(stream.submission)

    def _output_failed(self, error: BaseException) -> None:
        reason = f"the output stage failed: {type(error).__name__}: {error}"
        self._fault = self._fault or reason
        self._end_streams(EngineUnhealthyError(reason))
        assert self._thread is not None
        self._thread.close()

    def _end_streams(self, error: Exception) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
            self._wake(stream.loop, [stream])


def _make_engine(config: Any, plugins: Sequence[object]) -> Engine:
    from trivet.engine import Engine

    return Engine(config, plugins)

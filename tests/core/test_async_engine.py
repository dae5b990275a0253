"""``AsyncEngine``: many consumers of one engine, from any loop and thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from trivet import AsyncEngine, EngineUnhealthyError, OverloadedError, PoolingParams, RequestError, SamplingParams
from trivet.testing.scripted import LETTERS, PieceTokenizer, ScriptedEngine
from trivet_schemas.outputs import RequestOutput

pytestmark = pytest.mark.asyncio


def _key(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.encode(text))


class Endless(Sequence[int]):
    """The letter e, for ever."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        return LETTERS.encode("e")[0]


_SCRIPTS: dict[tuple[int, ...], Sequence[int]] = {
    _key("a"): LETTERS.encode("xyzxyz"),
    _key("b"): LETTERS.encode("uvwuvw"),
    _key("endless"): Endless(),
}


def _scripted(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(_SCRIPTS, **{"max_model_len": 10**9, **options})


@contextlib.asynccontextmanager
async def _running(engine: ScriptedEngine) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_engine(engine) as served:  # type: ignore[arg-type]
        yield served


async def _collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


def _delta(**fields: Any) -> SamplingParams:
    return SamplingParams(output_kind="delta", **fields)


class Gate:
    """Lets an engine make one step per permit."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._permits = threading.Semaphore(0)
        engine.before_step = lambda _: self._permits.acquire(timeout=10)

    def open(self, steps: int = 1) -> None:
        self._permits.release(steps)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
async def test_a_stream_ends_with_a_finished_output(kind: str) -> None:
    async with _running(_scripted()) as engine:
        outputs = await _collect(engine.generate("a", SamplingParams(max_tokens=6, output_kind=kind)))
    texts = [output.outputs[0].text for output in outputs]
    assert ("".join(texts) if kind == "delta" else texts[-1]) == "xyzxyz"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_each_step_reaches_a_consumer_that_keeps_up() -> None:
    scripted = _scripted()
    gate = Gate(scripted)
    async with _running(scripted) as engine:
        texts = []
        gate.open()
        async for output in engine.generate("a", _delta(max_tokens=3)):
            texts.append(output.outputs[0].text)
            gate.open()
    assert texts == ["x", "y", "z"]


async def test_deltas_are_joined_for_a_consumer_that_does_not_keep_up() -> None:
    async with _running(_scripted()) as engine:
        stream = engine.generate("endless", _delta(max_tokens=500, logprobs=0))
        outputs = [await anext(stream)]
        await _until(lambda: not engine.engine.has_work)
        await asyncio.sleep(0.05)
        outputs += await _collect(stream)
    completions = [output.outputs[0] for output in outputs]
    assert len(outputs) < 10
    assert "".join(c.text for c in completions) == "e" * 500
    assert sum(len(c.token_ids) for c in completions) == 500
    assert sum(len(c.logprobs or []) for c in completions) == 500


async def test_many_streams_at_once() -> None:
    async with _running(_scripted(chunks=[1, 3, 2])) as engine:
        streams = [
            engine.generate(p, SamplingParams(max_tokens=n)) for p in "ab" for n in (1, 2, 3, 4, 5, 6) for _ in range(5)
        ]
        results = await asyncio.gather(*(_collect(stream) for stream in streams))
    texts = [outputs[-1].outputs[0].text for outputs in results]
    assert texts == [text[:n] for text in ("xyzxyz", "uvwuvw") for n in (1, 2, 3, 4, 5, 6) for _ in range(5)]


async def test_stop_strings_end_a_stream_and_the_engine_is_told() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        outputs = await _collect(engine.generate("endless", _delta(stop="eee", max_tokens=None)))
        await _until(lambda: not scripted.has_work)
    assert "".join(o.outputs[0].text for o in outputs) == ""
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "eee")
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 3
    assert [entry[2:] for entry in scripted.log if entry[0] == "stop"] == [(3, "eee")]


async def test_an_id_can_be_used_again_as_soon_as_its_last_output_arrived() -> None:
    async with _running(_scripted()) as engine:
        for _ in range(30):
            outputs = await _collect(engine.generate("endless", _delta(stop="eee", max_tokens=None), "same"))
            assert outputs[-1].request_id == "same"
            assert outputs[-1].outputs[0].stop_reason == "eee"


async def test_a_late_stop_does_not_reach_a_later_request_of_the_same_id() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        first = engine.generate("endless", _delta(max_tokens=None), "same")
        await anext(first)
        former = scripted.requests["same"]
        await first.aclose()
        second = engine.generate("endless", _delta(max_tokens=None), "same")
        await anext(second)
        assert scripted.requests["same"] is not former
        engine._stop(former, 1, "e")
        assert await engine.explain("same") == "waits: same"
        await second.aclose()


async def test_several_outputs_of_a_request() -> None:
    async with _running(_scripted()) as engine:
        (output,) = await _collect(engine.generate("a", SamplingParams(n=3, max_tokens=2, output_kind="final")))
    assert [o.text for o in output.outputs] == ["xy"] * 3


async def test_chat_and_encode() -> None:
    async with _running(_scripted()) as engine:
        messages = [{"role": "user", "content": ""}]
        outputs = await _collect(engine.chat(messages, SamplingParams(max_tokens=3), suffix="b"))
        assert (outputs[-1].prompt, outputs[-1].outputs[0].text) == ("b", "uvw")
        pooled = await engine.encode("a", PoolingParams())
        assert pooled.outputs.data.tolist() == [float(i) for i in _key("a")]


async def test_consumers_in_other_event_loops() -> None:
    async with _running(_scripted()) as engine:
        results: list[str] = []

        def consume(prompt: str) -> None:
            async def main() -> None:
                streams = [engine.generate(prompt, SamplingParams(max_tokens=6)) for _ in range(10)]
                collected = await asyncio.gather(*(_collect(stream) for stream in streams))
                results.extend(outputs[-1].outputs[0].text for outputs in collected)

            asyncio.run(main())

        threads = [threading.Thread(target=consume, args=(p,)) for p in "abab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert sorted(results) == sorted(["xyzxyz"] * 20 + ["uvwuvw"] * 20)


# ---------------------------------------------------------------- ends


async def test_cancelling_the_consumer_aborts_the_request_and_no_other() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.generate("endless", SamplingParams(max_tokens=None), "victim"):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        other = asyncio.create_task(_collect(engine.generate("a", SamplingParams(max_tokens=6))))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: "victim" not in scripted.requests)
        assert ("abort", "victim") in scripted.log
        assert (await other)[-1].outputs[0].text == "xyzxyz"


async def test_cancelling_before_the_request_is_queued_leaves_nothing_behind() -> None:
    scripted = _scripted()
    gate = Gate(scripted)
    async with _running(scripted) as engine:
        first = asyncio.create_task(_collect(engine.generate("a", SamplingParams(max_tokens=2), "first")))
        await _until(lambda: "first" in scripted.requests)
        waiting = asyncio.create_task(_collect(engine.generate("b", SamplingParams(), "waiting")))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open(100)
        assert (await first)[-1].finished
        await _until(lambda: not scripted.has_work)
        assert not engine._active


async def test_leaving_the_iteration_early_aborts_the_request() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        async with contextlib.aclosing(engine.generate("endless", SamplingParams(max_tokens=None), "left")) as stream:
            async for _ in stream:
                break
        await _until(lambda: not scripted.requests)
        assert ("abort", "left") in scripted.log
        assert not engine._active


async def test_abort_ends_a_stream_with_what_there_is() -> None:
    async with _running(_scripted()) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None), "r")
        await anext(stream)
        await engine.abort("r")
        last = (await _collect(stream))[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].text.startswith("e")


async def test_abort_reaches_every_output_of_a_request() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None, n=2), "r")
        await anext(stream)
        await engine.abort(["r"])
        last = (await _collect(stream))[-1]
    assert [o.finish_reason for o in last.outputs] == ["abort", "abort"]


async def test_aborting_what_is_finished_or_unknown_has_no_effect() -> None:
    async with _running(_scripted()) as engine:
        await _collect(engine.generate("a", SamplingParams(max_tokens=2), "done"))
        await engine.abort(["done", "never"])
        assert (await _collect(engine.generate("a", SamplingParams(max_tokens=2))))[-1].outputs[0].text == "xy"


async def test_a_consumer_whose_loop_is_gone_is_aborted() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None), "orphan")
        loop = asyncio.new_event_loop()
        await asyncio.to_thread(loop.run_until_complete, anext(stream))
        loop.close()
        await _until(lambda: "orphan" not in scripted.requests)
        assert ("abort", "orphan") in scripted.log
        assert not engine._active


# ---------------------------------------------------------------- refusals and faults


async def test_refusals_are_raised_to_the_caller() -> None:
    scripted = _scripted(max_model_len=4, max_queued=1)
    gate = Gate(scripted)
    async with _running(scripted) as engine:
        with pytest.raises(RequestError, match="5 tokens"):
            await anext(engine.generate("a" * 5))
        with pytest.raises(RequestError, match="prompt: must not be empty"):
            await anext(engine.generate(""))
        with pytest.raises(TypeError, match="SamplingParams"):
            await anext(engine.generate("a", {"max_tokens": 3}))  # type: ignore[arg-type]
        first = asyncio.create_task(_collect(engine.generate("a", SamplingParams(max_tokens=3), "first")))
        await _until(lambda: "first" in scripted.requests)
        refused = [
            asyncio.create_task(_collect(engine.generate("a", SamplingParams(), "first"))),
            asyncio.create_task(_collect(engine.generate("b", SamplingParams()))),
        ]
        gate.open(100)
        same, full = await asyncio.gather(*refused, return_exceptions=True)
        assert (await first)[-1].outputs[0].text == "xyz"
    assert isinstance(same, RequestError | list)
    assert isinstance(full, OverloadedError | list)


async def test_an_id_in_use_is_refused() -> None:
    async with _running(_scripted()) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None), "r")
        await anext(stream)
        with pytest.raises(RequestError, match="'r' is in use"):
            await anext(engine.generate("a", SamplingParams(), "r"))
        await engine.abort("r")
        assert (await _collect(stream))[-1].finished


async def test_a_queue_that_cannot_take_every_output_takes_none() -> None:
    scripted = _scripted(max_queued=2)
    async with _running(scripted) as engine:
        with pytest.raises(OverloadedError):
            await anext(engine.generate("endless", SamplingParams(n=3, max_tokens=None)))
        await _until(lambda: not scripted.has_work)
        assert (await _collect(engine.generate("a", SamplingParams(max_tokens=2))))[-1].outputs[0].text == "xy"


async def test_a_fault_ends_a_stream_with_an_error_and_others_go_on() -> None:
    scripted = _scripted()
    scripted.faults[_key("b")] = (2, "out of luck")
    async with _running(scripted) as engine:
        bad, good = await asyncio.gather(
            *(_collect(engine.generate(p, SamplingParams(max_tokens=6))) for p in "ba")
        )  # fmt: skip
    assert (bad[-1].error, bad[-1].outputs[0].finish_reason, bad[-1].outputs[0].text) == ("out of luck", "error", "uv")
    assert good[-1].outputs[0].text == "xyzxyz"


async def test_a_loop_that_breaks_ends_every_stream_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        streams = [engine.generate("endless", SamplingParams(max_tokens=None)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        scripted.before_step = lambda _: 1 / 0
        for stream in streams:
            last = (await _collect(stream))[-1]
            assert last.outputs[0].finish_reason == "error"
            assert "ZeroDivisionError" in (last.error or "")
        assert not engine.is_running
        with pytest.raises(EngineUnhealthyError, match="ZeroDivisionError"):
            await engine.check_health()
        with pytest.raises(EngineUnhealthyError, match="ZeroDivisionError"):
            await anext(engine.generate("a"))
    assert "the engine's loop failed" in caplog.text
    assert scripted.is_shut_down


async def test_an_engine_that_turns_unhealthy_takes_nothing_more() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        assert engine.is_running
        await engine.check_health()
        scripted.fault = "schedule failed"
        assert not engine.is_running
        with pytest.raises(EngineUnhealthyError, match="schedule failed"):
            await anext(engine.generate("a"))


async def test_an_output_stage_that_breaks_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _running(_scripted()) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None))
        await anext(stream)

        def broken(*_: object) -> None:
            raise AssertionError("broken beyond repair")

        monkeypatch.setattr("trivet.output.stage.OutputStage.process", broken)
        with pytest.raises(EngineUnhealthyError, match="broken beyond repair"):
            await _collect(stream)
        assert engine.fault is not None


async def test_a_tokenizer_that_raises_ends_one_stream() -> None:
    tokenizer = PieceTokenizer(LETTERS.pieces[1:])
    tokenizer.poison = LETTERS.encode("w")[0]
    async with _running(_scripted(tokenizer=tokenizer)) as engine:
        good, bad = await asyncio.gather(*(_collect(engine.generate(p, SamplingParams(max_tokens=6))) for p in "ab"))
    assert good[-1].outputs[0].text == "xyzxyz"
    assert bad[-1].outputs[0].finish_reason == "error"


# ---------------------------------------------------------------- life


async def test_an_idle_engine_sleeps() -> None:
    scripted = _scripted()
    async with _running(scripted) as engine:
        await _collect(engine.generate("a", SamplingParams(max_tokens=3)))
        await _until(lambda: not scripted.has_work)
        steps = scripted.steps
        await asyncio.sleep(0.05)
        assert scripted.steps == steps


async def test_a_request_starts_the_engine() -> None:
    engine = AsyncEngine.from_engine(_scripted())  # type: ignore[arg-type]
    assert not engine.is_running
    with pytest.raises(EngineUnhealthyError, match="not running"):
        await engine.check_health()
    with pytest.raises(RuntimeError, match="not been started"):
        _ = engine.tokenizer
    assert (await _collect(engine.generate("a", SamplingParams(max_tokens=2))))[-1].finished
    assert engine.tokenizer is LETTERS
    await engine.shutdown()


async def test_many_starts_build_one_engine() -> None:
    built: list[ScriptedEngine] = []

    def build() -> Any:
        time.sleep(0.01)
        built.append(_scripted())
        return built[-1]

    engine = AsyncEngine.from_engine(_scripted())  # type: ignore[arg-type]
    engine._make = build
    await asyncio.gather(*(engine.start() for _ in range(5)))
    assert len(built) == 1
    await engine.shutdown()


async def test_a_start_that_fails_raises_for_everyone() -> None:
    engine = AsyncEngine.from_engine(_scripted())  # type: ignore[arg-type]

    def build() -> Any:
        raise RequestError("no such model")

    engine._make = build
    for _ in range(2):
        with pytest.raises(RequestError, match="no such model"):
            await engine.start()
    assert not engine.is_running
    await engine.shutdown()


async def test_shutdown_aborts_what_is_unfinished_and_refuses_what_comes() -> None:
    scripted = _scripted()
    engine = AsyncEngine.from_engine(scripted)  # type: ignore[arg-type]
    stream = engine.generate("endless", SamplingParams(max_tokens=None))
    await anext(stream)
    await engine.shutdown()
    await engine.shutdown()
    last = (await _collect(stream))[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert scripted.is_shut_down
    assert not engine.is_running
    with pytest.raises(EngineUnhealthyError):
        await anext(engine.generate("a"))
    assert not [t for t in threading.enumerate() if t.name.startswith("trivet-") and t.is_alive()]


async def test_waits_are_explained() -> None:
    async with _running(_scripted()) as engine:
        stream = engine.generate("endless", SamplingParams(max_tokens=None), "r")
        await anext(stream)
        assert await engine.explain("r") == "waits: r"
        assert await engine.explain("unknown") is None
        await engine.abort("r")
        await _collect(stream)


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """No engine may leave a thread behind."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("trivet-"):
            thread.join(10)
            assert not thread.is_alive()

"""``LLM`` and ``AsyncEngine`` given what nobody should give: refused by name, and what was given is never changed."""

from __future__ import annotations

import asyncio
import threading
import unittest.mock
from collections.abc import Callable
from typing import Any

import engine_kit
import numpy as np
import pytest

from trivet import LLM, AsyncEngine, BeamSearchParams, EngineUnhealthyError, PoolingParams, RequestError, SamplingParams
from trivet.conversations import conversations_of
from trivet.testing import fakes
from trivet.testing.scripted import LETTERS, ScriptedEngine
from trivet_schemas.errors import ParameterError

GREETING = {"role": "user", "content": "hi"}
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM.from_config(engine_kit.config(), [fakes]) as made:
        yield made


# ---------------------------------------------------------------- prompts and parameters


def test_a_list_of_numpy_integers_is_one_prompt(llm: LLM) -> None:
    ids = np.array([3, 1, 4])
    outputs = [llm.generate(prompt, engine_kit.greedy(4), use_tqdm=False) for prompt in (ids.tolist(), list(ids))]
    assert [len(each) for each in outputs] == [1, 1]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids


@pytest.mark.parametrize("bad", [np.array(5), np.float32(1), [np.float32(1)]])
def test_a_number_is_no_prompt(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(bad, ONE, use_tqdm=False)


@pytest.mark.parametrize("bad", [5, 1.5, iter([1])])
def test_priorities_that_are_no_list(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match="^priority: must be a list with one per prompt"):
        llm.generate([[1]], ONE, use_tqdm=False, priority=bad)


@pytest.mark.parametrize("bad", ["embed", b"embed", ["embed"], 5, {}, [ONE]])
@pytest.mark.parametrize("call", ["embed", "classify", "encode", "score"])
def test_pooling_parameters_of_another_kind(llm: LLM, call: str, bad: Any) -> None:
    prompts = [[1], [2]] if call == "score" else [[1]]
    arguments: dict[str, Any] = {"pooling_params": bad, "use_tqdm": False}
    with pytest.raises(TypeError, match="must be PoolingParams or a list of them"):
        getattr(llm, call)(*(prompts if call == "score" else [prompts]), **arguments)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True])
def test_limits_of_concurrent_searches(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match=f"^concurrency_limit: must be an integer of at least 1, .*{bad!r}"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=2, max_tokens=2), concurrency_limit=bad)


def test_the_defaults_are_not_changed_through_a_copy(llm: LLM) -> None:
    mine = llm.get_default_sampling_params()
    mine.stop.append("x")
    mine.max_tokens = 3
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "top_k", "max_tokens", "priority", "n", "best_of"])
def test_numbers_too_large_for_a_worker_are_refused(field: str) -> None:
    with pytest.raises(ParameterError, match=f"{field}: must be at most"):
        SamplingParams(**{field: 2**63})


@pytest.mark.parametrize("power", [-1e3, -10.5, 10.5, 1e10, 1e308, float("nan")])
def test_powers_of_a_length_that_no_number_can_hold(power: float) -> None:
    with pytest.raises(ParameterError, match="length_penalty"):
        BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=power)


@pytest.mark.parametrize("power", [-10.0, 0.0, 10.0])
def test_the_largest_powers_rank(llm: LLM, power: float) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=power)
    (found,) = llm.beam_search([[1, 2]], params)
    assert found.error is None
    assert len(found.sequences) == 2


def test_arguments_for_plugins_that_hold_themselves(llm: LLM) -> None:
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises(RequestError, match="extra_args: cannot be sent to a worker"):
        llm.generate([[1]], SamplingParams(extra_args={"a": inner}), use_tqdm=False)


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (5, "must be a list of messages .* got 5"),
        ("hi", "must be a list of messages .* got 'hi'"),
        (GREETING, "must be a list of messages .* got {'role'"),
        (None, "at least one message, got none"),
        ([], "at least one message, got none"),
        ({}, "must be a list of messages .* got {}"),
        ([[]], "at least one message, got none"),
        ([GREETING, 5], "each must be a mapping with role and content, got 5"),
        ([5], "must be a list of messages .* got 5"),
        ([[GREETING], 5], "^conversation 1: messages: must be a list .* got 5"),
        ([[GREETING], ["hi"]], "^conversation 1: messages: each must be a mapping .* got 'hi'"),
    ],
)
def test_what_is_no_conversation(llm: LLM, bad: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as raised:
        llm.chat(bad, ONE, use_tqdm=False)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_conversations_in_any_container(make: Callable[[Any], Any]) -> None:
    assert conversations_of(make([GREETING])) == [[GREETING]]
    assert conversations_of(make([[GREETING], [GREETING, GREETING]])) == [[GREETING], [GREETING, GREETING]]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tools": []}, "'tools' has an argument of its own"),
        ({"messages": []}, "'messages' is no name of a variable"),
        ({5: 1}, "5 is no name of a variable"),
        (5, "must be a mapping from names to values, got 5"),
        ("ab", "must be a mapping from names to values, got 'ab'"),
    ],
)
def test_variables_that_no_template_can_have(llm: LLM, bad: Any, says: str) -> None:
    with pytest.raises(RequestError, match=f"^chat_template_kwargs: {says}"):
        llm.chat([GREETING], ONE, use_tqdm=False, chat_template_kwargs=bad)


# ---------------------------------------------------------------- the end


def test_a_shutdown_by_another_thread_ends_a_call_that_runs() -> None:
    with LLM.from_config(engine_kit.config(), [fakes]) as llm:
        began = threading.Event()

        def bar(**_: Any) -> Any:
            began.set()
            return unittest.mock.MagicMock(format_dict={"elapsed": 0})

        def generate() -> None:
            while True:
                llm.generate([[1, 2, 3]] * 50, engine_kit.greedy(60), use_tqdm=bar)

        def close() -> None:
            assert began.wait(10)
            llm.shutdown()

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(EngineUnhealthyError, match="the engine has been shut down"):
            generate()
        closing.join()
        with pytest.raises(EngineUnhealthyError):
            llm.generate([[1]], ONE, use_tqdm=False)


def test_a_call_ends_when_somebody_shuts_its_engine_down() -> None:
    with LLM.from_config(engine_kit.config(), [fakes]) as llm:
        bar = unittest.mock.MagicMock()
        bar.return_value.format_dict = {"elapsed": 0}
        bar.return_value.update.side_effect = lambda _: llm.engine.shutdown()
        work = [engine_kit.greedy(1), engine_kit.greedy(60)]
        with pytest.raises(EngineUnhealthyError):
            llm.generate([[1, 2], [3, 4]], work, use_tqdm=bar)


# ---------------------------------------------------------------- AsyncEngine


async def _last(stream: Any) -> Any:
    return [output async for output in stream][-1]


@pytest.mark.asyncio
async def test_requests_wait_for_a_start_that_another_one_began() -> None:
    engine = AsyncEngine(engine_kit.config(), [fakes])
    try:
        work: list[Any] = [_last(engine.generate([1, 2], ONE)) for _ in range(3)]
        work += [engine.encode([1, 2]), engine.beam_search([1], BeamSearchParams(beam_width=1, max_tokens=1))]
        outputs = await asyncio.gather(*work)
        assert all(output.error is None for output in outputs)
    finally:
        await engine.shutdown()


@pytest.mark.asyncio
async def test_parameters_that_change_while_a_request_runs_do_not_matter() -> None:
    script = {tuple(LETTERS.encode("a")): LETTERS.encode("xyzxyz")}
    scripted, queued, go = ScriptedEngine(script), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait(_: Any) -> None:
        loop.call_soon_threadsafe(queued.set)
        assert go.wait(10)

    scripted.before_step = wait
    async with AsyncEngine.from_engine(scripted) as engine:  # type: ignore[arg-type]
        params = SamplingParams(n=2, best_of=3, max_tokens=6, stop=["zx"], include_stop_str_in_output=True)
        stream = engine.generate("a", params)
        first = asyncio.ensure_future(_last(stream))
        await asyncio.wait_for(queued.wait(), 10)
        params.n, params.include_stop_str_in_output = 1, False
        params.stop.clear()
        go.set()
        output = await first
    assert [each.text for each in output.outputs] == ["xyzx", "xyzx"]


@pytest.mark.parametrize("bad", [5, None, "hi", GREETING, [], [5]])
@pytest.mark.asyncio
async def test_what_is_no_conversation_for_a_stream(bad: Any) -> None:
    async with AsyncEngine(engine_kit.config(), [fakes]) as engine:
        with pytest.raises(RequestError, match="messages"):
            await _last(engine.chat(bad, ONE))


@pytest.mark.asyncio
async def test_variables_that_no_template_of_a_stream_can_have() -> None:
    async with AsyncEngine(engine_kit.config(), [fakes]) as engine:
        with pytest.raises(RequestError, match="chat_template_kwargs: 'tools' has an argument of its own"):
            await _last(engine.chat([GREETING], ONE, chat_template_kwargs={"tools": []}))


@pytest.mark.asyncio
async def test_sampling_parameters_pool_nothing() -> None:
    async with AsyncEngine(engine_kit.config(), [fakes]) as engine:
        with pytest.raises(TypeError, match="params must be PoolingParams, got SamplingParams"):
            await engine.encode([1], ONE)  # type: ignore[arg-type]
        assert (await engine.encode([1], PoolingParams())).error is None

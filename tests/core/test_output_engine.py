"""LLM and AsyncEngine over the real engine, on the numpy fakes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from engine_kit import check_free, config, engine, greedy, prompts

from trivet import LLM, AsyncEngine, EngineUnhealthyError, RequestError, SamplingParams
from trivet.hookspecs import hookimpl
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet.testing.fakes import FakeTokenizer

PROMPTS = prompts(20, seed=3)
TIGHT = {"use": "paged", "block_size": 4, "num_blocks": 26}


def _text(tokens: list[int]) -> str:
    return FakeTokenizer().decode(tokens)


def _stop_in(prompt: list[int], start: int, length: int) -> str:
    """A string that the greedy text after ``prompt`` has at ``start``."""
    return _text(reference_tokens(prompt, start + length))[start:]


@pytest.mark.parametrize("cache", [{"use": "paged", "block_size": 4}, TIGHT], ids=["ample", "tight"])
def test_generate_gives_the_reference_in_order(cache: Any) -> None:
    with engine(cache=cache) as e:
        params = [greedy(3 + i % 9) for i in range(len(PROMPTS))]
        outputs = LLM.from_engine(e).generate(PROMPTS, params, use_tqdm=False)
        for i, output in enumerate(outputs):
            tokens = reference_tokens(PROMPTS[i], 3 + i % 9)
            assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, _text(tokens))
            assert output.outputs[0].finish_reason == "length"
        check_free(e)


def test_stop_strings_free_their_blocks_and_cut_exactly() -> None:
    with engine(cache=TIGHT) as e:
        stops = [_stop_in(prompt, 2 + i % 5, 2) for i, prompt in enumerate(PROMPTS)]
        params = [greedy(12, stop=stop) for stop in stops]
        outputs = LLM.from_engine(e).generate(PROMPTS, params, use_tqdm=False)
        for prompt, stop, output in zip(PROMPTS, stops, outputs, strict=True):
            whole = _text(reference_tokens(prompt, 12))
            got = output.outputs[0]
            assert got.text == whole[: whole.index(stop)]
            assert (got.finish_reason, got.stop_reason) == ("stop", stop)
            assert len(got.token_ids) == whole.index(stop) + len(stop)
        check_free(e)


def test_a_queue_bound_of_the_scheduler_is_respected() -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 2, "max_num_queued_reqs": 3}
    with engine(scheduler=scheduler) as e:
        outputs = LLM.from_engine(e).generate(PROMPTS, greedy(4), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [reference_tokens(p, 4) for p in PROMPTS]


def test_a_refused_prompt_is_named_and_nothing_is_queued() -> None:
    with engine() as e:
        llm = LLM.from_engine(e)
        with pytest.raises(RequestError, match=r"^prompt 1: .*token id 64 is outside"):
            llm.generate([[1, 2], [3, 64]], greedy(4), use_tqdm=False)
        assert not e.has_work
        with pytest.raises(RequestError, match=r"^prompt 2: .*max_model_len"):
            llm.generate([[1], [2], [3] * 96], greedy(4), use_tqdm=False)
        assert not e.has_work


def test_several_seeded_outputs_equal_single_requests_with_their_seeds() -> None:
    with engine() as e:
        llm = LLM.from_engine(e)
        (several,) = llm.generate([[5, 6, 7]], SamplingParams(n=3, seed=11, max_tokens=8), use_tqdm=False)
        alone = [
            llm.generate([[5, 6, 7]], SamplingParams(seed=11 + i, max_tokens=8), use_tqdm=False)[0] for i in range(3)
        ]
        assert [o.token_ids for o in several.outputs] == [a.outputs[0].token_ids for a in alone]
        assert len({tuple(o.token_ids) for o in several.outputs}) > 1
        check_free(e)


def test_prompt_logprobs_are_whole_under_chunks_and_preemption() -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 8}
    params = greedy(30, prompt_logprobs=1, logprobs=1)
    with engine(scheduler=scheduler, cache=TIGHT) as e:
        tight = LLM.from_engine(e).generate(PROMPTS, params, use_tqdm=False)
        metrics = [o.metrics for o in tight if o.metrics]
        assert sum(m.num_preemptions for m in metrics) > 0
        assert all((m.num_recomputed_tokens > 0) == (m.num_preemptions > 0) for m in metrics)
        for m in metrics:
            assert None not in (m.queue_seconds, m.prefill_seconds, m.decode_seconds)
    with engine() as e:
        ample = LLM.from_engine(e).generate(PROMPTS, params, use_tqdm=False)
    for prompt, output, expected in zip(PROMPTS, tight, ample, strict=True):
        found = output.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [next(iter(position)) for position in found[1:] if position] == prompt[1:]
        assert found == expected.prompt_logprobs
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs


def test_an_interrupt_leaves_the_engine_clean() -> None:
    with engine() as e:
        llm = LLM.from_engine(e)
        step, steps = e.step, 0

        def counting() -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        e.step = counting  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(20), use_tqdm=False)
        assert not e.has_work
        e.check_integrity()
        check_free(e)
        assert llm.generate([PROMPTS[0]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids == reference_tokens(
            PROMPTS[0], 4
        )


def test_chat_goes_through_the_template_and_the_tokenizer() -> None:
    with engine(model={"use": "fake", "vocab_size": FakeTokenizer().size}) as e:
        (output,) = LLM.from_engine(e).chat([{"role": "user", "content": "hi"}], greedy(4), use_tqdm=False)
    assert output.prompt == "user: hi.assistant: "
    ids = FakeTokenizer().encode(output.prompt)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == reference_tokens(ids, 4, vocab_size=FakeTokenizer().size)


def test_an_llm_is_made_from_flat_arguments_or_a_mapping() -> None:
    settings = config()
    scheduler = settings["plugins"].pop("scheduler")
    flat = {key: value for key, value in scheduler.items() if key != "use"}
    with LLM.from_config({**settings, **flat}, [fakes]) as llm:
        assert llm.engine.parts.limits.max_num_seqs == 8
        assert llm.generate([PROMPTS[0]], greedy(4), use_tqdm=False)[0].outputs[0].token_ids == reference_tokens(
            PROMPTS[0], 4
        )


class BreaksSchedule:
    """Raises as soon as it is told to."""

    broken = False

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Any:
        if self.broken:
            raise RuntimeError("no plan today")
        return (yield)


@pytest.mark.asyncio
async def test_streams_equal_the_reference_and_a_cancelled_one_frees_its_blocks() -> None:
    served = AsyncEngine(config(cache=TIGHT), [fakes])
    async with served:

        async def consume(prompt: list[int], count: int) -> list[int]:
            tokens: list[int] = []
            async for output in served.generate(prompt, greedy(count, output_kind="delta")):
                tokens += output.outputs[0].token_ids
            return tokens

        tasks = [asyncio.create_task(consume(prompt, 10 + i)) for i, prompt in enumerate(PROMPTS)]
        await asyncio.sleep(0.02)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for i, result in enumerate(results):
            if not isinstance(result, asyncio.CancelledError):
                assert result == reference_tokens(PROMPTS[i], 10 + i)
        assert isinstance(results[1], list)
        for _ in range(2000):
            if not served.engine.has_work:
                break
            await asyncio.sleep(0.001)
        check_free(served.engine)


@pytest.mark.asyncio
async def test_a_fault_in_schedule_ends_the_streams_and_the_engine_takes_no_more() -> None:
    fault = BreaksSchedule()
    async with AsyncEngine(config(max_model_len=512), [fakes, fault]) as served:
        streams = [served.generate(prompt, greedy(400)) for prompt in PROMPTS[:2]]
        for stream in streams:
            await anext(stream)
        fault.broken = True
        for stream in streams:
            last = [output async for output in stream][-1]
            assert last.outputs[0].finish_reason == "error"
            assert "no plan today" in (last.error or "")
        assert not served.is_running
        with pytest.raises(EngineUnhealthyError, match="no plan today"):
            await served.check_health()
        with pytest.raises(EngineUnhealthyError, match="no plan today"):
            await anext(served.generate(PROMPTS[0], greedy(3)))

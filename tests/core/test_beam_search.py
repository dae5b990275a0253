"""Beam search against an exhaustive reference, on a model whose next token depends on every token before it."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engine_kit import check_free, config, engine

from trivet import LLM, AsyncEngine, BeamSearchParams, ParameterError, RequestError, SamplingParams
from trivet.beam_search import BeamSearch
from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.submission import Preparer
from trivet.testing import fakes
from trivet.testing.fake_model import _logits, reference_states
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.outputs import Logprob

VOCAB = 64
EOS = (3, 40)
PROMPTS = [[5, 6, 7], [9] * 9, [30, 2, 11, 60, 8]]


@contextmanager
def ends(**settings: Any) -> Iterator[Engine]:
    """An engine whose model ends sequences."""
    with engine(model={"use": "fake", "eos_token_ids": EOS}, **settings) as e:
        yield e


def _logprobs(tokens: list[int]) -> Any:
    """``[vocabulary]`` of the token that follows."""
    logits = _logits(reference_states(tokens, (None,))[-1:], VOCAB)[0]
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def reference(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float, str]]:
    """The definition, without an early end: an end of sequence counts if it is among the candidates of its beam."""
    ends = () if params.ignore_eos else EOS
    count = max(2 * params.beam_width, params.beam_width + len(ends))
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    completed: list[tuple[list[int], float, str]] = []
    for _ in range(params.max_tokens):
        extended = []
        for tokens, total in beams:
            values = _logprobs(tokens)
            for token in np.argsort(-values, kind="stable")[:count].tolist():
                value = values[token]
                if token in ends:
                    completed.append((tokens, total + value, "stop"))
                else:
                    extended.append(([*tokens, token], total + value))
        beams = sorted(extended, key=lambda beam: -beam[1])[: params.beam_width]
    completed += [(tokens, total, "length") for tokens, total in beams]
    completed.sort(key=lambda c: -c[1] / len(c[0]) ** params.length_penalty)
    return completed[: params.beam_width]


def _check(found: Any, prompt: list[int], params: BeamSearchParams) -> None:
    expected = reference(prompt, params)
    assert [(s.tokens, s.finish_reason) for s in found.sequences] == [(t, r) for t, _, r in expected]
    np.testing.assert_allclose([s.cum_logprob for s in found.sequences], [c for _, c, _ in expected], atol=1e-4)
    for sequence in found.sequences:
        assert sequence.text == FakeTokenizer().decode(sequence.tokens)
        generated = sequence.tokens[len(prompt) :]
        assert len(sequence.logprobs) == len(generated) + (sequence.finish_reason == "stop")
        chosen = [at[token].logprob for at, token in zip(sequence.logprobs, generated, strict=False)]
        if sequence.finish_reason == "length":
            assert sum(chosen) == pytest.approx(sequence.cum_logprob)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.5, 3.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_best_sequences_are_those_of_an_exhaustive_search(width: int, penalty: float, ignore_eos: bool) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=penalty, ignore_eos=ignore_eos)
    with ends() as e:
        outputs = LLM.from_engine(e).beam_search(PROMPTS, params)
        assert len(outputs) == len(PROMPTS)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            _check(output, prompt, params)
        check_free(e)


def test_some_sequences_of_these_searches_end_by_themselves() -> None:
    settings = [BeamSearchParams(beam_width=5, max_tokens=6, length_penalty=penalty) for penalty in (0.0, 3.0)]
    reasons = {reason for params in settings for prompt in PROMPTS for _, _, reason in reference(prompt, params)}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": {"use": "contiguous"}},
        {"cache": {"use": "paged", "block_size": 4, "prefix_caching": False}},
        {"cache": {"use": "paged", "block_size": 4, "num_blocks": 27}},
        {"scheduler": {"use": "continuous", "max_num_batched_tokens": 5, "max_num_seqs": 3, "max_num_queued_reqs": 2}},
    ],
    ids=["contiguous", "no prefix cache", "few blocks", "small steps"],
)
def test_caches_and_schedules_change_nothing(settings: dict[str, Any]) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=7)
    with ends(**settings) as e:
        for output, prompt in zip(LLM.from_engine(e).beam_search(PROMPTS, params), PROMPTS, strict=True):
            _check(output, prompt, params)
        check_free(e)


class _Peak:
    """Watches the blocks in use and the tokens that are computed."""

    blocks = tokens = 0

    def __init__(self) -> None:
        self.engine: Engine | None = None

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        assert self.engine is not None
        stats = self.engine.parts.cache.stats()
        self.blocks = max(self.blocks, stats.total - stats.free)
        self.tokens += int(event.plan.num_scheduled.sum())


def test_beams_share_their_beginning_and_hold_few_blocks() -> None:
    watch, size, width, prompt = _Peak(), 4, 4, list(range(40))
    params = BeamSearchParams(beam_width=width, max_tokens=10, ignore_eos=True)
    with engine(watch, cache={"use": "paged", "block_size": size}) as e:
        watch.engine = e
        LLM.from_engine(e).beam_search([prompt], params)
    # A beam computes what is not in a full block that is known, at most what fills one and the drawn token.
    assert watch.tokens <= len(prompt) + width * params.max_tokens * (size + 1)
    assert watch.blocks <= len(prompt) // size + width * (-(-params.max_tokens // size) + 1)


def test_the_end_of_sequence_is_shown_on_request() -> None:
    with ends() as e:
        llm = LLM.from_engine(e)
        given = {"beam_width": 5, "max_tokens": 6, "length_penalty": 0.0}
        hidden, shown = (
            llm.beam_search(PROMPTS, BeamSearchParams(**given, include_stop_str_in_output=include))
            for include in (False, True)
        )
    pairs = [(a, b) for h, s in zip(hidden, shown, strict=True) for a, b in zip(h.sequences, s.sequences, strict=True)]
    assert any(a.finish_reason == "stop" for a, _ in pairs)
    for a, b in pairs:
        assert (a.cum_logprob, a.finish_reason) == (b.cum_logprob, b.finish_reason)
        if a.finish_reason == "stop":
            assert b.tokens[:-1] == a.tokens
            assert b.tokens[-1] in EOS
        else:
            assert a.tokens == b.tokens


def test_the_context_bounds_a_search() -> None:
    prompt = [7] * 93
    with engine() as e:
        llm = LLM.from_engine(e)
        (output,) = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
        assert [(len(s.tokens), s.finish_reason) for s in output.sequences] == [(96, "length")] * 2
        with pytest.raises(RequestError, match=r"^prompt 1: .*leaves no room"):
            llm.beam_search([[1], [7] * 96], BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(TypeError, match="must be BeamSearchParams, got dict"):
            llm.beam_search(["a"], {"beam_width": 2})  # type: ignore[arg-type]
        assert not e.has_work


def test_few_prompts_at_a_time_give_the_same() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    bars: list[Any] = []

    class Bar:
        n = 0

        def __init__(self, **_options: Any) -> None:
            bars.append(self)

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            pass

    with ends() as e:
        llm = LLM.from_engine(e)
        together = llm.beam_search(PROMPTS, params)
        assert llm.beam_search(PROMPTS, params, concurrency_limit=1, use_tqdm=Bar) == together
    assert bars[0].n == len(PROMPTS)


def test_a_fault_of_one_beam_ends_the_search_of_its_prompt_alone() -> None:
    class Breaking:
        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            from trivet.errors import RequestFault

            ids = [r.request_id for s in batch.slots.tolist() if (r := fakes_batch(s)) is not None]
            broken = [i for i in ids if i.startswith("1.2.")]
            if broken:
                raise RequestFault({broken[0]: "no luck"})
            return (yield)

    def fakes_batch(slot: int) -> Any:
        return e.table.requests[slot]

    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    with engine(Breaking()) as e:
        first, second = LLM.from_engine(e).beam_search(PROMPTS[:2], params)
        _check(first, PROMPTS[0], params)
        assert (second.sequences, second.error) == ([], "no luck")
        check_free(e)


async def _search(engine: AsyncEngine, params: BeamSearchParams) -> list[Any]:
    return await asyncio.gather(*(engine.beam_search(prompt, params) for prompt in PROMPTS))


def test_searches_of_a_serving_engine_give_the_same() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=5)

    async def main() -> None:
        async with AsyncEngine(config(model={"use": "fake", "eos_token_ids": EOS}), [fakes]) as engine:
            for output, prompt in zip(await _search(engine, params), PROMPTS, strict=True):
                _check(output, prompt, params)
            with pytest.raises(RequestError, match="leaves no room"):
                await engine.beam_search([7] * 96, params)
            long = BeamSearchParams(beam_width=4, max_tokens=70, ignore_eos=True)
            task = asyncio.create_task(engine.beam_search([4] * 20, long))
            while not await engine.call(lambda e: e.has_unfinished):
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(200):
                if not await engine.call(lambda e: e.has_unfinished):
                    break
                await asyncio.sleep(0.01)
            await engine.call(check_free)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 4}, "beam_width"),
        ({"beam_width": 0, "max_tokens": 4}, "beam_width: must be at least 1, got 0"),
        ({"beam_width": 2, "max_tokens": 4, "temperature": 3.0}, "temperature: must be at most 2"),
        ({"beam_width": 2, "max_tokens": 4, "best": True}, "best"),
    ],
)
def test_parameters_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        BeamSearchParams(**values)


def test_a_temperature_adds_the_drawn_token_to_the_candidates() -> None:
    with ends() as e:
        llm = LLM.from_engine(e)
        for seed in itertools.count():
            params = BeamSearchParams(beam_width=1, max_tokens=1, temperature=2.0)
            ((sequence,),) = (output.sequences for output in llm.beam_search([[seed % 64, 5]], params))
            (candidates,) = sequence.logprobs
            if len(candidates) > 3:
                break
            assert seed < 100, "no drawn token was ever among the candidates"
        assert len(candidates) == 1 + 3


def test_wide_beams_over_a_long_text_hold_only_the_beams_that_are_kept() -> None:
    width, length = 60, 4000
    params = BeamSearchParams(beam_width=width, max_tokens=8)
    submission = Preparer(None, 0).prepare("r", [5] * length, SamplingParams())
    search = BeamSearch(submission, params, eos_token_ids=frozenset(), max_model_len=10_000)
    candidates = {token: Logprob(-0.01 * token, token + 1, None) for token in range(2 * width)}
    search.advance([candidates])
    tracemalloc.start()
    try:
        search.advance([candidates] * width)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(search.beams) == width
    assert peak < 4 * width * length * 8, "a list of 8 bytes a token for every beam, not for every candidate"

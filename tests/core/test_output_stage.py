"""The outcome of a request depends on its tokens alone: not on how they arrive, nor on when the output stage runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_kit import PROMPT, Play, play

from trivet.events import CommitEvents
from trivet.output import Output, OutputStage, merge_outputs
from trivet.submission import Preparer
from trivet.testing.scripted import EOS, LETTERS, PieceTokenizer, ScriptedEngine
from trivet_schemas.outputs import CompletionOutput, RequestOutput
from trivet_schemas.sampling import PoolingParams, RequestOutputKind, SamplingParams

_PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b" ",
    b"",
    b"\xe2\x82",
    b"\xac",
    b"\xe2",
    b"\x82\xac",
    b"\xff",
    "é".encode(),
]
TOKENIZER = PieceTokenizer(_PIECES)


def _play(script: Sequence[int], params: SamplingParams, **options: Any) -> Play:
    return play(script, params, **({"tokenizer": TOKENIZER} | options))


def _joined(outputs: list[Output]) -> CompletionOutput:
    total = merge_outputs(outputs, RequestOutputKind.DELTA)
    assert isinstance(total, RequestOutput)
    return total.outputs[0]


# ---------------------------------------------------------------- the reference: looks at all tokens at once


def _visible(tokens: Sequence[int], *, whole: bool) -> str:
    """Text of ``tokens``; characters that are not complete are left out, or shown as U+FFFD if ``whole``."""
    data = TOKENIZER.joined(tokens, skip_special=True)
    text = data.decode("utf-8", "replace")
    if whole:
        return text
    for tail in range(1, 4):  # an unfinished character at the end is at most three bytes long
        ending = data[-tail:]
        if (
            any(_is_beginning(ending + rest) for rest in (b"\x80", b"\x80\x80", b"\x80\x80\x80"))
            and len(ending) == tail
        ):
            return data[:-tail].decode("utf-8", "replace")
    return text


def _is_beginning(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return data[:2] == b"\xe2\x82" and len(data) == 2


def _reference(script: Sequence[int], params: SamplingParams) -> tuple[list[int], str, str, Any]:
    """Tokens, text, finish reason and stop reason, by the rules, with everything in view."""
    assert params.max_tokens is not None
    tokens, reason, stop_reason, hidden = list(script[: params.max_tokens]), "length", None, 0
    for count, token in enumerate(tokens, 1):
        stops = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if stops and count > params.min_tokens:
            tokens, reason = tokens[:count], "stop"
            stop_reason = token if token in params.stop_token_ids else None
            hidden = 0 if params.include_stop_str_in_output else 1
            break
    shown = tokens[: len(tokens) - hidden]
    owner: list[int] = []  # which token (from 1) made a character of the text visible
    for count in range(1, len(shown) + 1):
        owner += [count] * (len(_visible(shown[:count], whole=False)) - len(owner))
    text = _visible(shown, whole=True)
    owner += [len(tokens)] * (len(text) - len(owner))  # shown because the last token came
    for end in range(1, len(text) + 1):
        matches = [stop for stop in params.stop if text[:end].endswith(stop)]
        if matches and owner[end - 1] > params.min_tokens:
            found = max(matches, key=len)
            kept = text[: end if params.include_stop_str_in_output else end - len(found)]
            return tokens[: owner[end - 1]], kept, "stop", found
    return tokens, text, reason, stop_reason


_SCRIPTS = st.lists(st.integers(0, len(_PIECES)), min_size=1, max_size=16)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    script = draw(_SCRIPTS)
    max_tokens = draw(st.integers(1, len(script)))
    return script, {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "stop": draw(st.lists(st.text("ab€\ufffd ", min_size=1, max_size=4), max_size=3)),
        "stop_token_ids": draw(st.lists(st.integers(1, len(_PIECES)), max_size=1)),
        "include_stop_str_in_output": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
    }


@settings(max_examples=400, deadline=None)
@given(
    _cases(),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 6),
    st.sampled_from(list(RequestOutputKind)),
)
def test_any_chunks_and_any_delay_give_what_all_tokens_at_once_give(
    case: tuple[list[int], dict[str, Any]], chunks: list[int], late: int, kind: RequestOutputKind
) -> None:
    script, fields = case
    script = [*script, *[1] * 40]  # the engine never runs dry
    params = SamplingParams(output_kind=kind, logprobs=1, **fields)
    tokens, text, reason, stop_reason = _reference(script, params)
    play = _play(script, params, chunks=chunks, late=late)
    outputs = play.outputs["r"]
    last = play.final().outputs[0]
    whole = _joined(outputs) if kind is RequestOutputKind.DELTA else last
    assert (whole.token_ids, whole.text) == (tokens, text)
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    assert whole.logprobs is not None
    assert [next(iter(position)) for position in whole.logprobs] == tokens
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    if kind is RequestOutputKind.CUMULATIVE:
        texts = [output.outputs[0].text for output in outputs if isinstance(output, RequestOutput)]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


@settings(max_examples=100, deadline=None)
@given(_SCRIPTS, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_text_made_at_the_end_is_the_text_made_on_the_way(script: list[int], chunks: list[int]) -> None:
    texts = {
        _play(script, SamplingParams(max_tokens=len(script), output_kind=kind), chunks=chunks).final().outputs[0].text
        for kind in ("final", "cumulative")
    }
    assert len(texts) == 1


# ---------------------------------------------------------------- single rules


def _ids(text: str) -> list[int]:
    return LETTERS.encode(text)


@pytest.mark.parametrize("max_tokens", [4, 9, 12, 14, 30])
@pytest.mark.parametrize("late", [0, 100])
def test_a_stop_string_streamed_and_not_with_max_tokens_before_inside_and_after_it(max_tokens: int, late: int) -> None:
    script = _ids("one two three four five six seven eight")
    stop = "three four"
    results = {}
    for kind in ("cumulative", "delta", "final"):
        params = SamplingParams(stop=stop, max_tokens=max_tokens, output_kind=kind)
        play = _play(script, params, late=late, tokenizer=LETTERS)
        last = play.final().outputs[0]
        text = _joined(play.outputs["r"]).text if kind == "delta" else last.text
        results[kind] = (text, last.finish_reason, last.stop_reason)
    expected = "one two three four five six seven eight"[:max_tokens]
    reason: tuple[str, str | None] = ("length", None)
    if stop in expected:
        expected, reason = "one two ", ("stop", stop)
    assert set(results.values()) == {(expected, *reason)}


def test_the_last_allowed_token_may_complete_a_stop_string() -> None:
    last = _play(_ids("abcdef"), SamplingParams(stop="cd", max_tokens=4), late=50, tokenizer=LETTERS).final().outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason, len(last.token_ids)) == ("ab", "stop", "cd", 4)


def test_the_engine_is_told_after_how_many_tokens_a_stop_string_ended_the_output() -> None:
    play = _play(_ids("abcdefghij"), SamplingParams(stop="cd", max_tokens=10), chunks=[3], tokenizer=LETTERS)
    assert ("stop", "r", 4, "cd") in play.engine.log
    assert play.engine.steps == 3  # two with tokens, one that reports the end


def test_the_text_of_a_stop_token_is_shown_only_on_request() -> None:
    for include, text in [(False, "ab"), (True, "abc")]:
        params = SamplingParams(stop_token_ids=_ids("c"), include_stop_str_in_output=include)
        last = _play(_ids("abcd"), params, tokenizer=LETTERS).final().outputs[0]
        assert (last.text, last.token_ids, last.finish_reason) == (text, _ids("abc"), "stop")
        assert last.stop_reason == _ids("c")[0]


def test_the_end_of_sequence_is_among_the_ids_and_not_in_the_text() -> None:
    params = SamplingParams(skip_special_tokens=False)
    last = _play([*_ids("ab"), EOS, *_ids("c")], params, tokenizer=LETTERS).final().outputs[0]
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("ab", [*_ids("ab"), EOS], "stop", None)


def test_a_generation_that_ends_without_a_stop_token_shows_all_its_text() -> None:
    # A grammar may end an output whose last token belongs to it.
    play = Play(ScriptedEngine({tuple(PROMPT): _ids("abcdef")}, chunks=[2]))
    play.add(SamplingParams())
    events = play.engine.step()
    play.engine.finish(play.engine.requests["r"], "stop")
    events.finished, play.engine.ended = play.engine.ended, []
    play.take(play.stage.process(events))
    last = play.final().outputs[0]
    assert (last.text, last.finish_reason) == ("ab", "stop")


def test_a_character_that_never_became_whole_is_text_like_any_other() -> None:
    half = 28  # the first two bytes of a euro sign
    for stop, text, reason in [("b\ufffd", "a", "stop"), ("x", "ab\ufffd", "length")]:
        params = SamplingParams(stop=stop, max_tokens=3)
        last = _play([*_ids("ab"), half], params, tokenizer=LETTERS).final().outputs[0]
        assert (last.text, last.finish_reason, len(last.token_ids)) == (text, reason, 3)


def test_an_engine_that_ended_the_request_itself_is_not_told_to_stop() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abcd")})
    told: list[tuple[int, str]] = []
    stage = OutputStage(LETTERS, stop=lambda _, count, text: told.append((count, text)), abort=lambda _: None)
    submission = Preparer(LETTERS, 0).prepare("r", PROMPT, SamplingParams(stop="cd", max_tokens=4))
    stage.add(submission, 0, submission.add(engine, 0))  # type: ignore[arg-type]
    outputs = [output for _ in range(4) for output in stage.process(engine.step())]
    assert isinstance(outputs[-1], RequestOutput)
    assert outputs[-1].outputs[0].stop_reason == "cd"
    assert told == []


def test_invalid_bytes_raise_nothing_and_leave_neighbours_alone() -> None:
    bad, euro = [29, 29, 30, 29], [28, 29]  # \xac \xac \xff \xac, and a whole euro sign
    scripts = {(1,): [*bad, *_ids("ok"), 28], (2,): [*euro, *_ids("fine")]}
    play = Play(ScriptedEngine(scripts))
    for prompt, script in scripts.items():
        play.add(SamplingParams(max_tokens=len(script), output_kind="delta"), prompt, str(prompt[0]))
    play.run()
    assert _joined(play.outputs["1"]).text == "\ufffd\ufffd\ufffd\ufffdok\ufffd"
    assert _joined(play.outputs["2"]).text == "€fine"


def test_without_detokenizing_there_is_no_text_and_no_work_for_it() -> None:
    tokenizer = PieceTokenizer(_PIECES)
    params = SamplingParams(detokenize=False, logprobs=0, max_tokens=3)
    last = _play([1, 2, 3], params, tokenizer=tokenizer).final().outputs[0]
    assert (last.text, last.token_ids, tokenizer.pushes) == ("", [1, 2, 3], 0)
    assert last.logprobs is not None
    assert last.logprobs[0][1].decoded_token is None


def test_final_output_without_stop_strings_is_detokenized_once() -> None:
    tokenizer = PieceTokenizer(_PIECES)
    _play([1] * 50, SamplingParams(max_tokens=50, output_kind="final"), tokenizer=tokenizer)
    assert tokenizer.pushes == 1


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    last = _play([3, 5], SamplingParams(logprobs=0, max_tokens=2)).final().outputs[0]
    assert last.logprobs is not None
    assert [list(position) for position in last.logprobs] == [[3], [5]]
    chosen = last.logprobs[1][5]
    assert (chosen.logprob, chosen.rank, chosen.decoded_token) == (-5 / 8, 6, "aab")
    assert last.cumulative_logprob == pytest.approx(-1.0)


def test_logprobs_name_the_most_likely_tokens_by_rank() -> None:
    last = _play([1, 9], SamplingParams(logprobs=2, max_tokens=2)).final().outputs[0]
    assert last.logprobs is not None
    assert {t: (p.rank, p.logprob) for t, p in last.logprobs[1].items()} == {
        9: (10, -9 / 8),
        0: (1, 0.0),
        1: (2, -1 / 8),
    }
    assert [list(position) for position in last.logprobs] == [[1, 0], [9, 0, 1]]


def test_logprobs_end_with_the_output() -> None:
    params = SamplingParams(stop="b", logprobs=0, max_tokens=10)
    last = _play(_ids("aabaaa"), params, chunks=[6], tokenizer=LETTERS).final().outputs[0]
    assert last.logprobs is not None
    assert len(last.logprobs) == 3
    assert last.cumulative_logprob == pytest.approx(sum(p.logprob for d in last.logprobs for p in d.values()))


def test_prompt_logprobs_survive_a_recomputed_prompt() -> None:
    play = Play(ScriptedEngine({tuple(PROMPT): [1, 2, 3]}, tokenizer=LETTERS))
    play.add(SamplingParams(prompt_logprobs=1, max_tokens=3))
    first = play.engine.step()
    ((request, chunk),) = first.prompt_logprobs
    again = CommitEvents(99, prompt_logprobs=[(request, chunk)])
    for events in (again, first, again):
        play.take(play.stage.process(events))
    found = play.run().final().prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert [next(iter(position)) for position in found[1:] if position] == PROMPT[1:]
    assert len(found) == len(PROMPT)


def test_deltas_carry_the_prompt_logprobs_once() -> None:
    outputs = _play([1, 2, 3], SamplingParams(prompt_logprobs=0, max_tokens=3, output_kind="delta")).outputs["r"]
    assert [isinstance(o, RequestOutput) and o.prompt_logprobs is not None for o in outputs] == [True, False, False]


def test_several_outputs_are_seeded_apart_and_reported_together() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abcd")})
    play = Play(engine)
    submission = play.add(SamplingParams(n=3, seed=7, max_tokens=4, prompt_logprobs=0))
    assert submission.child_ids == ["r#0", "r#1", "r#2"]
    assert [params.seed for _, params in submission.children if isinstance(params, SamplingParams)] == [7, 8, 9]
    assert engine.log[:3] == [("add", "r#0", None), ("add", "r#1", "r#0"), ("add", "r#2", "r#0")]
    engine.finish(engine.requests["r#1"], "length")
    play.run()
    final = play.final()
    assert [(o.index, o.text, o.finish_reason) for o in final.outputs] == [
        (0, "abcd", "length"), (1, "", "length"), (2, "abcd", "length"),
    ]  # fmt: skip
    assert final.prompt_logprobs is not None
    assert not play.outputs["r"][0].finished


def test_each_of_several_outputs_reports_its_end_once() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abcd")})
    play = Play(engine)
    play.add(SamplingParams(n=2, seed=7, max_tokens=4, output_kind="delta"))
    engine.finish(engine.requests["r#1"], "length")
    play.run()
    ends = [c.index for o in play.outputs["r"] if isinstance(o, RequestOutput) for c in o.outputs if c.finish_reason]
    assert ends == [1, 0]


def test_unseeded_outputs_get_seeds_that_follow_from_the_configuration() -> None:
    def seeds(config_seed: int) -> list[int | None]:
        submission = Preparer(None, config_seed).prepare("r", [1], SamplingParams(n=2))
        return [params.seed for _, params in submission.children if isinstance(params, SamplingParams)]

    first, second = seeds(0)
    assert first is not None
    assert second == first + 1
    assert seeds(0) == [first, second]
    assert seeds(1) != [first, second]


def test_the_largest_seed_has_successors() -> None:
    submission = Preparer(None, 0).prepare("r", [1], SamplingParams(n=2, seed=2**63 - 1))
    assert [p.seed for _, p in submission.children if isinstance(p, SamplingParams)] == [2**63 - 1, -(2**63)]


def test_a_fault_ends_with_the_error_and_keeps_what_was_generated() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abcdef")})
    engine.faults[tuple(PROMPT)] = (3, "the model went mad")
    play = Play(engine)
    play.add(SamplingParams())
    final = play.run().final()
    assert (final.error, final.outputs[0].finish_reason, final.outputs[0].text) == (
        "the model went mad",
        "error",
        "abc",
    )


def test_a_tokenizer_that_raises_ends_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = PieceTokenizer(_PIECES)
    tokenizer.poison = 4
    engine = ScriptedEngine({(1,): [1, 2, 4, 1, 1], (2,): [1, 2, 3, 1, 1]}, tokenizer=tokenizer)
    play = Play(engine)
    for prompt in (1, 2):
        play.add(SamplingParams(max_tokens=5), [prompt], str(prompt))
    play.run()
    assert "a poisonous token" in (play.final("1").error or "")
    assert play.final("1").outputs[0].finish_reason == "error"
    assert play.final("2").outputs[0].finish_reason == "length"
    assert "request 1" in caplog.text
    assert ("abort", "1") in engine.log


def test_an_abort_keeps_and_flushes_the_text_so_far() -> None:
    play = Play(ScriptedEngine({tuple(PROMPT): _ids("abcdef")}))
    play.add(SamplingParams(stop="cx"))
    for _ in range(3):
        play.take(play.stage.process(play.engine.step()))
    play.engine.abort(["r"])
    last = play.run().final().outputs[0]
    assert (last.text, last.finish_reason) == ("abc", "abort")


def test_an_id_in_use_again_is_not_confused_with_its_former_request() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abcdef"), (9,): _ids("xyz")})
    play = Play(engine)
    former = play.add(SamplingParams(max_tokens=6))
    late = [engine.step(), engine.step()]
    play.stage.drop(former)
    engine.abort(["r"])
    play.add(SamplingParams(max_tokens=3), [9])
    for events in late:
        assert play.stage.process(events) == []
    assert play.run().final().outputs[0].text == "xyz"


def test_times_and_counts_of_a_request_are_reported() -> None:
    engine = ScriptedEngine({tuple(PROMPT): _ids("abc")})
    play = Play(engine)
    play.add(SamplingParams(stop="b"))
    engine.requests["r"].num_cached_tokens = 2
    engine.requests["r"].num_preemptions = 1
    engine.requests["r"].num_recomputed_tokens = 5
    final = play.run().final()
    metrics = final.metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in times
    assert times == sorted(times, key=lambda t: t or math.inf)
    assert (metrics.num_preemptions, metrics.num_cached_tokens, final.num_cached_tokens) == (1, 2, 2)
    assert metrics.num_recomputed_tokens == 5
    spans = [metrics.queue_seconds, metrics.prefill_seconds, metrics.decode_seconds]
    assert sum(span or 0 for span in spans) == pytest.approx((times[3] or 0) - (times[0] or 0))


def test_everything_can_be_ended_with_one_error() -> None:
    play = Play(ScriptedEngine({tuple(PROMPT): _ids("abc")}))
    play.add(SamplingParams())
    (output,) = play.stage.fail_all("the engine is gone")
    assert isinstance(output, RequestOutput)
    assert (output.finished, output.error, output.outputs[0].finish_reason) == (True, "the engine is gone", "error")
    assert play.stage.num_unfinished == 0


@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_an_end_with_one_error_leaves_the_text_so_far(kind: str) -> None:
    play = Play(ScriptedEngine({tuple(PROMPT): _ids("abcdef")}))
    play.add(SamplingParams(output_kind=kind))
    for _ in range(3):
        play.take(play.stage.process(play.engine.step()))
    (output,) = play.stage.fail_all("the engine is gone")
    assert isinstance(output, RequestOutput)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", _ids("abc"))


def test_a_token_without_text_keeps_no_other_request_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = PieceTokenizer(_PIECES)
    tokenizer.poison = 4
    play = Play(ScriptedEngine({(1,): [4, 4, 4], (2,): [1, 2, 3]}, tokenizer=tokenizer))
    for prompt in (1, 2):
        play.add(SamplingParams(output_kind="final"), [prompt], str(prompt))
    for _ in range(2):
        play.take(play.stage.process(play.engine.step()))
    first, second = play.stage.fail_all("the engine is gone")
    assert isinstance(first, RequestOutput)
    assert isinstance(second, RequestOutput)
    assert (first.outputs[0].text, second.outputs[0].text) == ("", tokenizer.decode([1, 2]))
    assert {output.error for output in (first, second)} == {"the engine is gone"}
    assert "request 1" in caplog.text


def test_a_request_that_pools_has_one_output() -> None:
    play = Play(ScriptedEngine({}))
    play.add(PoolingParams(), [3, 4])
    (output,) = play.run().outputs["r"]
    assert not isinstance(output, RequestOutput)
    assert output.outputs.data.tolist() == [3.0, 4.0]
    assert (output.finished, output.error, output.prompt_token_ids) == (True, None, [3, 4])

"""The best of several outputs, and what making the text of a long one costs."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit import check_free, engine
from output_kit import PROMPT, Play, play

from trivet import LLM, BeamSearchParams, RequestError
from trivet.testing.fake_sampler import FakeSampler
from trivet.testing.scripted import LETTERS, PieceTokenizer, ScriptedEngine
from trivet_schemas.outputs import RequestOutput
from trivet_schemas.sampling import RequestOutputKind, SamplingParams


class _Choosing(ScriptedEngine):
    """Every output of a prompt has a script of its own."""

    def __init__(self, scripts: list[str]) -> None:
        super().__init__({})
        self.own = {f"r#{index}": LETTERS.encode(script) for index, script in enumerate(scripts)}

    def _next_tokens(self, request: Any, chunk: int) -> list[int]:
        self.scripts = {tuple(PROMPT): self.own[request.request_id]}
        return super()._next_tokens(request, chunk)


# The scripted logprob of the letter number i is -i/8.
_BY_RANK = ["aa", "ab", "ba", "ac", "zz"]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_outputs_are_returned_by_rank(logprobs: int | None) -> None:
    engine = _Choosing(["zz", "ab", "aa", "ac", "ba"])
    played = Play(engine)
    played.add(SamplingParams(n=4, best_of=5, max_tokens=2, logprobs=logprobs, seed=1))
    final = played.run().final()
    assert len(played.outputs["r"]) == 1, "an output was given out before the best were known"
    assert [(o.index, o.text) for o in final.outputs] == list(enumerate(_BY_RANK[:4]))
    assert [e for e in engine.log if e[0] == "add"] == [("add", f"r#{i}", "r#0" if i else None) for i in range(5)]
    for output in final.outputs:
        if logprobs is None:
            assert (output.logprobs, output.cumulative_logprob) == (None, None)
        else:
            assert output.cumulative_logprob == -sum(output.token_ids) / 8


def test_tokens_behind_a_stop_string_do_not_count_for_the_rank() -> None:
    played = Play(_Choosing(["abz", "ca"]), late=3)
    played.add(SamplingParams(n=1, best_of=2, max_tokens=3, stop="b", seed=1))
    (best,) = played.run().final().outputs
    assert (best.text, best.stop_reason) == ("a", "b")


def test_an_output_that_failed_is_chosen_last() -> None:
    engine = _Choosing(["aa", "zz"])
    engine.before_step = lambda e: (
        e.finish(e.requests["r#0"], "error", message="no") if e.steps == 1 and "r#0" in e.requests else None
    )
    played = Play(engine)
    played.add(SamplingParams(n=1, best_of=2, max_tokens=2, seed=1))
    (best,) = played.run().final().outputs
    assert (best.text, best.finish_reason) == ("zz", "length")


class _Counting(PieceTokenizer):
    """Counts the tokens that are made text."""

    def __init__(self) -> None:
        super().__init__([b"ab", b" ", b"stop"])
        self.tokens = self.decoded = 0

    def joined(self, token_ids: Any, *, skip_special: bool) -> bytes:
        ids = list(token_ids)
        self.tokens += len(ids)
        return super().joined(ids, skip_special=skip_special)

    def decode(self, *args: Any, **options: Any) -> str:
        self.decoded += 1
        return super().decode(*args, **options)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("stop", [[], ["stop it"]])
def test_every_token_is_made_text_once_however_long_the_output(kind: RequestOutputKind, stop: list[str]) -> None:
    tokenizer, count = _Counting(), 3000
    params = SamplingParams(max_tokens=count, stop=stop, output_kind=kind)
    played = play([1 + i % 3 for i in range(count)], params, tokenizer=tokenizer)
    assert (tokenizer.tokens, tokenizer.decoded) == (count, 0)
    if kind is RequestOutputKind.DELTA:
        deltas = [o.outputs[0] for o in played.outputs["r"] if isinstance(o, RequestOutput)]
        assert max(len(d.text) for d in deltas) <= len("abstop it"), "a delta repeats what was given out"
        assert "".join(d.text for d in deltas) == "ab stop" * (count // 3)


def test_the_best_of_a_batch_are_those_of_single_requests_with_their_seeds() -> None:
    with engine() as e:
        llm, prompt = LLM.from_engine(e), list(range(30, 49))
        alone = [
            llm.generate([prompt], SamplingParams(seed=3 + i, max_tokens=7, logprobs=0), use_tqdm=False)[0].outputs[0]
            for i in range(6)
        ]
        alone.sort(key=lambda o: -(o.cumulative_logprob or 0))
        chosen, other = llm.generate(
            [prompt, prompt[:5]],
            [SamplingParams(n=2, best_of=6, seed=3, max_tokens=7), SamplingParams(max_tokens=7)],
            use_tqdm=False,
        )
        assert [o.token_ids for o in chosen.outputs] == [o.token_ids for o in alone[:2]]
        assert len(other.outputs) == 1
        check_free(e)


def test_an_engine_itself_takes_one_output_per_request() -> None:
    with engine() as e:
        for params, field in ((SamplingParams(n=2), "n"), (SamplingParams(best_of=2), "best_of")):
            with pytest.raises(
                RequestError, match=f"^{field}: the engine takes one output per request, got 2"
            ) as caught:
                e.add_request("r", [1, 2], params)
            assert caught.value.param == field


def test_without_a_sampler_that_reports_logprobs_nothing_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSampler, "fields", frozenset({"temperature", "seed"}))
    with engine() as e:
        llm = LLM.from_engine(e)
        with pytest.raises(RequestError, match="logprobs: not supported"):
            llm.generate([[1, 2]], SamplingParams(best_of=2), use_tqdm=False)
        with pytest.raises(RequestError, match="logprobs: not supported"):
            llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2, max_tokens=2))

"""``LLM``: vLLM's offline calls, over an engine that plays from a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trivet
from trivet import LLM, OverloadedError, PoolingParams, RequestError, SamplingParams
from trivet.testing.scripted import EOS, LETTERS, ScriptedEngine


def _ids(text: str) -> list[int]:
    return LETTERS.encode(text)


def _key(text: str) -> tuple[int, ...]:
    return tuple(_ids(text))


_SCRIPTS = {_key(k): _ids(v) for k, v in {"a": "xyzxyz", "b": "uvw", "c": "rst", "hello": "world"}.items()}


def _llm(**options: Any) -> tuple[LLM, ScriptedEngine]:
    engine = ScriptedEngine(_SCRIPTS, **options)
    return LLM.from_engine(engine), engine  # type: ignore[arg-type]


def _texts(llm: LLM, prompts: Any, **params: Any) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, **params), use_tqdm=False)
    assert all(output.finished for output in outputs)
    return [output.outputs[0].text for output in outputs]


# ---------------------------------------------------------------- prompts and parameters


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("a", ["xyz"]),
        (["a", "b"], ["xyz", "uvw"]),
        (_ids("b"), ["uvw"]),
        ([_ids("b"), _ids("a")], ["uvw", "xyz"]),
        (np.array(_ids("hello")), ["wor"]),
        ({"prompt": "c"}, ["rst"]),
        ({"prompt_token_ids": _ids("c")}, ["rst"]),
        (["a", {"prompt": "b"}, _ids("c")], ["xyz", "uvw", "rst"]),
        ([], []),
        (("a", "c"), ["xyz", "rst"]),
    ],
)
def test_prompts_in_every_form(prompts: Any, texts: list[str]) -> None:
    assert _texts(_llm()[0], prompts) == texts


def test_outputs_carry_the_prompt() -> None:
    text, ids = _llm()[0].generate(["hello", _ids("hello")], use_tqdm=False)
    assert (text.prompt, text.prompt_token_ids) == ("hello", _ids("hello"))
    assert (ids.prompt, ids.prompt_token_ids) == (None, _ids("hello"))
    assert text.request_id != ids.request_id


def test_results_are_in_the_order_of_the_prompts_however_they_end() -> None:
    llm, _ = _llm(chunks=[2])
    params = [SamplingParams(max_tokens=n) for n in (6, 1, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["xyzxyz", "u", "rst"]


def test_without_parameters_the_defaults_count() -> None:
    llm, engine = _llm()
    engine.scripts = {_key("a"): _ids("x" * 50)}
    (output,) = llm.generate("a", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens == 16


def test_several_outputs_per_prompt() -> None:
    (output,) = _llm()[0].generate("a", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [(o.index, o.text) for o in output.outputs] == [(0, "xy"), (1, "xy"), (2, "xy")]


def test_a_wrong_number_of_parameters_is_refused() -> None:
    with pytest.raises(RequestError, match="got 1 for 2 prompts"):
        _llm()[0].generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="priority: got 3 values for 2 prompts"):
        _llm()[0].generate(["a", "b"], priority=[1, 2, 3], use_tqdm=False)


def test_parameters_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        _llm()[0].generate("a", PoolingParams(), use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", ["", [], {"prompt": ""}, {"promt": "a"}, {"prompt": "a", "multi_modal_data": {"image": 1}}]
)
def test_a_prompt_that_is_refused_is_named_and_nothing_runs(bad: Any) -> None:
    llm, engine = _llm()
    with pytest.raises(RequestError, match=r"^prompt 2: "):
        llm.generate(["a", "b", bad], use_tqdm=False)
    assert (engine.log, engine.steps) == ([], 0)
    assert _texts(llm, "a") == ["xyz"]


@pytest.mark.parametrize("bad", [None, 5])
def test_what_is_no_prompt_at_all_is_refused_like_a_prompt(bad: Any) -> None:
    llm, engine = _llm()
    with pytest.raises(RequestError, match=f"^prompt: must be text, a list of token ids, .* got {bad}"):
        llm.generate(bad, use_tqdm=False)
    assert engine.steps == 0


def test_what_the_engine_refuses_is_named_before_anything_is_queued() -> None:
    llm, engine = _llm(max_model_len=4, max_queued=1)
    with pytest.raises(RequestError, match=r"^prompt 1: .* has 5 tokens") as caught:
        llm.generate(["a", "hello"], use_tqdm=False)
    assert caught.value.param == "prompt"
    assert engine.log == []


def test_text_needs_a_tokenizer_and_ids_do_not() -> None:
    llm, _ = _llm(tokenizer=None)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(RequestError, match="stop: "):
        llm.generate(_ids("a"), SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()
    (output,) = llm.generate(_ids("a"), SamplingParams(max_tokens=3), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (_ids("xyz"), "")


# ---------------------------------------------------------------- running


def test_a_bounded_queue_is_fed_as_it_empties() -> None:
    llm, engine = _llm(max_queued=2)
    assert _texts(llm, ["a", "b", "c"] * 5) == ["xyz", "uvw", "rst"] * 5
    assert engine.steps >= 15 * 3 / 2


def test_outputs_of_one_prompt_may_outnumber_the_queue() -> None:
    llm, _ = _llm(max_queued=2)
    (output,) = llm.generate("a", SamplingParams(n=5, max_tokens=3), use_tqdm=False)
    assert [o.text for o in output.outputs] == ["xyz"] * 5


def test_a_queue_that_takes_nothing_is_an_error() -> None:
    llm, _ = _llm(max_queued=0)
    with pytest.raises(OverloadedError):
        llm.generate("a", use_tqdm=False)


def test_a_fault_of_one_request_is_in_its_output() -> None:
    llm, engine = _llm()
    engine.faults[_key("b")] = (1, "out of luck")
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [(o.error, o.outputs[0].finish_reason, o.outputs[0].text) for o in outputs] == [
        (None, "length", "xyz"),
        ("out of luck", "error", "u"),
    ]


def _at_step(step: int, act: Callable[[], object]) -> Callable[[ScriptedEngine], None]:
    def before(engine: ScriptedEngine) -> None:
        if engine.steps == step:
            act()

    return before


def test_an_interrupt_aborts_everything_between_two_steps_and_the_engine_goes_on() -> None:
    llm, engine = _llm(max_queued=2)
    engine.before_step = _at_step(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=6), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [entry for entry in engine.log if entry[0] == "abort"] == [("abort", "0"), ("abort", "1")]
    assert not engine.has_work
    assert llm._stage.num_unfinished == 0
    engine.before_step = None
    assert _texts(llm, ["a", "b"]) == ["xyz", "uvw"]


def test_a_second_interrupt_does_not_wait_for_the_step() -> None:
    llm, engine = _llm()
    after_interrupts: list[str] = []

    def stuck() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        after_interrupts.append("the step went on")

    engine.before_step = _at_step(0, stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", use_tqdm=False)
    assert after_interrupts == []


def test_a_program_that_handles_interrupts_itself_keeps_its_handler() -> None:
    llm, engine = _llm()
    seen: list[int] = []
    former = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        engine.before_step = _at_step(0, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert _texts(llm, "a") == ["xyz"]
    finally:
        signal.signal(signal.SIGINT, former)
    assert seen == [signal.SIGINT]


def test_an_exception_of_a_step_leaves_nothing_behind() -> None:
    llm, engine = _llm()

    def explode() -> None:
        engine.before_step = None
        raise MemoryError("no more")

    engine.before_step = _at_step(1, explode)
    with pytest.raises(MemoryError):
        llm.generate(["a", "b"], use_tqdm=False)
    assert not engine.has_work
    assert _texts(llm, "a") == ["xyz"]


def test_calls_of_several_threads_run_one_after_the_other() -> None:
    llm, _ = _llm()
    results: dict[str, list[str]] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: results.update({p: _texts(llm, [p] * 20)}))
        for prompt in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": ["xyz"] * 20, "b": ["uvw"] * 20, "c": ["rst"] * 20}


# ---------------------------------------------------------------- progress


class _Bar:
    def __init__(self, **options: Any) -> None:
        self.total, self.updates, self.closed = options["total"], 0, False

    def update(self, count: int) -> None:
        self.updates += count

    def close(self) -> None:
        self.closed = True


def test_a_progress_bar_of_the_callers_own() -> None:
    bars: list[_Bar] = []

    def make(**options: Any) -> _Bar:
        bars.append(_Bar(**options))
        return bars[-1]

    _llm()[0].generate(["a", "b"], use_tqdm=make)
    (bar,) = bars
    assert (bar.total, bar.updates, bar.closed) == (2, 2, True)


def test_the_default_progress_bar_counts_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    _llm()[0].generate(["a", "b"])
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_no_progress_bar_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    _llm()[0].generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_many_prompts_cost_as_much_each_as_few() -> None:
    def calls(count: int) -> int:
        llm, _ = _llm(max_queued=8)
        made = 0

        def count_call(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal made
            made += event == "call"

        llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)  # whatever is made once
        prompts = ["a", "b", "c", {"prompt": "hello"}] * (count // 4)
        sys.setprofile(count_call)
        try:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
        finally:
            sys.setprofile(None)
        assert [o.outputs[0].text for o in outputs[-4:]] == ["xy", "uv", "rs", "wo"]
        return made

    assert calls(3200) <= 16.5 * calls(200)


# ---------------------------------------------------------------- chat and pooling


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_renders_one_conversation_or_several() -> None:
    llm, _ = _llm()
    one = llm.chat(_user("hello"), SamplingParams(max_tokens=5), use_tqdm=False)
    assert [(o.prompt, o.outputs[0].text) for o in one] == [("hello", "world")]
    several = llm.chat([_user("a"), _user("b")], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [o.outputs[0].text for o in several] == ["xyz", "uvw"]


def test_chat_passes_variables_to_the_template() -> None:
    output = _llm()[0].chat(_user("hell"), use_tqdm=False, chat_template_kwargs={"suffix": "o"})[0]
    assert output.prompt == "hello"


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    bad = [{"role": "assistant", "content": "a"}]
    with pytest.raises(RequestError, match=r"^conversation 1: the last message must not"):
        _llm()[0].chat([_user("a"), bad], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="at least one message"):
        _llm()[0].chat([], use_tqdm=False)


def test_embed_and_encode() -> None:
    llm, _ = _llm()
    embedded = llm.embed(["a", "hello"], use_tqdm=False)
    assert [o.outputs.embedding for o in embedded] == [[float(i) for i in _ids(t)] for t in ("a", "hello")]
    (encoded,) = llm.encode("a", PoolingParams(), use_tqdm=False)
    assert encoded.outputs.data.tolist() == [float(_ids("a")[0])]
    assert encoded.prompt_token_ids == _ids("a")


# ---------------------------------------------------------------- the rest


def test_the_tokenizer_is_in_reach() -> None:
    assert _llm()[0].get_tokenizer() is LETTERS


def test_a_context_manager_shuts_the_engine_down() -> None:
    llm, engine = _llm()
    with llm:
        assert _texts(llm, "a") == ["xyz"]
    assert engine.is_shut_down


def test_an_end_of_sequence_ends_the_output() -> None:
    llm, engine = _llm()
    engine.scripts = {_key("a"): [*_ids("xy"), EOS, *_ids("z")]}
    (output,) = llm.generate("a", use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("xy", "stop")


def test_importing_trivet_loads_nothing_else() -> None:
    code = (
        "import sys, trivet\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'pluggy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for name in ('LLM', 'AsyncEngine', 'SamplingParams', 'hookimpl'): getattr(trivet, name)\n"
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_every_public_name_exists_and_unknown_ones_do_not() -> None:
    assert all(getattr(trivet, name) is not None for name in trivet.__all__)
    assert set(trivet.__all__) <= set(dir(trivet))
    with pytest.raises(AttributeError, match="LLMM"):
        _ = trivet.LLMM  # type: ignore[attr-defined]

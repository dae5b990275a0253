"""``trivet chat`` with messages from a pipe, and at a terminal."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from launcher_kit import Result, Run, Site, continuation

from trivet.launcher._session import Session

_GREEDY = {"sampling": {"temperature": 0, "max_tokens": 6}}
Chat = Callable[..., Result]


@pytest.fixture
def chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return a function that runs the command with lines on stdin."""

    def chat(config: Any, lines: list[str], *arguments: str) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", config, *arguments)

    return chat


def _answers(*messages: str, system: str = "", count: int = 6) -> list[str]:
    """The answers to messages that follow each other in one conversation."""
    text, answers = system, []
    for message in messages:
        text += f"user: {message}."
        answers.append(continuation(f"{text}assistant: ", count))
        text += f"assistant: {answers[-1]}."
    return answers


def test_each_line_is_a_message_of_one_conversation(site: Site, chat: Chat) -> None:
    result = chat(site.config(generate=_GREEDY), ["Hello", "", "and then"])
    assert result.code == 0
    assert result.out.splitlines() == _answers("Hello", "and then")


def test_the_system_message_stands_first(site: Site, chat: Chat) -> None:
    result = chat(site.config(generate=_GREEDY), ["Hello"], "--system", "Be kind")
    assert result.out.splitlines() == _answers("Hello", system="system: Be kind.")


def test_reset_forgets_all_but_the_system_message(site: Site, chat: Chat) -> None:
    result = chat(site.config(generate=_GREEDY), ["Hello", "/reset", "Hello"], "--system", "Be kind")
    assert result.out.splitlines() == _answers("Hello", system="system: Be kind.") * 2


def test_exit_leaves(site: Site, chat: Chat) -> None:
    result = chat(site.config(generate=_GREEDY), ["Hello", "/exit", "again"])
    assert (result.code, len(result.out.splitlines())) == (0, 1)


def test_an_unknown_command_is_no_message(site: Site, chat: Chat) -> None:
    result = chat(site.config(generate=_GREEDY), ["/rest", "Hello"])
    assert "'/rest'" in result.err
    assert "/reset" in result.err
    assert result.out.splitlines() == _answers("Hello")


def test_an_answer_may_fill_the_context_unless_the_file_bounds_it(site: Site, chat: Chat) -> None:
    config = site.config(model={"max_model_len": 100}, generate={"sampling": {"temperature": 0}})
    result = chat(config, ["Hello"])
    prompt = "user: Hello.assistant: "
    assert result.out == continuation(prompt, 100 - len(prompt)) + "\n"


def test_a_message_beyond_the_context_is_refused_and_forgotten(site: Site, chat: Chat) -> None:
    result = chat(site.config(model={"max_model_len": 64}, generate=_GREEDY), ["x" * 70, "Hello"])
    assert result.code == 2
    assert "64" in result.err
    assert "/reset" in result.err
    assert result.out.splitlines() == _answers("Hello")


def test_a_failed_answer_is_reported(site: Site, chat: Chat) -> None:
    result = chat(site.config(plugins=site.spoil("u"), generate=_GREEDY), ["Hello"])
    assert result.code == 1
    assert "NaN" in result.err


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    site: Site, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Session.step
    count = 0

    def interrupted_step(session: Session) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(session)

    monkeypatch.setattr(Session, "step", interrupted_step)
    result = chat(site.config(generate=_GREEDY), ["Hello", "more"])
    assert result.code == 0
    first, second = result.out.splitlines()
    assert first == _answers("Hello")[0][:3]
    assert second == continuation(f"user: Hello.assistant: {first}.user: more.assistant: ", 6)


def test_text_appears_as_it_is_made(site: Site, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    step = Session.step
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    before_steps: list[str] = []

    def watch(session: Session) -> Any:
        before_steps.append(seen[-1] if seen else "")
        return step(session)

    monkeypatch.setattr(Session, "step", watch)
    from trivet.launcher import main

    assert main(["chat", str(site.config(generate=_GREEDY))]) == 0
    answer = _answers("Hello")[0]
    assert before_steps[:6] == [answer[:n] for n in range(6)]


_NO_TEMPLATE = """
from trivet.testing.fakes import FakeTokenizer

class Plain(FakeTokenizer):
    has_chat_template = False

@hookimpl
def trivet_providers():
    return [Provider("tokenizer", "plain", "plain_module:Plain")]
"""


def test_a_model_without_a_chat_template_is_refused(site: Site, chat: Chat, run: Run) -> None:
    site.plugin("plain", _NO_TEMPLATE)
    config = site.config(plugins={"tokenizer": "plain"}, generate={"chat": True})
    for result in (chat(config, ["Hello"]), run("generate", config, "-p", "Hello")):
        assert result.code == 2
        assert "'demo' has no chat template" in result.err
        assert "chat_template" in result.err


def test_a_terminal_is_told_how_to_leave(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers: list[Any] = [KeyboardInterrupt, "Hello", EOFError]

    def read(_prompt: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    result = run("chat", site.config(generate=_GREEDY))
    assert result.code == 0
    assert "Ctrl-D" in result.err
    assert _answers("Hello")[0] in result.out.splitlines()

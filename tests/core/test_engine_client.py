"""``AsyncEngine`` as front ends see it: the calls of ``EngineClient``, and what only an engine nearby offers."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest

from trivet import AsyncEngine, EngineUnhealthyError
from trivet.roles import EngineClient
from trivet.testing.scripted import LETTERS, ScriptedEngine

MEMBERS = [name for name in vars(EngineClient) if not name.startswith("_")]


def parameters(function: Any) -> Any:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_an_engine_in_this_process_answers_every_call_of_a_client() -> None:
    assert {"generate", "chat", "encode", "abort", "explain", "check_health"} <= set(MEMBERS)
    for name in MEMBERS:
        wanted, offered = vars(EngineClient)[name], vars(AsyncEngine)[name]
        assert type(offered) is type(wanted), name
        if not isinstance(wanted, property):
            assert parameters(offered) == parameters(wanted), name


@pytest.mark.asyncio
async def test_a_function_is_called_with_the_engine_on_its_thread() -> None:
    scripted = ScriptedEngine({tuple(LETTERS.encode("a")): LETTERS.encode("xyz")})
    async with AsyncEngine.from_engine(scripted) as engine:  # type: ignore[arg-type]
        seen, thread = await engine.call(lambda it: (it, threading.current_thread().name))
        assert seen is scripted
        assert thread == "trivet-engine"
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda _: 1 // 0)
        assert engine.is_running
    with pytest.raises(EngineUnhealthyError):
        await engine.call(lambda it: it)

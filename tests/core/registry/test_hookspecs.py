"""The documented form of every hook, and the agreement of specs, facade and role classes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trivet import hookspecs
from trivet.hooks import EngineHooks, PhaseAdapter, WorkerHooks
from trivet.registry.validation import core_specs
from trivet.roles import Drafter, Executor, Model, Sampler, Scheduler

HOOKS = sorted(core_specs())
PHASES = {
    "trivet_schedule": (EngineHooks, Scheduler.schedule),
    "trivet_run": (EngineHooks, Executor.submit),
    "trivet_commit": (EngineHooks, None),
    "trivet_forward": (WorkerHooks, Model.forward),
    "trivet_sample": (WorkerHooks, Sampler.sample),
    "trivet_draft": (WorkerHooks, Drafter.propose),
}


def signature(function: Any) -> list[tuple[str, Any]]:
    """Names and annotations of arguments (without self), and of the result."""
    found = inspect.signature(function)
    parameters = [(p.name, p.annotation) for p in found.parameters.values() if p.name != "self"]
    return [*parameters, ("return", found.return_annotation)]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_in_the_same_form(hook: str) -> None:
    text = " ".join((inspect.getdoc(getattr(hookspecs, hook)) or "").split())
    positions = [text.find(part) for part in ("Fires:", "Default:", "Order:", "Mutability:", "Thread:", "Hot path:")]
    assert -1 not in positions
    assert positions == sorted(positions)
    hot_path = text[positions[-1] :].removeprefix("Hot path:").strip()
    assert hot_path.startswith(("start-up", "step", "event"))


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_of_one_kind(hook: str) -> None:
    kinds = (
        hookspecs.PROVIDER_HOOKS,
        hookspecs.ENGINE_PHASES,
        hookspecs.WORKER_PHASES,
        hookspecs.OBSERVER_HOOKS,
    )
    assert sum(hook in kind for kind in kinds) == 1


@pytest.mark.parametrize("hook", PHASES)
def test_a_phase_agrees_with_facade_adapter_and_role(hook: str) -> None:
    facade, method = PHASES[hook]
    expected = signature(getattr(hookspecs, hook))
    assert signature(getattr(facade, f"_call_{hook.removeprefix('trivet_')}")) == expected
    assert signature(getattr(PhaseAdapter, hook)) == expected
    if method is not None:
        assert signature(method) == expected
    assert hook.removeprefix("trivet_") in facade.phases


@pytest.mark.parametrize("hook", hookspecs.OBSERVER_HOOKS)
def test_an_observer_agrees_with_the_facade(hook: str) -> None:
    assert signature(getattr(EngineHooks, hook.removeprefix("trivet_"))) == signature(getattr(hookspecs, hook))


def test_the_facade_has_nothing_but_the_hooks() -> None:
    public = {name for name in vars(EngineHooks) if not name.startswith("_")} - {"bind", "has_observers", "phases"}
    assert public == {hook.removeprefix("trivet_") for hook in hookspecs.OBSERVER_HOOKS}
    assert EngineHooks.phases == tuple(hook.removeprefix("trivet_") for hook in hookspecs.ENGINE_PHASES)
    assert WorkerHooks.phases == tuple(hook.removeprefix("trivet_") for hook in hookspecs.WORKER_PHASES)

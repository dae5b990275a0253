"""An extension whose two halves talk through plans and results: the engine's numbers plans, each worker answers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trivet.hookspecs import hookimpl
from trivet.roles.base import Side


class Asking:
    """The engine's half; a plan is read-only but for its extensions."""

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Generator[None, Any, Any]:
        plan = yield
        plan.extensions["rank"] = plan.step_id.to_bytes(4, "little")
        return plan


class Answering:
    """The worker's half."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @hookimpl(wrapper=True)
    def trivet_forward(self, batch: Any) -> Generator[None, Any, Any]:
        output = yield
        self._context.result_extensions["rank"] = self._context.plan_extensions["rank"]
        return output


@hookimpl
def trivet_extend(context: Any) -> list[Any]:
    return [Asking() if context.side is Side.ENGINE else Answering(context)]

"""A grammar that takes its time to compile and allows only tokens of one parity, alternating."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.hookspecs import hookimpl
from trivet.provider import Provider
from trivet.roles import Grammar, Matcher


class Alternating(Matcher):
    """Even, odd, even, …; complete after ``limit`` tokens."""

    def __init__(self, limit: int) -> None:
        self._accepted: list[int] = []
        self._limit = limit

    def allowed(self, token_id: int) -> bool:
        return token_id % 2 == len(self._accepted) % 2

    def accept(self, token_id: int) -> bool:
        if self.is_terminated() or not self.allowed(token_id):
            return False
        self._accepted.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        del self._accepted[len(self._accepted) - count :]

    def fill_bitmask(self, out: Any) -> None:
        bits = np.array([self.allowed(t) for t in range(32 * len(out))], np.uint8)
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def is_terminated(self) -> bool:
        return len(self._accepted) >= self._limit


class SlowGrammar(Grammar):
    """Serves the regex ``alternating:N``; anything else does not compile. Takes about three steps of idle polling."""

    def __init__(self, context: Any, options: Any) -> None:
        pass

    def validate(self, params: Any) -> bool:
        return params.structured_outputs.regex is not None

    def compile(self, params: Any, output_ids: Sequence[int]) -> Matcher:
        time.sleep(0.02)
        kind, _, limit = params.structured_outputs.regex.partition(":")
        if kind != "alternating":
            raise ValueError(f"regex: cannot compile {params.structured_outputs.regex!r}")
        matcher = Alternating(int(limit))
        for token in output_ids:
            assert matcher.accept(token), "the outputs so far must obey the grammar"
        return matcher


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("grammar", "slow", "grammars:SlowGrammar")]

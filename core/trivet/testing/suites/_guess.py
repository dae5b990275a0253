"""A drafter for the fake model that guesses right about every second time, in chains or in trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from trivet.hookspecs import hookimpl
from trivet.plan import Ragged
from trivet.provider import Provider
from trivet.roles import Drafter, DraftInputs, Drafts
from trivet.testing.fake_model import mix, reference_tokens
from trivet_schemas.options import Options


class GuessOptions(Options):
    """Options of the drafter ``guess``."""

    num_tokens: int = Field(4, ge=1)
    """Proposals per step."""
    trees: bool = False
    """Whether proposals branch."""
    windows: tuple[int | None, ...] = (None,)
    """Windows of the fake model's layers."""


class GuessDrafter(Drafter):
    """Knows the fake model's rule; whether a guess is right, and where a branch goes, is a hash of the tokens."""

    def __init__(self, context: Any, options: GuessOptions) -> None:
        self.num_tokens, self._trees, self._windows = options.num_tokens, options.trees, options.windows

    def propose(self, inputs: DraftInputs) -> Drafts:
        """Proposals for the rows that want some."""
        guesses = [
            self._guess(inputs.tokens[slot, : inputs.lengths[slot]].tolist(), k)
            for slot, k in zip(inputs.slots.tolist(), inputs.k.tolist(), strict=True)
        ]
        tokens = Ragged.from_rows([tokens for tokens, _ in guesses])
        return Drafts(tokens, Ragged.from_rows([parents for _, parents in guesses]) if self._trees else None)

    def _guess(self, known: list[int], k: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(k):
            dice = int(mix(np.array([sum(known) + 31 * len(known) + 7 * node], np.uint64))[0])
            parent = dice % (node + 1) - 1 if self._trees else node - 1
            path, up = [], parent
            while up >= 0:
                path.append(tokens[up])
                up = parents[up]
            right = reference_tokens(known + path[::-1], 1, windows=self._windows)[0]
            tokens.append(right if dice >> 32 & 1 else (right + 1 + (dice >> 33) % 60) % 64)
            parents.append(parent)
        return tokens, parents


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The drafter's descriptor."""
    return [Provider("drafter", "guess", f"{__name__}:GuessDrafter", options=GuessOptions)]

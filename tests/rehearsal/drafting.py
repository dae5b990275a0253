"""A drafter that proposes random trees: some branches right, most wrong, so that every kind of verification happens."""

from __future__ import annotations

import random
from typing import Any

from trivet.hookspecs import hookimpl
from trivet.plan import Ragged
from trivet.provider import Provider
from trivet.roles import Drafter, Drafts
from trivet.testing.fake_model import reference_tokens


class RandomTreeDrafter(Drafter):
    """Grows a tree of up to ``k`` nodes; a node's token is the model's own with probability one half, else random."""

    num_tokens = 5

    def __init__(self, context: Any, options: Any) -> None:
        self._rng = random.Random(5)

    def propose(self, inputs: Any) -> Drafts:
        trees = [
            self._tree(inputs.tokens[slot, : inputs.lengths[slot]].tolist(), k) if k else ([], [])
            for slot, k in zip(inputs.slots.tolist(), inputs.k.tolist(), strict=True)
        ]
        return Drafts(Ragged.from_rows([t for t, _ in trees]), Ragged.from_rows([p for _, p in trees]))

    def _tree(self, known: list[int], k: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(self._rng.randint(1, k)):
            parent = self._rng.randrange(-1, node)
            path, up = [], parent
            while up >= 0:
                path.append(tokens[up])
                up = parents[up]
            right = reference_tokens(known + path[::-1], 1)[0]
            tokens.append(right if self._rng.random() < 0.5 else self._rng.randrange(64))
            parents.append(parent)
        return tokens, parents


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("drafter", "random_tree", "drafting:RandomTreeDrafter")]

"""Outputs of one prompt that share its blocks draw the tokens that they would draw as requests of their own."""

from __future__ import annotations

import random
from typing import Any

import kit
import pytest
from sharing import Session, Work

from trivet_schemas.sampling import SamplingParams

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 33)
OUTPUTS = 3


def make_work(seed: int) -> tuple[Work, list[SamplingParams], list[int | None]]:
    """Prompts with ``OUTPUTS`` seeded outputs each; the first of them is the parent of the others."""
    rng = random.Random(seed)
    work: Work = []
    params: list[SamplingParams] = []
    parents: list[int | None] = []
    for length in LENGTHS:
        prompt = [rng.randrange(kit.VOCAB) for _ in range(length)]
        first = len(work)
        for i in range(OUTPUTS):
            count = 16 - 4 * i  # the parent goes on longest: its blocks are there as long as it runs
            work.append((prompt, count))
            params.append(SamplingParams(temperature=1, top_p=0.95, seed=length + i, max_tokens=count, ignore_eos=True))
            parents.append(first if i else None)
    return work, params, parents


@pytest.fixture(scope="module")
def alone(library: Any) -> Any:
    """Tokens of requests that share nothing and run one by one, by family."""
    made: dict[str, list[list[int]]] = {}

    def get(family: str) -> list[list[int]]:
        if family not in made:
            settings = kit.settings(library.path(family), family, block_size=16, budget=100_000, small=False)
            settings["plugins"]["cache"]["prefix_caching"] = False
            work, params, _ = make_work(len(family))
            with Session(settings) as session:
                ran = [session.run([one], [how]) for one, how in zip(work, params, strict=True)]
            assert all(one.cached == [0] for one in ran)
            made[family] = [one.outputs[0] for one in ran]
        return made[family]

    return get


CASES = [
    ("llama", 1, 64, True, True),
    ("llama", 8, 7, False, False),
    ("qwen3", 16, 64, True, False),
    ("gemma3_text", 8, 100_000, False, True),
    ("gemma3_text", 1, 7, True, True),
    ("gemma3_text", 16, 64, False, False),
    ("mistral", 8, 64, True, True),
    ("mistral", 1, 7, False, False),
]


@pytest.mark.parametrize(("family", "block_size", "budget", "caching", "small"), CASES)
def test_forks_draw_what_separate_requests_draw(
    library: Any, alone: Any, family: str, block_size: int, budget: int, caching: bool, small: bool
) -> None:
    settings = kit.settings(library.path(family), family, block_size=block_size, budget=budget, small=small)
    settings["plugins"]["cache"]["prefix_caching"] = caching
    work, params, parents = make_work(len(family))
    want = alone(family)
    assert len({tuple(tokens[:4]) for tokens in want}) > len(LENGTHS), "seeds make outputs differ"
    # In a small pool other prompts would take the place of the children until their parents have ended.
    at_once = OUTPUTS if small else len(work)
    with Session(settings) as session:
        for _ in range(2):
            ran = [
                session.run(work[start:end], params[start:end], parents[:at_once] if small else parents)
                for start, end in ((at, at + at_once) for at in range(0, len(work), at_once))
            ]
            assert [tokens for one in ran for tokens in one.outputs] == want
            cached = [count for one in ran for count in one.cached]
            forked = [
                cached[i] == len(prompt) - 1
                for i, (prompt, _) in enumerate(work)
                # What the prefix cache finds is a multiple of the block size.
                if parents[i] is not None and (len(prompt) - 1) % block_size
            ]
            assert block_size == 1 or (any(forked) if small else all(forked)), "children begin where the prompt ends"

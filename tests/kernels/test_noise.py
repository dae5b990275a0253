"""The noise of sampling: Philox against known answers, distribution and independence of what is made of it."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from trivet_kernels.reference.noise import GROUP, group_noise, gumbel_noise, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    words, keys = ([torch.tensor(int(word, 16)) for word in text.split()] for text in (counter, key))
    assert [f"{int(word):08x}" for word in philox4x32(tuple(words), tuple(keys))] == expected.split()


def column(count: int, value: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.int64)


def test_noise_is_standard_gumbel() -> None:
    ids = torch.arange(60_000)
    noise = gumbel_noise(column(60_000, 42), column(60_000, 3), ids)
    # Kolmogorov-Smirnov: the distribution function of what has that distribution is uniform.
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    steps = torch.arange(60_001, dtype=torch.float64) / 60_000
    distance = torch.maximum((uniform - steps[:-1]).abs().max(), (uniform - steps[1:]).abs().max())
    assert distance * math.sqrt(60_000) < 1.63  # exceeded by chance once in a hundred; the numbers are fixed


def test_tokens_of_a_group_are_independent() -> None:
    """All orders of three tokens are equally likely, for neighbours and for strangers."""
    count = 24_000
    for trio in ((5, 6, 7), (5, 5 + GROUP, 5 + 9 * GROUP)):
        columns = [gumbel_noise(torch.arange(count), column(count, 0), column(count, token)) for token in trio]
        order = torch.stack(columns).argsort(0).T.tolist()
        expected = count / 6
        chi_square = sum((order.count(list(p)) - expected) ** 2 / expected for p in permutations(range(3)))
        assert chi_square < 15.1  # 5 degrees of freedom, 1 %


def test_the_largest_noise_of_a_group_is_the_groups() -> None:
    groups = torch.arange(200)
    smallest, member = group_noise(column(200, 7), column(200, 11), groups)
    ids = torch.arange(200 * GROUP)
    noise = gumbel_noise(column(len(ids), 7), column(len(ids), 11), ids).view(200, GROUP)
    assert torch.equal(noise.argmax(1), member)
    torch.testing.assert_close(noise.amax(1), -smallest.log(), rtol=1e-14, atol=1e-14)


def test_noise_depends_on_every_bit_of_seed_position_and_id() -> None:
    def noise(seed: int, position: int, token: int) -> float:
        return gumbel_noise(column(1, seed), column(1, position), column(1, token)).item()

    places = [(0, 0, 0), *((1 << bit, 0, 0) for bit in range(63)), (-(2**63), 0, 0)]
    places += [(0, 1 << bit, 0) for bit in range(31)] + [(0, 0, 1 << bit) for bit in range(18)]
    assert len({noise(*place) for place in places}) == len(places)


def test_noise_does_not_depend_on_what_else_is_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, positions, ids = (torch.randint(0, 1 << 17, (500,), generator=generator) for _ in range(3))
    together = gumbel_noise(seeds, positions, ids)
    alone = [gumbel_noise(seeds[i : i + 1], positions[i : i + 1], ids[i : i + 1]) for i in range(500)]
    assert torch.equal(torch.cat(alone), together)

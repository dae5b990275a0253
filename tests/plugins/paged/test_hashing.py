"""Names of blocks: the same for the same content everywhere, different for anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivet.state import PromptRange, Request
from trivet_paged.hashing import Hasher, root

TOKENS = np.arange(100, 140, dtype=np.int32)
GOLDEN = "0e12f8112dddd6ed103645ce1d586c039aed4aa59c272c5b2ca051f8bafa8950"


def request(tags: Mapping[str, bytes] | None = None, ranges: tuple[PromptRange, ...] = ()) -> Request:
    return Request("r", TOKENS, None, 100, 0, cache_tags=tags or {}, ranges=ranges)


def chain(
    tags: Mapping[str, bytes] | None = None,
    ranges: tuple[PromptRange, ...] = (),
    tokens: Any = TOKENS,
    size: int = 4,
) -> list[bytes]:
    return Hasher(size).chain(request(tags, ranges), tokens, len(tokens))


def test_only_full_blocks_have_names() -> None:
    for count in range(12):
        assert len(Hasher(4).chain(request(), TOKENS, count)) == count // 4


def test_a_name_covers_everything_before() -> None:
    plain = chain()
    for place in range(40):
        tokens = TOKENS.copy()
        tokens[place] += 1
        other = chain(tokens=tokens)
        assert [a == b for a, b in zip(plain, other, strict=True)] == [i < place // 4 for i in range(10)]


def test_chains_grow_as_they_would_have_been_made_at_once() -> None:
    hasher, one = Hasher(4), request()
    grown = hasher.chain(one, TOKENS, 9)
    assert len(grown) == 2
    assert hasher.chain(one, TOKENS, 25) is grown
    assert hasher.chain(one, TOKENS, 12) is grown, "what was asked for before stays"
    hasher.extend(grown, one, TOKENS[24:40])
    assert grown == chain()


def test_equal_tokens_in_another_context_never_meet() -> None:
    contexts: list[dict[str, bytes]] = [
        {},
        {"adapter": b"a"},
        {"adapter": b"b"},
        {"cache_salt": b"a"},
        {"adapter": b"a", "cache_salt": b"b"},
        {"adapter": b"b", "cache_salt": b"a"},
        # Where one value ends and the next begins, and what is a name and what a value, must show.
        {"a": b"", "b": b""},
        {"ab": b""},
        {"a": b"b"},
        {"a": b"\1\0\0\0\0\0\0\0b"},
        {"a": b"b", "": b""},
        {"": b"ab"},
    ]
    assert len({root(tags) for tags in contexts}) == len(contexts)
    names = [set(chain(tags)) for tags in contexts]
    assert len(set().union(*names)) == 10 * len(contexts)


def test_the_order_of_tags_does_not_matter() -> None:
    assert chain({"a": b"1", "b": b"2"}) == chain({"b": b"2", "a": b"1"})


def test_embeddings_count_from_their_block_on() -> None:
    cat = PromptRange(6, 8, "x", b"cat")
    plain, with_cat = chain(), chain(ranges=(cat,))
    assert [a == b for a, b in zip(plain, with_cat, strict=True)] == [True, *[False] * 9]
    assert chain(ranges=(PromptRange(6, 8, "another name", b"cat"),)) == with_cat
    others = [
        (PromptRange(6, 8, "x", b"dog"),),
        (PromptRange(6, 8, "x", b"cat", offset=1),),
        (PromptRange(6, 7, "x", b"cat"),),
        (PromptRange(7, 8, "x", b"cat", offset=1),),
        (PromptRange(6, 4, "x", b"cat"), PromptRange(10, 4, "x", b"cat")),
    ]
    last = {chain(ranges=some)[-1] for some in others} | {with_cat[-1], plain[-1]}
    assert len(last) == len(others) + 2


def test_a_range_that_goes_on_in_the_next_block_names_where() -> None:
    """The second block of one item is not the first block of it."""
    zeros = np.zeros(8, np.int32)
    one = chain(ranges=(PromptRange(0, 8, "x", b"cat"),), tokens=zeros)
    two = chain(ranges=(PromptRange(0, 4, "x", b"cat"), PromptRange(4, 4, "x", b"cat")), tokens=zeros)
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_the_beginnings_of_two_ranges_are_not_taken_for_one_another() -> None:
    first = (PromptRange(0, 1, "x", b"a"), PromptRange(1, 1, "x", b"bc"))
    second = (PromptRange(0, 1, "x", b"ab"), PromptRange(1, 1, "x", b"c"))
    assert chain(ranges=first)[0] != chain(ranges=second)[0]


def test_block_sizes_do_not_share_names() -> None:
    assert not set(chain(size=4)) & set(chain(size=8))


def golden() -> str:
    ranges = (PromptRange(5, 9, "x", b"image", offset=2),)
    return chain({"cache_salt": b"s", "adapter": b"a"}, ranges)[-1].hex()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_names_do_not_depend_on_the_process(seed: str) -> None:
    """What was stored on disk under a name is found after a restart, and by the next release."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_hashing as t; print(t.golden())"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == golden() == GOLDEN

"""Stop strings are found and cut exactly, wherever the pieces of the text end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.output import StopFinder

_TEXTS = st.text("abc", max_size=14)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def _feed(finder: StopFinder, pieces: list[str], armed_from: int = 0) -> str:
    out = ""
    for index, piece in enumerate(pieces):
        out += finder.push(piece, armed=index >= armed_from)
        if finder.found is not None:
            return out
    return out + finder.flush()


def _character_by_character(
    pieces: list[str], stops: list[str], include: bool, armed_from: int
) -> tuple[str, str | None]:
    """The definition: after every character, does the text end with a stop string? The longest one counts."""
    text = ""
    for index, piece in enumerate(pieces):
        for letter in piece:
            text += letter
            matches = [stop for stop in stops if text.endswith(stop)]
            if matches and index >= armed_from:
                found = max(matches, key=len)
                return (text if include else text[: -len(found)]), found
    return text, None


@settings(deadline=None)
@given(st.lists(_TEXTS, max_size=8), _STOPS, st.booleans(), st.integers(0, 3))
def test_every_split_of_a_text_is_cut_where_its_characters_say(
    pieces: list[str], stops: list[str], include: bool, armed_from: int
) -> None:
    finder = StopFinder(stops, include=include)
    text = _feed(finder, pieces, armed_from)
    assert (text, finder.found) == _character_by_character(pieces, stops, include, armed_from)


@settings(deadline=None)
@given(st.lists(_TEXTS, max_size=8), _STOPS)
def test_nothing_that_may_begin_a_stop_string_is_passed_on(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    passed = whole = ""
    for piece in pieces:
        passed += finder.push(piece)
        whole += piece
        if finder.found is not None:
            return
        held = len(whole) - len(passed)
        assert not any(whole.endswith(stop[:k]) for stop in stops for k in range(held + 1, len(stop)))
        assert held == 0 or any(stop.startswith(whole[-held:]) for stop in stops)


@pytest.mark.parametrize(("include", "expected"), [(False, "one, two, three,"), (True, "one, two, three, four, five")])
def test_a_stop_string_over_several_pieces(include: bool, expected: str) -> None:
    finder = StopFinder([" four, five"], include=include)
    passed = [finder.push(piece) for piece in ["one, two, three,", " four", ", ", "five", ", six"][:4]]
    assert passed[:3] == ["one, two, three,", "", ""]
    assert "".join(passed) == expected
    assert finder.found == " four, five"


def test_a_beginning_that_comes_to_nothing_is_passed_on() -> None:
    finder = StopFinder(["abcd", "bx"])
    assert [finder.push(piece) for piece in ("ab", "c", "a")] == ["", "", "abc"]
    assert finder.flush() == "a"
    assert finder.found is None

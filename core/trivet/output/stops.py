"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on until a stop string is complete, and holds back what may be the beginning of one.

    The text is judged piece by piece, one piece per token: of the stop strings that a piece completes, the one that
    ends first counts, and of those that end together the longest, as if the text were read character by character. So
    what is passed on never contains a stop string, whatever the tokens' boundaries.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Search for ``stops`` (none of them empty); ``include`` leaves the one that is found in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None  #: the stop string that ended the text

    def push(self, piece: str, *, armed: bool = True) -> str:
        """The text that has become final with ``piece``; sets :attr:`found` when a stop string is complete.

        With ``armed`` false a stop string that ends in this piece does not count and stays in the text.
        """
        if not piece:
            return ""
        old, text = len(self._held), self._held + piece
        if armed:
            match = self._first_match(text, old)
            if match is not None:
                start, end = match
                self.found, self._held = text[start:end], ""
                return text[: end if self._include else start]
        begin = min((_beginning(text, stop) for stop in self._stops), default=len(text))
        self._held = text[begin:]
        return text[:begin]

    def flush(self) -> str:
        """The text still held back; the output has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, int] | None:
        """Start and end of the first match that ends behind ``text[:old]``; that part has been judged before."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop))
        return best


def _beginning(text: str, stop: str) -> int:
    """Where the longest end of ``text`` begins that is a proper beginning of ``stop``; ``len(text)`` if none is."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)

"""How many prompt tokens a step may have beside rows that decode, so that those keep their pace."""

from __future__ import annotations

from collections import deque

import numpy as np

from trivet.plan import Int64

_WINDOW = 48  # steps that the estimate is made from
_EVERY = 4  # steps between estimates
_APART = 4  # tokens by which two steps must differ to say something about the cost of a token
_FIRST = 16  # prompt tokens of the first mixed step, about which nothing is known
_GROWTH = 4  # by how much the share grows at most from one estimate to the next


class StepTimes:
    """Duration of a step as ``a + b * tokens`` seconds, from the last steps.

    ``b`` is the median of the slopes between all pairs of steps, ``a`` the median of what is left (Theil 1950, Sen
    1968), so that up to a quarter of the steps may have been held up by something else. The model is local: on most
    hardware small steps cost the same whatever their number of tokens, and the window holds sizes near those in use."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=_WINDOW)
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self.base = 0.0  #: a
        self.per_token: float | None = None  #: b; None until two sizes were seen

    def observe(self, tokens: int, seconds: float) -> None:
        """Take a step into account."""
        self._tokens.append(tokens)
        self._seconds.append(seconds)

    def fit(self) -> None:
        """Estimate ``a`` and ``b`` anew; without steps of different sizes ``b`` stays what it was."""
        tokens, seconds = np.array(self._tokens, np.int64), np.array(self._seconds)
        first, second = _pairs(len(tokens))
        apart = np.abs(tokens[first] - tokens[second]) >= _APART
        if np.count_nonzero(apart) >= min(len(tokens), _EVERY):
            first, second = first[apart], second[apart]
            slopes = (seconds[first] - seconds[second]) / (tokens[first] - tokens[second])
            self.per_token = max(float(np.median(slopes)), 0.0)
        if len(tokens):
            self.base = float(np.median(seconds - (self.per_token or 0.0) * tokens))


def _pairs(count: int) -> tuple[Int64, Int64]:
    first, second = np.triu_indices(count, 1)
    return first, second


class PromptShare:
    """The prompt tokens of a mixed step for which its duration is expected to stay within a target.

    Never fewer than ``least``, so that prompts get on however slow a step is, and at most ``_GROWTH`` times as many as
    the last estimate allowed, since a model of small steps says little about large ones.

    Args:
        target: Seconds from one step to the next.
        least: Prompt tokens that a step has in any case.
        lag: How many plans are sent between a plan and the time that tells its duration.
    """

    def __init__(self, target: float, least: int, lag: int = 0) -> None:
        self.times = StepTimes()
        self._target, self._least, self._lag = target, least, lag
        self._plans: deque[int] = deque()
        self._last: float | None = None
        self._share = max(_FIRST, least)
        self._seen = 0

    def tick(self, now: float, *, idle: bool = False) -> None:
        """A step is about to be planned at ``now`` (seconds on any clock); ``idle``: the engine may have had nothing to
        do in the meantime."""
        if idle:
            self._plans.clear()
        if self._last is not None and len(self._plans) > self._lag:
            tokens = self._plans.popleft()
            if tokens:
                self.times.observe(tokens, now - self._last)
                self._seen += 1
        self._last = now

    def planned(self, tokens: int) -> None:
        """The step has this many tokens; 0: none was sent, and the time until the next one tells nothing."""
        if tokens:
            self._plans.append(tokens)
        else:
            self._plans.clear()
            self._last = None

    def limit(self, decoding: int) -> int:
        """Prompt tokens for a step in which ``decoding`` tokens are computed for rows that decode."""
        if self._seen >= _EVERY:
            self._seen = 0
            self.times.fit()
            self._share = min(self._room(decoding), _GROWTH * self._share)
        return self._share

    def _room(self, decoding: int) -> int:
        cost = self.times.per_token
        if cost is None:
            return self._share
        left = self._target - self.times.base - cost * decoding
        if cost * _GROWTH * self._share <= left:
            return _GROWTH * self._share
        return self._least if left <= 0 else max(int(left / cost), self._least)

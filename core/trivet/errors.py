"""Exceptions of the core.

Everything a user can cause and mend derives from :class:`TrivetError`; the launcher prints such an error without a
traceback and leaves with its ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class TrivetError(Exception):
    """Base of all errors that a user can act on; the message says what to change."""

    exit_code = 2


class ModelLoadError(TrivetError):
    """A model's files are missing, damaged, or of a kind that cannot be loaded."""


class PluginError(TrivetError):
    """The set of plugins cannot work together; lists every problem found, not only the first."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            text = f"{len(self.problems)} problems with plugins:\n" + "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(text)


class CacheMemoryError(TrivetError):
    """The KV cache memory cannot hold what the configuration promises; ``fits_tokens`` is the longest request that
    fits."""

    def __init__(self, message: str, *, fits_tokens: int | None = None) -> None:
        super().__init__(message)
        self.fits_tokens = fits_tokens


class RequestError(TrivetError, ValueError):
    """A request is refused at admission; nothing was allocated for it and no other request is touched."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(RequestError):
    """The queue is full; the client may try again later."""


class EngineUnhealthyError(TrivetError):
    """The engine's state is suspect after a fault in schedule or commit; it takes no work until restarted."""

    exit_code = 1


class RequestFault(Exception):
    """Raised by a plugin inside a worker phase to end single requests; the rest of the batch goes on.

    ``reasons`` maps request ids to the message that their users get. The step is undone for every other request of
    the plan and computed again, which is safe because phases are functions of the tokens known so far.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"{key}: {value}" for key, value in self.reasons.items()))


class WorkerFault(Exception):
    """Any other exception of a worker phase, as the engine sees it: every request of that plan ends with it."""

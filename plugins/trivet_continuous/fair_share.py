"""The scheduling policy ``fair_share``: service is counted per user, and whoever got least is next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from trivet.errors import RequestError
from trivet.policies import SchedulingPolicy, detail_place, request_detail
from trivet.state import Request
from trivet_schemas.errors import show
from trivet_schemas.options import Options

if TYPE_CHECKING:
    from trivet.context import EngineContext

_PRUNE = 256  # counters kept before those are looked for that no longer matter
_Weight = Annotated[float, Field(ge=0)]


class FairShareOptions(Options):
    """Options of the policy ``fair_share``."""

    input_weight: _Weight = 1.0
    """What a prompt token counts that has to be computed."""
    output_weight: _Weight = 2.0
    """What a generated token counts."""
    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Users who are due more or less than one share, with how many."""


class FairShare(SchedulingPolicy):
    """A virtual token counter per user (Sheng et al., OSDI 2024): tokens served, weighted, over the user's share.

    A user is named as `user` in ``extra`` or in ``extra_args`` of the parameters; all who are not named are one user. A
    user without waiting requests saves nothing up: the counter of one who comes back is lifted to the least of those
    who wait, or to that of the last one who left the queue. Prompts count at admission, without what was found in the
    cache; outputs once they were generated; what is computed again after a preemption counts for nobody."""

    options_model = FairShareOptions

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Policy.bind`."""
        self._table = context.table
        slots = self._table.max_num_seqs
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}  # queued requests by user
        self._level = 0.0  # of the last user who left the queue
        self._running: list[Request | None] = [None] * slots
        self._watched = np.zeros(slots, np.bool_)
        self._epochs = np.zeros(slots, np.int64)
        self._charged = np.zeros(slots, np.int64)  # outputs that were counted
        self._users: dict[str, int] = {}  # those who run, and some who did, by number
        self._user = np.zeros(slots, np.intp)

    def validate(self, request: Request) -> None:
        """Refuse a user that is no text."""
        user = request_detail(request, "user")
        if user is not None and not isinstance(user, str):
            where = detail_place(request, "user")
            raise RequestError(f"{where}: must be a string, got {show(user)}", param=where)

    def key(self, request: Request) -> Any:
        """Preempted requests first."""
        return request.num_preemptions == 0

    def group(self, request: Request) -> str:
        """The user."""
        user: str | None = request_detail(request, "user")
        return user or ""

    def rank(self, group: Hashable) -> float:
        """What the user was served."""
        return self._counters.get(group, 0.0)  # type: ignore[call-overload,no-any-return]

    def queued(self, request: Request) -> None:
        """Lift the counter of a user who had nothing waiting."""
        user = self.group(request)
        if user not in self._waiting:
            level = min(map(self.rank, self._waiting)) if self._waiting else self._level
            self._counters[user] = max(self._counters.get(user, 0.0), level)
            if len(self._counters) > _PRUNE + 2 * len(self._waiting):
                self._forget(level)
        self._waiting[user] = self._waiting.get(user, 0) + 1

    def _forget(self, level: float) -> None:
        """Drop counters that would be lifted to ``level`` in any case."""
        names = list(self._users)
        busy = {names[number] for number in set(self._user[self._watched].tolist())} | self._waiting.keys()
        self._counters = {user: count for user, count in self._counters.items() if user in busy or count > level}

    def removed(self, request: Request) -> None:
        """See :meth:`SchedulingPolicy.removed`."""
        user = self.group(request)
        self._waiting[user] -= 1
        if not self._waiting[user]:
            del self._waiting[user]
            self._level = self.rank(user)

    def admitted(self, request: Request) -> None:
        """Count the prompt, and watch the outputs from now on."""
        user = self.group(request)
        if not request.num_preemptions:
            self._serve(user, self.options.input_weight * (request.num_prompt - max(request.num_cached_tokens, 0)))
        self.removed(request)
        slot = request.slot
        self._settle(slot)  # whoever had it before
        if user not in self._users and len(self._users) > _PRUNE + 2 * len(self._running):
            self._renumber()
        self._running[slot], self._user[slot] = request, self._users.setdefault(user, len(self._users))
        self._watched[slot], self._epochs[slot] = True, request.epoch
        self._charged[slot] = len(request.output_ids)

    def _renumber(self) -> None:
        """Forget users of whom nothing runs."""
        names, old = list(self._users), self._user.copy()
        self._users = {}
        for slot in np.flatnonzero(self._watched).tolist():
            self._user[slot] = self._users.setdefault(names[old[slot]], len(self._users))

    def begin_step(self) -> None:
        """Count the outputs of the last step; costs time per user, and per request that left its slot."""
        table = self._table
        for slot in np.flatnonzero(self._watched & (table.epoch != self._epochs)).tolist():
            self._settle(slot)
        new = np.where(self._watched, table.num_known - table.num_prompt - self._charged, 0)
        if not new.any():
            return
        self._charged += new
        served = np.bincount(self._user, weights=new, minlength=len(self._users)).tolist()
        for user, tokens in zip(self._users, served, strict=False):
            if tokens:
                self._serve(user, self.options.output_weight * tokens)

    def _settle(self, slot: int) -> None:
        """Count what a request generated that has left its slot since."""
        request = self._running[slot]
        if request is not None:
            tokens = max(len(request.output_ids) - int(self._charged[slot]), 0)
            self._serve(self.group(request), self.options.output_weight * tokens)
            self._running[slot], self._watched[slot] = None, False

    def _serve(self, user: str, tokens: float) -> None:
        self._counters[user] = self._counters.get(user, 0.0) + tokens / self.options.shares.get(user, 1.0)

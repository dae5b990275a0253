"""Notices an engine that gets nowhere while requests are unfinished.

Two things can stand still. When the loop turns and nothing comes of it (every request held, a scheduler that admits
nobody), the :class:`Watchdog` sees it between steps and ends every request with the reasons. When a step never
returns (a worker hangs), the engine's own thread cannot see anything, and a :class:`Monitor` on another one does."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.admission import Admissions
    from trivet.assembly import Parts
    from trivet.engine import Engine
    from trivet.faults import Faults

logger = logging.getLogger("trivet.engine")

_FIRST = 4.0  # times the limit, for the first step: kernels are compiled, pages are read
_MOST_REQUESTS, _FEW_REQUESTS, _FEW_STEPS = 1000, 20, 8  # in a dump's file; in the log
_MOST_ASKED = 100  # requests of which the scheduler is asked why they wait: it may look at all the others each time
_STRIDES = 20  # the limit is counted in at least so many pieces, so that a process that was stopped loses one at most


class Watchdog:
    """Part of an engine: counts the time in which nothing happens. ``seconds`` None: never gives up."""

    def __init__(self, parts: Parts, faults: Faults, admissions: Admissions) -> None:
        self._p, self._faults, self._admissions = parts, faults, admissions
        settings = parts.config.watchdog
        self.seconds: float | None = settings.seconds
        self._dump = settings.dump
        self._seen = -1
        self._since = 0.0
        self._still = 0.0
        #: steps begun, and whether one is under way; a monitor reads both
        self.turn = 0
        self.busy = False

    def __enter__(self) -> None:
        """A step begins."""
        self.turn += 1
        self.busy = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The step ends; end everything if nothing has happened for too long, or a monitor said so meanwhile."""
        self.busy = False
        if kind is None:
            self._check()

    def _check(self) -> None:
        if self._faults.hang is not None:
            self._faults.fail(self._faults.hang)
            return
        life = self._p.lifecycle
        history = life.history
        if self.seconds is None:
            return
        now = history.clock()
        if history.progress != self._seen or not life.requests:
            self._seen, self._still = history.progress, 0.0
        else:
            self._still += min(now - self._since, self.seconds / _STRIDES)
            if self._still >= self.seconds:
                reason = f"nothing has happened for {self.seconds:g} s: {self.reasons()}"
                self.write(reason)
                self._faults.fail(reason)
        self._since = now

    @property
    def patience(self) -> float | None:
        """Seconds that the step under way may take, before a monitor takes it for hanging."""
        if self.seconds is None:
            return None
        return self.seconds if self._p.lifecycle.history.num_committed else self.seconds * _FIRST

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished; any thread."""
        return bool(self._p.lifecycle.requests)

    def give_up(self) -> str:
        """A monitor's call, on its thread: the step under way hangs. Returns the reason."""
        reason = f"a step has not returned for {self.patience:g} s; a worker hangs"
        # Whoever sees the fault finds the dump.
        self.write(reason)
        self._faults.hang = reason
        return reason

    # ------------------------------------------------------------------ what it tells

    def reasons(self) -> str:
        """What unfinished requests wait for, in a line: the kinds, how many of the earliest each, and an example."""
        kinds: dict[str, list[str]] = defaultdict(list)
        examples: dict[str, str] = {}
        requests = list(self._p.lifecycle.requests.values())
        for request in requests[:_MOST_ASKED]:
            wait = self._wait(request.request_id)
            kind, detail = ("run", "") if wait is None else (wait["kind"], wait["detail"])
            kinds[kind].append(request.request_id)
            examples.setdefault(kind, detail)
        words = {"hold": "held", "run": "in a step that does not end"}
        told = []
        for kind, names in kinds.items():
            count = "1 request is" if len(names) == 1 else f"{len(names)} requests are"
            example = f" ({names[0]}: {examples[kind]})" if examples[kind] else f" ({names[0]})"
            told.append(f"{count} {words.get(kind, f'waiting for {kind}')}{example}")
        if len(requests) > _MOST_ASKED:
            told.append(f"and {len(requests) - _MOST_ASKED} more requests are unfinished")
        return "; ".join(told)

    def dump(self, reason: str) -> dict[str, Any]:
        """Everything that helps to find the reason, as data for JSON: requests with their timelines, recent steps,
        figures, and the stack of every thread."""
        life = self._p.lifecycle
        names = [request.request_id for request in list(life.requests.values())]
        stats = self._p.cache.stats()
        return {
            "reason": reason,
            "time": time.time(),
            "requests": [self._request(name, asked=i < _MOST_ASKED) for i, name in enumerate(names[:_MOST_REQUESTS])],
            "requests_left_out": max(len(names) - _MOST_REQUESTS, 0),
            "steps": life.history.recent(),
            "stats": {
                "requests": len(names),
                "running": self._p.table.num_running,
                "waiting": self._p.scheduler.num_waiting,
                "blocks": asdict(stats),
                "transfers": life.has_transfers,
            },
            "threads": stacks(),
        }

    def _request(self, name: str, *, asked: bool) -> dict[str, Any]:
        timeline = self._p.lifecycle.history.timeline(name)
        told = {"request_id": name} if timeline is None else asdict(timeline)
        return told | {"wait": self._wait(name) if asked else None}

    def _wait(self, name: str) -> dict[str, Any] | None:
        try:
            wait = self._admissions.explain(name)
        except Exception as error:  # noqa: BLE001  # a scheduler in disorder is what the dump is for
            return {"kind": "unknown", "detail": f"explaining it failed: {error!r}", "numbers": {}}
        return None if wait is None else {"kind": wait.kind, "detail": wait.detail, "numbers": dict(wait.numbers)}

    def write(self, reason: str) -> None:
        """Write the dump to its file, or a short one to the log. Never raises."""
        try:
            dump = self.dump(reason)
            if self._dump is not None:
                Path(self._dump).write_text(json.dumps(dump, default=str), encoding="utf-8")
                logger.error("the engine gives up: %s; see `trivet explain %s`", reason, self._dump)
                return
        except Exception:  # whatever is in disorder here, the engine's end must go on
            logger.exception("the engine gives up: %s; its dump could not be made", reason)
            return
        for request in dump["requests"]:
            del request["changes"]
        short = dump | {"requests": dump["requests"][:_FEW_REQUESTS], "steps": dump["steps"][-_FEW_STEPS:]}
        logger.error("the engine gives up: %s; %s", reason, json.dumps(short, default=str))


def stacks() -> dict[str, list[str]]:
    """Where every thread of the process stands, innermost last, by the thread's name and number."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(number, 'unknown')} ({number})": [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(top)
        ]
        for number, top in sys._current_frames().items()
    }


class Monitor:
    """Watches an engine's steps from a thread of its own, until the engine is gone or :meth:`stop`."""

    def __init__(self, engine: Engine, hangs: Callable[[str], None]) -> None:
        """``hangs`` is called once, on that thread, with the reason. Nothing is started for an engine without limit."""
        self._engine, self._hangs = weakref.ref(engine), hangs
        self._turn, self._still = -1, 0.0
        self._stopped = threading.Event()
        self.seconds = engine.watchdog.seconds
        if self.seconds is not None:
            threading.Thread(target=self._main, name="trivet-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end, soon."""
        self._stopped.set()

    def _main(self) -> None:
        assert self.seconds is not None
        interval = min(self.seconds / _STRIDES, 5.0)
        before = time.monotonic()
        while not self._stopped.wait(interval):
            now = time.monotonic()
            # While the whole process was stopped, no step could go on.
            if not self.look(min(now - before, 2 * interval)):
                return
            before = now

    def look(self, seconds: float) -> bool:
        """Look at the engine, ``seconds`` after the look before; whether to go on looking."""
        engine = self._engine()
        if engine is None:
            return False
        dog = engine.watchdog
        if not dog.busy or dog.turn != self._turn or not dog.has_requests:
            self._turn, self._still = dog.turn, 0.0
            return True
        self._still += seconds
        patience = dog.patience
        if patience is None or self._still < patience:
            return True
        reason = dog.give_up()
        self._hangs(reason)
        return False

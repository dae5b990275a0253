"""An engine on a thread of its own, which sleeps while there is nothing to do."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from trivet.errors import EngineUnhealthyError
from trivet.watchdog import Monitor

if TYPE_CHECKING:
    from trivet.engine import Engine
    from trivet.events import CommitEvents

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_HUNG_SECONDS = 5.0


class _Command:
    """A function to be called with the engine, and the future that waits for its result, if any."""

    def __init__(self, function: Callable[[Engine], object], future: Future[Any] | None = None) -> None:
        self._function, self._future = function, future

    def run(self, engine: Engine) -> None:
        future = self._future
        if future is None:
            self._function(engine)
        elif future.set_running_or_notify_cancel():
            try:
                result = self._function(engine)
            except BaseException as exc:  # noqa: BLE001  # raised again where the future is read
                future.set_exception(exc)
            else:
                future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._future is not None and self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


class EngineThread:
    """Builds an engine, steps it while it has work, and between steps runs what others ask for, in their order."""

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        ready: Callable[[Engine], None],
        publish: Callable[[CommitEvents], None],
        closing: Callable[[Engine], None],
        closed: Callable[[str | None], None],
        hangs: Callable[[str], None],
    ) -> None:
        """Start the thread; all functions given but ``hangs`` are called on it.

        Args:
            make: Builds the engine.
            ready: Called once with the engine, before the first step.
            publish: Called with what each step changed, if anything.
            closing: Called after :meth:`close`, before the last steps; ends what is unfinished.
            closed: Called last with the exception that ended the loop, as text, or None. The engine has been shut down.
            hangs: Called on a monitor's thread, with the reason, when a step does not return; no more calls are taken.
        """
        self._make, self._ready, self._publish, self._closing, self._closed = make, ready, publish, closing, closed
        self._hangs, self._hung = hangs, False
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepting, self._close = True, False
        #: the engine, once it is built, or why that failed
        self.started: Future[Engine] = Future()
        self.started.set_running_or_notify_cancel()  # waiters that are cancelled must not cancel it for the others
        self._thread = threading.Thread(target=self._main, name="trivet-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the engine takes calls."""
        return self._accepting and self.started.done() and self.started.exception() is None

    def post(self, function: Callable[[Engine], object]) -> bool:
        """Run ``function`` with the engine between steps; False if the loop has ended. ``function`` must not raise."""
        return self._put(_Command(function))

    def _put(self, command: _Command) -> bool:
        with self._lock:
            if self._accepting:
                self._commands.put(command)
            return self._accepting

    def call(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Like :meth:`post`, with the result or the exception of ``function`` in a future."""
        future: Future[_T] = Future()
        if not self._put(_Command(function, future)):
            future.set_exception(EngineUnhealthyError("the engine is not running"))
        return future

    def close(self) -> None:
        """Ask the thread to end; it has ended when :meth:`join` returns."""

        def close(_engine: Engine) -> None:
            self._close = True

        self.post(close)

    def _give_up(self, reason: str) -> None:
        """On the monitor's thread: calls that wait for this one fail. Should it come back, it ends as if closed."""
        with self._lock:
            self._accepting, self._close, self._hung = False, True, True
        self._hangs(reason)
        error = EngineUnhealthyError(f"the engine stopped after a fault and must be restarted: {reason}")
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command.fail(error)
        self._commands.put(_Command(lambda _: None))  # it may be waiting for one

    def join(self) -> None:
        """Wait for the end of the thread; for one that hangs, a moment only."""
        self._thread.join(_HUNG_SECONDS if self._hung else None)
        if self._thread.is_alive():
            _log.error("the engine's thread hangs and is left behind; it ends with the process")

    def _main(self) -> None:
        try:
            engine = self._make()
            self._ready(engine)
        except BaseException as exc:  # noqa: BLE001  # raised again by those who wait for the start
            self._accepting = False
            self.started.set_exception(exc)
            return
        self.started.set_result(engine)
        monitor = Monitor(engine, self._give_up)
        reason: str | None = None
        try:
            while not self._close:
                if self._run_commands(engine, wait=not engine.has_work):
                    self._step(engine)
            self._closing(engine)
            while engine.has_unfinished:
                self._step(engine)
        except Exception as exc:  # noqa: BLE001  # logged, and told to everyone who waits
            _log.exception("the engine's loop failed")
            reason = f"{type(exc).__name__}: {exc}"
        finally:
            monitor.stop()
            with self._lock:
                self._accepting = False
            self._run_commands(engine, wait=False)  # nothing that was posted is lost
            try:
                engine.shutdown()
            finally:
                self._closed(reason)

    def _run_commands(self, engine: Engine, *, wait: bool) -> bool:
        """Run what was posted, waiting for the first if ``wait``; returns whether there is work to step for."""
        while wait or not self._commands.empty():
            self._commands.get().run(engine)
            wait = False
        return engine.has_work and not self._close

    def _step(self, engine: Engine) -> None:
        events = engine.step()
        if events.requests or events.finished or events.prompt_logprobs or events.pooled:
            self._publish(events)

"""An executor whose worker is another process: plans and results cross a pipe as bytes, several at a time if asked
for."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from pydantic import Field

from trivet.errors import WorkerFault
from trivet.hookspecs import hookimpl
from trivet.plan import StepPlan
from trivet.provider import Provider
from trivet.result import StepResult
from trivet.roles import Executor, KVLayout, WorkerInfo
from trivet.wire import decode_plan, decode_result, encode
from trivet_schemas.options import Options


class PipeOptions(Options):
    """How the pipe behaves."""

    depth: int = Field(1, ge=1)
    """Steps in flight."""


class PipeExecutor(Executor):
    """One worker process; a message is a kind byte, a length and a body."""

    def __init__(self, context: Any, options: PipeOptions) -> None:
        self._context = context
        self.max_in_flight, self.token_feedback = options.depth, options.depth > 1
        self._pending: deque[_Pending] = deque()

    def start(self) -> WorkerInfo:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        send(self._process.stdin, b"S", json.dumps([self._context.plugin_set(), self._context.worker_sizes]).encode())
        return pickle.loads(self._receive())

    def configure_cache(self, layout: KVLayout) -> None:
        send(self._process.stdin, b"L", pickle.dumps(layout))
        self._receive()

    def submit(self, plan: StepPlan) -> _Pending:
        send(self._process.stdin, b"P", encode(plan))
        pending = _Pending(self)
        self._pending.append(pending)
        return pending

    def call(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError(method)

    def take(self, pending: _Pending) -> bytes:
        assert self._pending.popleft() is pending, "results are taken in the order of submission"
        return self._receive()

    def _receive(self) -> bytes:
        kind, body = receive(self._process.stdout)
        if kind == b"E":
            raise WorkerFault(body.decode())
        return body

    def shutdown(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.stdin.close()
            process.wait(10)
            process.stdout.close()


class _Pending:
    def __init__(self, executor: PipeExecutor) -> None:
        self._executor = executor

    def done(self) -> bool:
        return False

    def result(self) -> StepResult:
        return decode_result(self._executor.take(self))


def send(pipe: Any, kind: bytes, body: bytes) -> None:
    pipe.write(kind + struct.pack("<I", len(body)) + body)
    pipe.flush()


def receive(pipe: Any) -> tuple[bytes, bytes]:
    head = pipe.read(5)
    if len(head) < 5:
        raise EOFError("the pipe was closed")
    return head[:1], pipe.read(struct.unpack("<I", head[1:])[0])


def work() -> None:
    """The worker process."""
    from trivet.registry import Registry

    out, sys.stdout = sys.stdout.buffer, sys.stderr
    runner: Any = None
    while True:
        try:
            kind, body = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if kind == b"S":
                plugins, sizes = json.loads(body)
                context = Registry.from_plugin_set(plugins).worker_context(**sizes)
                runner = context.get("runner")
                answer = pickle.dumps(runner.load())
            elif kind == b"L":
                runner.allocate(pickle.loads(body))
                answer = b""
            else:
                answer = encode(runner.execute(decode_plan(body)))
            send(out, b"R", answer)
        except Exception as error:  # noqa: BLE001 - told to the engine
            send(out, b"E", f"{type(error).__name__}: {error}".encode())


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("executor", "pipe", "pipe:PipeExecutor", options=PipeOptions)]


if __name__ == "__main__":
    work()

"""One start of an engine, in a process that does nothing else: ``python -m trivet.bench._startup_child RESULT``.

Reads a configuration as JSON from stdin and writes what it took, or why it failed, to the file RESULT.
"""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@contextmanager
def timed_imports() -> Iterator[list[Interval]]:
    """Within, the intervals (``time.perf_counter``) that the main thread spends in outermost imports are noted in the
    list yielded."""
    intervals: list[Interval] = []
    main, inside = threading.main_thread(), False
    originals = builtins.__import__, importlib.import_module

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or threading.current_thread() is not main:
                return function(*args, **kwargs)
            inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside = False
                intervals.append((start, time.perf_counter()))

        return wrapper

    builtins.__import__, importlib.import_module = (timed(original) for original in originals)
    try:
        yield intervals
    finally:
        builtins.__import__, importlib.import_module = originals


def overlap(interval: Interval, others: Iterable[Interval]) -> float:
    """Seconds of ``interval`` that lie in ``others``, which are disjoint."""
    begin, end = interval
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in others)


class CompileSeconds(logging.Handler):
    """Adds up the attribute ``compile_seconds`` of records: what was compiled, and how long that took."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record's seconds, if it has any."""
        self.total += getattr(record, "compile_seconds", 0.0)


@contextmanager
def timed_compilation() -> Iterator[CompileSeconds]:
    """Within, the handler yielded hears of everything that says how long it compiled."""
    handler, logger = CompileSeconds(), logging.getLogger("trivet")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def start_engine(config: dict[str, Any]) -> dict[str, float]:
    """Start an engine, generate one token, and return the seconds of the phases (see :mod:`trivet.bench.startup`)."""
    begin = time.perf_counter()
    with timed_imports() as imports, timed_compilation() as compilation:
        from trivet.llm import LLM

        llm = LLM.from_config(config)
    ready = time.perf_counter()
    from trivet.bench.datasets import BenchRequest, plain_token_ids
    from trivet.bench.runs import run_requests

    with llm:
        prompt = [int(token) for token in plain_token_ids(llm.engine)[:1]]
        asked = time.perf_counter()
        run_requests(llm, [BenchRequest(prompt, 1)])
        answered = time.perf_counter()
    phases = {
        name: end - start - overlap((start, end), imports) for name, (start, end) in llm.engine.parts.timeline.items()
    }
    imported = overlap((begin, ready), imports)
    return {
        "imports": imported,
        "plugins": ready - begin - imported - sum(phases.values()),
        **phases,
        "compilation": compilation.total,
        "engine": ready - begin,
        "first_token": answered - asked,
    }


def main() -> int:
    """See the module."""
    from trivet.errors import TrivetError
    from trivet_schemas.errors import SchemaError

    config = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"began": time.monotonic(), **start_engine(config)}
    except (TrivetError, SchemaError) as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

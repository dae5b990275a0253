"""What requests waited for, in tables; from timelines as data, of an engine in this process or of a dump."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from trivet.errors import TrivetError
from trivet.launcher._tables import columns, heading
from trivet.timeline import RequestTimeline

Record = dict[str, Any]

REFUSED = "refused"
_LAST_STEPS = 8
_FRAMES = 4


def read_dump(path: Path) -> Record:
    """A dump of the watchdog. Raises TrivetError when the file is none."""
    try:
        dump = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrivetError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        dump = None
    if not isinstance(dump, dict) or not {"reason", "requests", "steps", "stats", "threads"} <= dump.keys():
        raise TrivetError(f"{path} is no dump of the watchdog; for a configuration, give --input FILE with requests")
    return dump


def refused_story(request_id: str, line: int, problem: str) -> Record:
    """A story like that of a request, of one that was refused and so never reached the engine."""
    story = RequestTimeline(request_id, REFUSED, 0, 0, 0, 0.0, 0, 0.0, 0, finish_reason=REFUSED, message=problem)
    return asdict(story) | {"line": line}


def print_stories(stories: Sequence[Record], request: str | None, *, as_json: bool) -> bool:
    """A line per request, then the spans of ``request``, or of the one that waited longest; whether it was there."""
    chosen = [story for story in stories if request is None or story["request_id"] == request]
    if as_json:
        for story in chosen:
            typer.echo(json.dumps(story, ensure_ascii=False))
        return bool(chosen) or request is None
    head = ["request", "ended", "steps", "ran", "waited", "preempted", "cached", "recomputed", "waited for"]
    columns([head, *([*_cells(story)] for story in stories)])
    if not chosen:
        return request is None
    typer.echo()
    _print_story(max(chosen, key=_waited_seconds))
    return True


def print_dump(dump: Record, request: str | None, *, as_json: bool) -> bool:
    """Everything in a dump; whether ``request`` was there."""
    if as_json:
        typer.echo(json.dumps(dump, ensure_ascii=False))
        return request is None or any(one["request_id"] == request for one in dump["requests"])
    when = datetime.fromtimestamp(dump["time"]).astimezone().isoformat(" ", "seconds")
    heading(f"the engine gave up at {when}")
    typer.echo(f"  {dump['reason']}")
    stats = dump["stats"]
    blocks = stats["blocks"]
    running = stats["running"]
    typer.echo(f"  {running} {'request' if running == 1 else 'requests'} ran, {stats['waiting']} waited")
    typer.echo(f"  {blocks['free']} of {blocks['total']} blocks were free")
    typer.echo()
    heading("requests")
    found = print_stories(dump["requests"], request, as_json=False)
    if dump["requests_left_out"]:
        typer.echo(f"  and {dump['requests_left_out']} more")
    typer.echo()
    heading("last steps")
    columns([["step", "tokens", "running", "waiting", "seconds", "the queue waited for"], *map(_step, _last(dump))])
    typer.echo()
    heading("threads")
    for name, frames in dump["threads"].items():
        typer.echo(f"  {name}")
        columns([[frame] for frame in frames[-_FRAMES:]], indent="    ")
    return found


def _last(dump: Record) -> list[Record]:
    steps: list[Record] = dump["steps"]
    return steps[-_LAST_STEPS:]


def _step(step: Mapping[str, Any]) -> list[str]:
    name = str(step["step_id"])
    if step["steps"] > 1:
        name += f"-{step['step_id'] + step['steps'] - 1}"
    queue = step["queue"]
    reason = "" if queue is None else f"{queue['kind']}: {queue['detail']}"
    seconds = f"{sum(step['seconds'].values()):.3f}" if step["seconds"] else "no plan"
    return [name, str(step["tokens"]), str(step["running"]), str(step["waiting"]), seconds, reason]


def _cells(story: Mapping[str, Any]) -> list[str]:
    waits = story["waits"]
    waited = sum(wait["steps"] for wait in waits.values())
    # The time between its arrival and the next step is no step's.
    counted = [(kind, wait) for kind, wait in waits.items() if wait["steps"]]
    reasons = sorted(counted, key=lambda item: -item[1]["seconds"])
    return [
        story["request_id"],
        story["finish_reason"] or story["status"],
        str(story["steps"]),
        str(story["steps_run"]),
        str(waited),
        str(story["preemptions"]),
        str(story["cached_tokens"]),
        str(story["recomputed_tokens"]),
        ", ".join(f"{kind} {_steps(wait['steps'])} ({_seconds(wait['seconds'])})" for kind, wait in reasons)
        or "nothing",
    ]


def _print_story(story: Mapping[str, Any]) -> None:
    heading(f"request {story['request_id']}")
    facts = [
        ["ended", story["finish_reason"] or f"not yet: {story['status']}"],
        [
            "tokens",
            f"{story['num_prompt']} of the prompt, {story['num_output']} of the output; {story['tokens']} computed",
        ],
        ["time", f"{_seconds(story['seconds'])}, of which it ran {_seconds(story['seconds_run'])}"],
    ]
    if story["seconds_to_first_token"] is not None:
        facts.append(["first token", f"after {_seconds(story['seconds_to_first_token'])}"])
    if story["message"]:
        facts.append(["message", story["message"]])
    if story.get("wait"):
        facts.append(["waits now", f"{story['wait']['kind']}: {story['wait']['detail']}"])
    columns(facts)
    typer.echo("  what happened:")
    rows = [
        [f"step {change['step']}", _seconds(change["seconds"]), change["status"], _of(change)]
        for change in story["changes"]
    ]
    columns(rows, indent="    ")
    if story["changes_left_out"]:
        typer.echo(f"    {story['changes_left_out']} changes in the middle are left out")
    typer.echo("  what it did:")
    columns([_span(span) for span in story["spans"]], indent="    ")


def _of(change: Mapping[str, Any]) -> str:
    if change["status"] != "held":
        return ""
    return f"{change['kind']}: {change['detail']}"


def _span(span: Mapping[str, Any]) -> list[str]:
    first, last = span["first_step"], span["last_step"]
    place = f"step {first}" if first == last else f"steps {first}-{last}"
    numbers = " ".join(f"{name}={value}" for name, value in span["numbers"].items())
    what = "ran" if span["kind"] == "run" else f"waited: {span['kind']}"
    text = "; ".join(part for part in (span["detail"], numbers) if part)
    return [place, what, _steps(span["steps"]), _seconds(span["seconds"]), text]


def _waited_seconds(story: Mapping[str, Any]) -> float:
    return float(sum(wait["seconds"] for wait in story["waits"].values()))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

"""How long an engine takes to start, in fresh processes, with empty caches and with full ones."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trivet.bench.runs import BenchmarkFailedError, percentiles
from trivet.demo import cache_dir
from trivet.errors import ModelLoadError, TrivetError

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig

PHASES = ("interpreter", "imports", "plugins", "load", "allocate")
"""What a start consists of, in this order and nothing else: the Python process; modules, wherever they are imported;
plugins with their options, the tokenizer and everything between; weights; the KV cache and what is prepared once its
size is known."""

Temperature = Literal["cold", "warm"]
_STDERR_LINES = 15


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds. ``startup`` is the sum of ``phases``: from the launch of the process to an engine that takes requests.
    ``page_cache``: which share of the model's files was in memory before, None where that cannot be told."""

    startup: float
    first_token: float  #: of the first request, from its arrival
    phases: Mapping[str, float]
    page_cache: float | None
    compilation: float = 0.0  #: of kernels, within the phases, as far as who compiles them says so

    @property
    def figures(self) -> dict[str, float]:
        """Name → seconds, the total first."""
        ends = {"compilation": self.compilation, "first_token": self.first_token}
        return {"startup": self.startup, **self.phases, **ends}


def measure_start(config: EngineConfig, temperature: Temperature) -> Start:
    """Start an engine in a process of its own, let it generate one token and end.

    Before a cold start the model's files are dropped from the page cache (which the system may refuse), and the
    process finds none of the kernels that were compiled earlier.

    Raises:
        TrivetError: What the engine refuses.
        BenchmarkFailedError: The process failed.
    """
    files = model_files(config)
    if temperature == "cold":
        drop_from_page_cache(files)
    share = page_cache_share(files)
    with tempfile.TemporaryDirectory(prefix="trivet-startup-") as folder:
        environment = dict(os.environ)
        if temperature == "cold":
            environment |= empty_kernel_caches(Path(folder) / "caches")
        answer, launched = _run_child(config, Path(folder) / "result.json", environment)
    interpreter = answer["began"] - launched
    phases = {"interpreter": interpreter, **{name: answer[name] for name in PHASES[1:]}}
    startup = interpreter + answer["engine"]
    return Start(startup, answer["first_token"], phases, share, answer["compilation"])


def _run_child(config: EngineConfig, result: Path, environment: Mapping[str, str]) -> tuple[dict[str, Any], float]:
    """What the process has written, and when it was launched by ``time.monotonic``, which all processes share."""
    launched = time.monotonic()
    done = subprocess.run(  # noqa: S603  # this Python, and a file of ours
        [sys.executable, "-P", "-m", "trivet.bench._startup_child", str(result)],
        input=config.model_dump_json(exclude={"generate", "serve"}),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environment),
        check=False,
    )
    if done.returncode or not result.is_file():
        last = "\n".join(done.stderr.splitlines()[-_STDERR_LINES:])
        raise BenchmarkFailedError(f"the process of the engine ended with code {done.returncode}:\n{last}")
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        error = TrivetError(answer["error"])
        error.exit_code = answer["exit_code"]
        raise error
    return answer, launched


def measure_startup(
    config: EngineConfig,
    *,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    on_start: Callable[[], None] | None = None,
) -> dict[Temperature, list[Start]]:
    """Cold starts, starts that only fill caches, and warm starts, in this order; see :func:`measure_start`."""
    starts: dict[Temperature, list[Start]] = {"cold": [], "warm": []}
    plan: list[tuple[Temperature, int, bool]] = [
        ("cold", num_iters_cold, True),
        ("warm", num_iters_warmup, False),
        ("warm", num_iters_warm, True),
    ]
    for temperature, count, counts in plan:
        for _ in range(count):
            start = measure_start(config, temperature)
            if counts:
                starts[temperature].append(start)
            if on_start is not None:
                on_start()
    return starts


def startup_report(starts: Mapping[Temperature, Sequence[Start]]) -> dict[str, Any]:
    """The keys of vLLM's ``bench startup`` (``avg_cold_startup_time``, ``cold_startup_times``,
    ``cold_startup_percentiles``, the same for ``compilation`` and for ``warm``), and such keys for every phase."""
    report: dict[str, Any] = {}
    for temperature, each in starts.items():
        for name in each[0].figures if each else ():
            values = [start.figures[name] for start in each]
            report[f"avg_{temperature}_{name}_time"] = float(np.mean(values))
            report[f"{temperature}_{name}_times"] = values
            report[f"{temperature}_{name}_percentiles"] = percentiles(values)
        if each:
            report[f"{temperature}_page_cache_shares"] = [start.page_cache for start in each]
    return report


# ---------------------------------------------------------------------- caches


def empty_kernel_caches(folder: Path) -> dict[str, str]:
    """Environment variables under which no compiled kernel is found and everything else that is cached still is.

    ``folder`` is made; it holds links to what the user's cache folder has besides kernels."""
    real = cache_dir().parent
    ours = folder / "trivet"
    ours.mkdir(parents=True)
    for source, target, own in ((real, folder, "trivet"), (real / "trivet", ours, "kernels")):
        for entry in source.iterdir() if source.is_dir() else ():
            if entry.name != own:
                (target / entry.name).symlink_to(entry.absolute())
    compilers = {name: str(folder / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    return {"XDG_CACHE_HOME": str(folder.absolute()), **compilers}


def model_files(config: EngineConfig) -> list[Path]:
    """The files of the model on this machine, empty where there are none to be found."""
    from trivet.model_source import resolve_model

    try:
        path = resolve_model(config.model if config.revision is None else f"{config.model}@{config.revision}").path
    except ModelLoadError:
        return []
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file())
    return [file for file in files if file.stat().st_size]


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Ask the system to forget what it keeps of files in memory; without effect where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def page_cache_share(files: Sequence[Path]) -> float | None:
    """Which share of the pages of files is in memory, by ``mincore(2)``; None without files or such a call."""
    import ctypes

    mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    if mincore is None or not files:
        return None
    total = resident = 0
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            address = np.frombuffer(view, np.uint8).ctypes.data
            states = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
            target = states.ctypes.data_as(ctypes.c_void_p)
            if mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), target):
                return None
        total += len(states)
        resident += int((states & 1).sum())
    return resident / total

"""Compiles the C sources on first use, keeps the result, and loads it.

The sources are compiled by the system's C compiler for one instruction set (see :mod:`trivet_kernels.cpu.levels`),
which takes a few seconds once; the library is kept in the user's cache folder by a digest of sources, flags and
compiler. Parallel loops use the OpenMP runtime that torch has loaded already, so that both share one pool of threads:
two pools would spin against each other. Where there is no compiler, or it fails, there is no library, and callers use
torch's own operations; :func:`problem` says why.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trivet_kernels._cache import cache_home
from trivet_kernels.cpu.levels import Level, usable_levels

logger = logging.getLogger("trivet.kernels")

_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("gcc", "cc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi")
_TIMEOUT = 300
#: bytes of the digest that ends a library; loaders do not look beyond what they need
_SEAL = hashlib.sha256().digest_size
_lock = threading.Lock()


class BuildError(RuntimeError):
    """The native kernels cannot be compiled or loaded here; the message says why."""


def problem() -> str | None:
    """Why :func:`library` has nothing to give, or None if it has; compiles if need be."""
    return _outcome()[1]


def library() -> ctypes.CDLL | None:
    """The compiled kernels for this processor, or None (a warning is logged once); compiles if need be."""
    return _outcome()[0]


def compiler() -> str | None:
    """Path of the system's C compiler, None if there is none."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def _outcome() -> tuple[ctypes.CDLL | None, str | None]:
    with _lock:
        return _build_and_load()


@functools.cache
def _build_and_load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return load(_built()), None
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        logger.warning("native CPU kernels are not available, torch's own operations are used instead: %s", error)
        return None, str(error)


def _built() -> Path:
    """The library in the cache folder, or where nothing can be written to that, in a folder for this process only."""
    try:
        return build(usable_levels(), cache_folder())
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="trivet-kernels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning("native CPU kernels are compiled anew at every start: nothing can be kept: %s", error)
        return build(usable_levels(), Path(folder), kept=False)


def cache_folder() -> Path:
    """Where compiled libraries are kept: ``$XDG_CACHE_HOME/trivet/kernels``, by default under ``~/.cache``.

    Raises:
        FileNotFoundError: The user has no home.
    """
    return cache_home() / "trivet" / "kernels"


def build(levels: Sequence[Level], folder: Path, *, kept: bool = True) -> Path:
    """The library for the first of ``levels`` that can be had, compiled unless ``folder`` has it undamaged.

    A level is passed over where the compiler refuses it or what it makes does not load; a warning names it and the
    reason. Before compiling, which takes some seconds, a line is logged that says so and where the library is
    ``kept``; the line after it has the seconds that all of it took as the attribute ``compile_seconds`` of its record.

    Processes that compile the same at once do not disturb each other: each writes a file of its own and moves it into
    place.

    Raises:
        BuildError: There is no compiler, or no level can be had; the message ends with what was said of the last one.
        OSError: Nothing can be written to ``folder``.
    """
    found = compiler()
    if found is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)}) is on the PATH; install gcc")
    targets = [folder / f"{level.name}-{_digest(found, level)}.so" for level in levels]
    passed: list[tuple[Level, str]] = []
    # A richer level than that of a library that is there is one that was passed over before.
    announced = not kept or any(map(_is_whole, targets))
    began = time.perf_counter()
    for level, target in zip(levels, targets, strict=True):
        if not _is_whole(target):
            if not announced:
                announced = True
                logger.info(
                    "compiling the native CPU kernels for %s with %s, which takes some seconds, once: they are kept in "
                    "%s",
                    level.name,
                    found,
                    folder,
                )
            said = _make(found, level, target)
            if said:
                passed.append((level, said))
                continue
            seconds = time.perf_counter() - began
            logger.info(
                "compiled the native CPU kernels for %s in %.1f s",
                level.name,
                seconds,
                extra={"compile_seconds": seconds},
            )
        for richer, said in passed:
            logger.warning(
                "native CPU kernels are those for %s, although this processor has %s: %s", level.name, richer.name, said
            )
        return target
    raise BuildError(f"{found} cannot make them: {passed[-1][1]}")


def _make(found: str, level: Level, target: Path) -> str:
    """Compile for one level, and put the library at ``target`` if it loads; returns what went wrong, empty if
    nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        # Not linked against an OpenMP runtime: its functions are found in the one that is loaded.
        said = _compile([found, *_FLAGS, *level.flags, "-c"], found, sorted(_SOURCES.glob("*.c")), temporary)
        if said:
            return said.strip()[-500:]
        # The linker lets undefined symbols pass, and what is kept would fail at every start. The file keeps its
        # identity when it is moved, so that this process does not map it twice.
        load(temporary)
        _seal(temporary)
        temporary.chmod(0o755)
        temporary.replace(target)
    except BuildError as error:
        return str(error)
    finally:
        temporary.unlink(missing_ok=True)
    return ""


def _seal(path: Path) -> None:
    """End a library with its digest."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def _is_whole(path: Path) -> bool:
    """Whether there is a library and it is as it was written. Loading one that was cut short may kill the process."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_SEAL]).digest() == content[-_SEAL:]


def _compile(command: list[str], linker: str, sources: Sequence[Path], target: Path) -> str:
    """Compile every source, all at once, and link them into ``target``; returns what went wrong, empty if nothing."""
    with tempfile.TemporaryDirectory() as work:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        running = [
            subprocess.Popen(  # noqa: S603 - the system's compiler on our own sources
                [*command, str(source), "-o", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for source, out in zip(sources, objects, strict=True)
        ]
        try:
            outputs = [(process, process.communicate(timeout=_TIMEOUT)[0]) for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        failed = [output for process, output in outputs if process.returncode]
        if failed:
            return failed[0] or "the compiler failed without a word"
        linked = subprocess.run(  # noqa: S603
            [linker, "-shared", "-o", str(target), *map(str, objects), "-lm"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
        return (linked.stderr or "the linker failed without a word") if linked.returncode else ""


def load(path: Path) -> ctypes.CDLL:
    """Load a library that :func:`build` made.

    Raises:
        BuildError: It cannot be loaded.
    """
    import torch

    torch.get_num_threads()  # torch's OpenMP runtime is in the process from here on
    runtime = _openmp_runtime(Path(torch.__file__).parent)
    try:
        if runtime is not None:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error


def _openmp_runtime(home: Path) -> str | None:
    """The OpenMP runtime that torch, whose folder is ``home``, has brought into this process; None if the system does
    not tell. Other packages (scikit-learn, sentencepiece) bring copies of their own, with threads of their own."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return None
    found: list[str] = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[-1] if line.count(" ") > 4 else ""
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            found.append(path)
    folders = (home, home.with_name(f"{home.name}.libs"))
    own = [path for path in found if any(Path(path).is_relative_to(folder) for folder in folders)]
    return next(iter([*own, *found]), None)


@functools.cache
def _digest(found: str, level: Level) -> str:
    version = subprocess.run([found, "--version"], capture_output=True, timeout=60, check=False).stdout  # noqa: S603
    digest = hashlib.sha256()
    for part in (found, platform.machine(), *platform.libc_ver(), *_FLAGS, *level.flags):
        digest.update(part.encode() + b"\0")
    digest.update(version + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]

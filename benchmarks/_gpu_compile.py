"""Compiling kernels beforehand, in a process per processor, into Triton's cache on disk.

The parts of ``gpu_check.py`` are run on tensors without data and with launches that are noted in place of carried out.
Processes that have no device then compile what was noted: they need to know of one no more than its architecture.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from trivet_kernels.triton.compat import architecture

Results = dict[str, Any]
#: kernels that take several seconds to compile
_SLOW = {"draw_kernel", "prefill_kernel", "decode_kernel", "product_kernel"}
#: addresses that are multiples of this get their own variant of a kernel
_ALIGNMENT = 16


@dataclass(frozen=True)
class Pointer:
    """What a kernel's variant depends on of a tensor."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """An address that is as aligned."""
        return 0 if self.aligned else _ALIGNMENT // 2


class Launch(NamedTuple):
    """A launch of ``module``'s kernel ``name``, with pointers in place of tensors."""

    module: str
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]


class Target(NamedTuple):
    """What is compiled for."""

    backend: str
    arch: int | str
    warp_size: int


class _NoDevice:
    """A driver of Triton's for a device that is not used."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(*target)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(args: argparse.Namespace, results: Results) -> None:
    """Compile what the parts that are to be run launch."""
    if args.interpret:
        args.note("   the interpreter compiles nothing")
        return
    target = triton.runtime.driver.active.get_current_target()
    arch = architecture(torch.device(args.device))
    # What takes longest to compile comes first, so that nothing is waited for alone.
    launches = sorted(noted(lambda: _launch_all(args), arch), key=lambda launch: launch.name not in _SLOW)
    results |= {"kernels": len(launches), "compiled": 0, "seconds_each": [], "failed": []}
    args.note(f"   {len(launches)} variants of kernels")
    for name, seconds, error in compiled(launches, Target(target.backend, target.arch, target.warp_size)):
        results["compiled"] += 1
        results["seconds_each"].append(round(seconds, 2))
        if error is not None:
            results["failed"].append(f"{name}: {error}")
            args.note(f"   {name} does not compile: {error}")


def compiled(launches: Iterable[Launch], target: Target) -> Iterator[tuple[str, float, str | None]]:
    """Compile launches; yields each one's kernel, seconds, and what went wrong, in the order in which they end."""
    # Children of a process that has never seen a device, and has imported what they need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap_unordered(_compile, [(launch, target) for launch in launches])


def noted(work: Callable[[], object], arch: str) -> list[Launch]:
    """The launches that ``work`` makes, each variant once. Its tensors are on the device ``meta``."""
    found: dict[object, Launch] = {}

    def note(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:  # noqa: ARG001
        plain = {name: _plain(value) for name, value in options.items()}
        launch = Launch(kernel.__module__, kernel.__name__, tuple(map(_plain, args)), plain)
        found.setdefault(_variant(kernel, launch), launch)

    # What tensors without data say of their device: see `architecture`.
    number = arch.removeprefix("sm_")
    capability = (int(number[:-1]), int(number[-1])) if number != arch else None
    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(gcnArchName=arch)),
    ):
        work()
    return list(found.values())


def _launch_all(args: argparse.Namespace) -> None:
    import _gpu_correctness
    import _gpu_decode
    import _gpu_speed

    dry = copy.copy(args)
    dry.device, dry.note = "meta", lambda _: None
    parts: dict[str, Callable[[argparse.Namespace, Results], None]] = {
        "attention": _gpu_correctness.attention,
        "cache": _gpu_correctness.cache,
        "ops": _gpu_correctness.operations,
        "experts": _gpu_correctness.experts,
        "quantized": _gpu_correctness.quantized,
        "logits": _gpu_correctness.logits,
        "sampling": _gpu_correctness.sampling,
        "speed": _gpu_speed.attention,
        "decode": lambda args, _: _gpu_decode.launch_attention("8b", args),
        "decode_1b": lambda args, _: _gpu_decode.launch_attention("1b", args),
        "sampling_speed": _gpu_speed.sampling,
        "products": _gpu_speed.products,
        "tune": _gpu_speed.tune,
    }
    for name, part in parts.items():
        if name in args.only:
            part(dry, {})


def _compile(given: tuple[Launch, Target]) -> tuple[str, float, str | None]:
    launch, target = given
    began = time.perf_counter()
    error = None
    try:
        triton.runtime.driver.set_active(_NoDevice(target))
        kernel = getattr(import_module(launch.module), launch.name)
        kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    except Exception as exc:  # noqa: BLE001 - reported by the parent
        error = f"{type(exc).__name__}: {exc}"
    return launch.name, time.perf_counter() - began, error


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.storage_offset() * value.element_size() % _ALIGNMENT == 0)
    return value


def _variant(kernel: Any, launch: Launch) -> object:
    """What launches of the same compiled kernel have in common."""
    names = kernel.arg_names
    bound = dict(zip(names, launch.args, strict=False)) | launch.options
    key: list[object] = [launch.module, launch.name]
    for param in kernel.params:
        value = bound.pop(param.name, inspect.Parameter.empty)
        if not param.is_constexpr and isinstance(value, float):
            value = float
        elif not param.is_constexpr and isinstance(value, int) and not isinstance(value, bool):
            wide = abs(value) >= 1 << 31
            special = None if param.do_not_specialize else (value == 1, value % _ALIGNMENT == 0)
            value = (int, wide, special)
        key.append((param.name, value))
    return tuple(key), tuple(sorted(bound.items()))

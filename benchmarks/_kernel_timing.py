"""Timing of kernels that take turns, and what the device could do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: a kernel, called with the number of the call, by which it may choose among copies of its data
Run = Callable[[int], object]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel on some data by one provider. ``num_bytes`` must be read or written, ``num_flops`` computed in
    ``arithmetic``."""

    kernel: str
    shape: str
    provider: str
    arithmetic: str
    num_bytes: int
    num_flops: int
    run: Run


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device gave: bytes per second, and operations per second for each arithmetic."""

    bandwidth: float
    rates: dict[str, float]

    def seconds(self, case: Case) -> float:
        """The least that a case can take: for its memory or for its arithmetic, whichever is more."""
        return max(case.num_bytes / self.bandwidth, case.num_flops / self.rates[case.arithmetic])


@dataclass(frozen=True, slots=True)
class Timer:
    """Times kernels on ``device`` for about ``seconds`` each."""

    device: torch.device
    seconds: float
    rounds: int = 5

    def measure(self, runs: Iterable[Run]) -> list[float]:
        """Median seconds of a call of each, taken in turns."""
        runs = list(runs)
        counts = [self._count(run) for run in runs]
        times: list[list[float]] = [[] for _ in runs]
        for number in range(self.rounds):
            for run, count, taken in zip(runs, counts, times, strict=True):
                taken.append(self._once(run, count, number * count) / count)
        return [statistics.median(taken) for taken in times]

    def best(self, run: Run) -> float:
        """Seconds of the fastest round: what a ceiling is."""
        count = self._count(run)
        return min(self._once(run, count, number * count) for number in range(self.rounds)) / count

    def _count(self, run: Run) -> int:
        """Calls of a round, by what a warm one takes; the first may compile the kernel."""
        self._once(run, 1, 0)
        once = self._once(run, 1, 1)
        if once < self.seconds / 100:
            once = self._once(run, 10, 2) / 10
        return max(1, min(10_000, int(self.seconds / self.rounds / max(once, 1e-7))))

    def _once(self, run: Run, count: int, first: int) -> float:
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for number in range(first, first + count):
                run(number)
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / 1e3
        begin = time.perf_counter()
        for number in range(first, first + count):
            run(number)
        return time.perf_counter() - begin


def ceilings(timer: Timer, *, quick: bool = False) -> Ceilings:
    """Measure what bounds kernels.

    CPU: reading one array with all threads (a sum), and oneDNN's products with packed weights. CUDA: copying one array,
    bytes read and written, and cuBLAS's products.
    """
    size = 1 << (22 if quick else 28)
    rows = 128 if quick else 4096
    if timer.device.type == "cuda":
        source = torch.zeros(size, device=timer.device)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / timer.best(lambda _: target.copy_(source))
        rates = {name: _product_rate(timer, rows * 2, dtype) for name, dtype in DTYPES.items()}
        return Ceilings(bandwidth, rates)
    numbers = torch.ones(size)
    bandwidth = numbers.nbytes / timer.best(lambda _: numbers.sum())
    rates = {name: _packed_rate(timer, rows, dtype) for name, dtype in DTYPES.items()}
    return Ceilings(bandwidth, rates | {"int8": _int8_rate(timer, rows)})


def _product_rate(timer: Timer, rows: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(2, rows, rows, device=timer.device).to(dtype)
    return float(2 * rows**3 / timer.best(lambda _: left @ right))


def _packed_rate(timer: Timer, rows: int, dtype: torch.dtype) -> float:
    from trivet_torch.linear import make_linear

    size = 2048
    layer = make_linear([torch.randn(size, size)], dtype=dtype, device="cpu")
    x = torch.randn(rows, size).to(dtype)
    return 2 * rows * size**2 / timer.best(lambda _: layer(x))


def _int8_rate(timer: Timer, rows: int) -> float:
    size, one = 2048, "none"
    packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, (size, size), dtype=torch.int8), None)
    x = torch.randint(0, 256, (rows, size), dtype=torch.uint8)
    scale, zero = torch.ones(size), torch.zeros(size, dtype=torch.int64)

    def run(_: int) -> Tensor:
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, one, [], ""
        )
        return out

    return 2 * rows * size**2 / timer.best(run)


def copies(num_bytes: int, spread: int) -> int:
    """How many copies of data of a size take turns so that it comes from memory, not from a cache of ``spread``
    bytes."""
    return max(1, min(64, -(-spread // max(1, num_bytes))))


def turns(makers: Iterable[Run]) -> Run:
    """A run that passes its number on to one of several in turn."""
    runs = list(makers)
    return lambda number: runs[number % len(runs)](number)


def grouped(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Neighbours of one kernel and shape, which are alternatives to each other."""
    group: list[Case] = []
    for case in cases:
        if group and (case.kernel, case.shape) != (group[0].kernel, group[0].shape):
            yield group
            group = []
        group.append(case)
    if group:
        yield group

"""What kernels take, and what share of what the device could do at most they reach.

    python benchmarks/kernels.py [--only attention,prefill,cache,ops,linear,argmax] [--device cpu] [--threads N]
                                 [--quick] [--json FILE]
    python benchmarks/kernels.py bound MODEL [--workload mixed,single,decode,long] [--dtype bfloat16] [--threads N]

The first form measures the ceilings (bandwidth of memory, rate of matrix products in each arithmetic), and then every
kernel with each provider that runs on the device, in turns: microseconds of a call (median), GB/s of what must be
moved, GFLOP/s of what must be computed, and the share of the ceiling: the time that the slower of the two would take at
the ceilings by the time it took. Keys, values and weights come from memory as in a step, since copies take turns. What
else a step works on is in a cache, where the share can exceed 1 since the ceiling is that of memory.

- attention, prefill: writing the step's keys and values and attending; bfloat16, blocks of 16, shapes of Qwen2.5 0.5B
  and 7B, "rows x context". ``sdpa`` is PyTorch's attention without a cache, over keys that lie in one piece.
- cache: writes alone. ops: between products, ``native`` or ``triton`` beside PyTorch's. linear: products with weights
  as they are, packed by oneDNN, and of few bits with activations rounded to eight.
- argmax: the likeliest token.

The second form computes how many tokens per second a model's matrix products alone would allow on workloads of
workloads.py, from simulated steps (token budget 2,048, 64 requests at once) and products timed with packed weights of
all layers in turn. MODEL is a Hugging Face folder of a dense decoder, of which config.json is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _bound import Products, Sizes, bound, steps_of
from _kernel_attention import cache_writes, decodes, prefills
from _kernel_cases import Setting, likeliest, operations, products
from _kernel_timing import DTYPES, Case, Ceilings, Timer, ceilings, grouped
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

SECTIONS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "ops": operations,
    "argmax": likeliest,
    "cache": cache_writes,
    "attention": decodes,
    "prefill": prefills,
    "linear": products,
}
#: bytes over which copies take turns, several times what caches hold
SPREAD, QUICK_SPREAD = 1 << 28, 1 << 20
#: seconds for a kernel
SECONDS, QUICK_SECONDS = 0.4, 0.005


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print the ceilings and a table of all kernels, and return them."""
    device = torch.device(args.device)
    timer = Timer(device, QUICK_SECONDS if args.quick else SECONDS)
    setting = Setting(device, args.quick, QUICK_SPREAD if args.quick else SPREAD)
    console = Console(width=None if sys.stdout.isatty() else 140)
    limits = ceilings(timer, quick=args.quick)
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in limits.rates.items())
    console.print(f"ceilings, {_where(device)}: {limits.bandwidth / 1e9:,.1f} GB/s; GFLOP/s: {rates}")
    table = Table("kernel", "shape", "provider", *(("us", "GB/s", "GFLOP/s", "share")), highlight=False)
    for column in table.columns[3:]:
        column.justify = "right"
    lines = []
    for section in args.only.split(","):
        for group in grouped(SECTIONS[section](setting)):
            for case, seconds in zip(group, timer.measure(case.run for case in group), strict=True):
                lines.append(_line(case, seconds, limits))
                table.add_row(*_cells(lines[-1]))
                if args.verbose:
                    console.print(" ".join(_cells(lines[-1])))
    console.print(table)
    return {
        "device": _where(device),
        "threads": torch.get_num_threads(),
        "bandwidth_gb_per_s": round(limits.bandwidth / 1e9, 2),
        "gflop_per_s": {name: round(rate / 1e9, 1) for name, rate in limits.rates.items()},
        "kernels": lines,
    }


def _line(case: Case, seconds: float, limits: Ceilings) -> dict[str, Any]:
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "provider": case.provider,
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(case.num_bytes / seconds / 1e9, 3),
        "gflop_per_s": round(case.num_flops / seconds / 1e9, 3),
        "share": round(limits.seconds(case) / seconds, 4),
    }


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        line["kernel"],
        line["shape"],
        line["provider"],
        f"{line['us']:,.1f}",
        f"{line['gb_per_s']:.1f}",
        f"{line['gflop_per_s']:.1f}",
        f"{line['share']:.2f}",
    ]


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def measure_bound(args: argparse.Namespace) -> dict[str, Any]:
    """Print a line per workload of what the products would allow, and return them."""
    timer = Timer(torch.device("cpu"), QUICK_SECONDS if args.quick else SECONDS, rounds=3)
    made = Products(Sizes.of(args.model), DTYPES[args.dtype], timer)
    table = Table("workload", "steps", "body, s", "head, s", "output tokens/s", "total tokens/s", highlight=False)
    for column in table.columns[1:]:
        column.justify = "right"
    results = {}
    for name in args.workload.split(","):
        work = WORKLOADS[name](args.seed)
        steps = steps_of(work, token_budget=args.token_budget, max_num_seqs=args.max_num_seqs)
        figures = bound(made, work, steps)
        results[name] = {key: round(value, 4) for key, value in figures.items()}
        table.add_row(name, f"{figures['steps']:.0f}", *(f"{value:.2f}" for value in list(figures.values())[1:]))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return {"model": str(args.model), "dtype": args.dtype, "threads": torch.get_num_threads(), "bound": results}


def _names(known: dict[str, Any]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
        return text

    return check


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def parse() -> argparse.Namespace:
    """The command line of either form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--threads", type=_positive, help="of PyTorch and the native kernels; default: PyTorch's")
    common.add_argument("--quick", action="store_true", help="few shapes and short runs: whether it works at all")
    common.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    if sys.argv[1:2] == ["bound"]:
        parser = argparse.ArgumentParser(prog="kernels.py bound", description=__doc__, parents=[common])
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("form", choices=["bound"], help="this form")
        parser.add_argument("model", type=Path, help="a Hugging Face folder")
        parser.add_argument(
            "--workload",
            type=_names(dict(WORKLOADS)),
            default="mixed,single,decode,long",
            help=f"of {', '.join(WORKLOADS)}, by commas (default: %(default)s)",
        )
        parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the products (default: bfloat16)")
        parser.add_argument("--seed", type=int, default=0, help="of the workloads (default: 0)")
        parser.add_argument("--token-budget", type=_positive, default=2048, help="tokens of a step (default: 2048)")
        parser.add_argument("--max-num-seqs", type=_positive, default=64, help="requests at once (default: 64)")
        return parser.parse_args()
    parser = argparse.ArgumentParser(description=__doc__, parents=[common])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only",
        type=_names(dict(SECTIONS)),
        default=",".join(SECTIONS),
        help="sections, by commas (default: all, %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: cpu)")
    parser.add_argument("--verbose", action="store_true", help="print lines as they are measured")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the figures where they are wanted."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    with torch.no_grad():
        figures = measure_bound(args) if "model" in args else measure(args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

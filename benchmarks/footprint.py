"""What a process that serves a model takes of the machine's memory, from the first import on.

    python benchmarks/footprint.py MODEL [--quantization int8] [--work short,long,mixed] [--json FILE]

Goes through the points of one process, and says at each what Linux has counted (``/proc/self/status``): the most that
was ever resident (VmHWM), what is resident now (VmRSS), and *beyond*: the peak less the model's weights and less the
pages of the KV cache that were ever written, which the system hands out one by one (``/proc/self/pagemap``). All of it
in MiB. Work is ``short`` (64 requests of 40 tokens, 4 out) or one of workloads.py; token ids beyond the model's
vocabulary are folded into it, prompts longer than its context are cut. Other processes do not matter.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import WORKLOADS, Work

if TYPE_CHECKING:
    from trivet import LLM

_MIB = 2**20
_STATUS, _PAGES = Path("/proc/self/status"), Path("/proc/self/pagemap")
#: bytes of an entry of pagemap; its top bit says that the page is in memory
_ENTRY_BYTES, _PRESENT = 8, 63
_AT_ONCE = 2048  # entries

Point = dict[str, Any]


def short(seed: int) -> Work:
    """64 requests of 40 tokens, 4 out: one full step, and few more."""
    rng = random.Random(seed)
    return [([rng.randrange(100, 150_000) for _ in range(40)], 4) for _ in range(64)]


WORK = {"short": short, **WORKLOADS}


def resident() -> dict[str, float]:
    """MiB that are resident now and were at most."""
    fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {name: int(fields[key].split()[0]) / 1024 for name, key in (("peak", "VmHWM"), ("resident", "VmRSS"))}


def present_bytes(spans: Sequence[tuple[int, int]]) -> int:
    """Bytes of whole pages in memory within ``(address, size)``."""
    import mmap

    import numpy as np

    page = mmap.PAGESIZE
    count = 0
    with _PAGES.open("rb") as pages:
        for address, size in spans:
            first, last = -(-address // page), (address + size) // page
            pages.seek(first * _ENTRY_BYTES)
            # Little by little: what this takes is resident, too, and the next work would find it on the heap.
            for at in range(first, last, _AT_ONCE):
                entries = np.frombuffer(pages.read(min(_AT_ONCE, last - at) * _ENTRY_BYTES), np.uint64)
                count += int((entries >> np.uint64(_PRESENT)).sum())
    return count * page


def cache_spans(llm: LLM) -> list[tuple[int, int]]:
    """Address and size of every buffer of the KV cache in this process."""
    from trivet_torch.paged_attention import PagedAttention

    layers = [spec.layer for spec in llm.engine.parts.layout.specs]
    found = set()
    for attention in gc.get_objects():
        if isinstance(attention, PagedAttention):
            for layer in layers:
                for part in attention.kv(layer):
                    storage = part.untyped_storage()
                    found.add((storage.data_ptr(), storage.nbytes()))
    return sorted(found)


def run(llm: LLM, work: Work) -> None:
    """Generate, greedily, whatever the end of the sequence."""
    from trivet import SamplingParams

    parts = llm.engine.parts
    prompts: list[Any] = []
    for prompt, count in work:
        length = min(len(prompt), parts.max_model_len - count)
        if length < 1:
            raise SystemExit(
                f"--max-model-len {parts.max_model_len} leaves no room for a prompt and {count} tokens out"
            )
        prompts.append({"prompt_token_ids": [token % parts.vocab_size for token in prompt[:length]]})
    params = [SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, temperature=0.0) for _, count in work]
    llm.generate(prompts, params, use_tqdm=False)


def measure(args: argparse.Namespace) -> Iterator[Point]:
    """The points, one after the other."""
    from trivet import LLM

    yield {"point": "import trivet", **resident()}
    import torch  # noqa: F401

    yield {"point": "import torch", **resident()}
    options: dict[str, Any] = {} if args.quantization == "none" else {"quantization": args.quantization}
    llm = LLM(
        args.model,
        dtype=args.dtype,
        device="cpu",
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        **options,
    )
    with llm:
        weights = llm.engine.parts.info.weight_bytes / _MIB
        spans = cache_spans(llm)

        def now(point: str) -> Point:
            found = resident()
            cache = present_bytes(spans) / _MIB
            return {
                "point": point,
                **found,
                "weights": weights,
                "kv": cache,
                "beyond": found["peak"] - weights - cache,
                "resident_beyond": found["resident"] - weights - cache,
            }

        yield now("loaded")
        for name in args.work:
            run(llm, WORK[name](args.seed))
            yield now(name)


_COLUMNS = ("peak", "resident", "weights", "kv", "beyond", "resident_beyond")


def table(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| MiB | peak | resident | weights | KV | beyond | resident beyond |"
    yield "|---|---|---|---|---|---|---|"
    for point in points:
        cells = [f"{point[name]:.0f}" if name in point else "" for name in _COLUMNS]
        yield f"| {point['point']} | {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="hub id, folder, GGUF file, or demo")
    parser.add_argument("--quantization", default="none", help="none, int8, int4 or gguf")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV cache")
    parser.add_argument("--max-model-len", type=int, default=4096, help="most tokens of a request")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="most requests that run together")
    parser.add_argument("--work", default="short,long,mixed", help=f"by commas, in that order: {', '.join(WORK)}")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the figures, unrounded")
    args = parser.parse_args(arguments)
    args.work = [name for name in args.work.split(",") if name]
    unknown = [name for name in args.work if name not in WORK]
    if unknown:
        parser.error(f"--work: {', '.join(unknown)} is none of {', '.join(WORK)}")
    for name in ("max_model_len", "max_num_seqs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not (_STATUS.is_file() and _PAGES.is_file()):
        parser.error("this system has no /proc/self/status and pagemap; run it on Linux")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Go through the points, and print the table."""
    args = parse(arguments)
    points = []
    for point in measure(args):
        points.append(point)
        print(f"{point['point']}: peak {point['peak']:.0f} MiB", file=sys.stderr, flush=True)
    print("\n".join(table(points)))
    if args.json is not None:
        args.json.write_text(json.dumps(points, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compile Triton kernels for GPUs that are not there, and say what the compilers report.

Compiling needs no device, but a process that interprets kernels cannot compile them: a child process without
``TRITON_INTERPRET`` does it, and Triton's own cache on disk makes repetitions quick.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: target → (backend, architecture, threads of a warp, bytes of shared memory a program may use)
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Compiled:
    """What the compilers say of a kernel. ``spills`` is bytes of stack and local memory per thread on CUDA, and bytes
    of scratch memory or spilled registers on ROCm, whichever is more. ``products`` names the instructions that multiply
    matrices, without their sizes but for how many products they add up."""

    target: str
    shared: int
    registers: int
    spills: int
    products: tuple[str, ...]

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that the target has for one program."""
        return TARGETS[self.target][3]


def compile_for(
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    *,
    unaligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 2,
    **options: Any,
) -> Compiled:
    """Compile one kernel and return what the compilers report.

    Args:
        kernel: ``"package.module:name"`` of a ``@triton.jit`` function.
        signature: Types of the arguments that are not constants: ``*bf16``, ``i32``, ``fp32`` …
        constants: Values of the ``tl.constexpr`` arguments, and None for pointers that are not given.
        target: A key of :data:`TARGETS`.
        unaligned: Arguments of which Triton may not assume that they are multiples of 16: it does for all other
            pointers and integers, as it does at run time when they are.
        num_warps: As at a launch.
        num_stages: As at a launch.
        options: Further launch options of the target's backend, such as ``waves_per_eu``.
    """
    request = {
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "target": target,
        "unaligned": list(unaligned),
        "options": {"num_warps": num_warps, "num_stages": num_stages, **options},
    }
    worker = _worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the compiler's process ended while it compiled {kernel} for {target}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(f"{kernel} does not compile for {target}: {answer['error']}")
    return Compiled(target=target, **answer | {"products": tuple(answer["products"])})


@functools.cache
def _worker() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(_stop, worker)
    return worker


def _stop(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.close()
    worker.wait(timeout=60)


def _compile(request: Mapping[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = request["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    constants, given = request["constants"], request["signature"]
    missing = set(kernel.arg_names) ^ (set(constants) | set(given))
    if missing:
        raise TypeError(f"arguments {sorted(missing)} are missing or unknown")
    signature = {argument: given.get(argument, "constexpr") for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if argument not in request["unaligned"] and given.get(argument, "").startswith(("*", "i"))
    }
    backend, arch, warp_size, _ = TARGETS[request["target"]]
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=request["options"])
    shared = int(compiled.metadata.shared)
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        counts = {
            key: int(value)
            for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)
        }
        spills = max(counts["vgpr_spill_count"] * 4, counts["private_segment_fixed_size"])
        products = sorted(set(re.findall(r"\bv_s?mfmac?_\w+", text)))
        return {"shared": shared, "registers": counts["vgpr_count"], "spills": spills, "products": products}
    tool = triton.knobs.nvidia.cuobjdump.path
    cubin = Path(os.environ.get("TMPDIR", "/tmp")) / f"trivet-{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    try:
        report = subprocess.run(
            [tool, "--dump-resource-usage", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    finally:
        cubin.unlink()
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    found = re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)(?:\S*?m\d+n\d+(k\d+))?", compiled.asm["ptx"])
    products = sorted({" ".join(filter(None, names)) for names in found})
    spills = used["STACK"] + used["LOCAL"]
    return {"shared": shared, "registers": used["REG"], "spills": spills, "products": products}


def _serve() -> None:
    # Whatever compilers print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = _compile(json.loads(line))
        except Exception as exc:  # noqa: BLE001 - the parent raises it
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()

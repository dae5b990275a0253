"""Which kind of device a configuration means, told without importing torch: for ``suits``, which must be quick."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_CUDA_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_ROCM_NODE = Path("/dev/kfd")


def device_kind(name: str) -> str:
    """The kind of torch device that ``device: name`` will be: ``cuda`` (ROCm too), ``cpu`` or another.

    ``auto`` is ``cuda`` if torch was built for an accelerator that the system has; what torch itself finds may still
    differ, and is what counts in the worker.
    """
    if name != "auto":
        return name.partition(":")[0]
    return "cuda" if _has_accelerator() else "cpu"


def _has_accelerator() -> bool:
    libraries = _torch_libraries()
    if libraries is None:
        return False
    if (libraries / "libtorch_hip.so").exists():
        return _ROCM_NODE.exists() and os.environ.get("HIP_VISIBLE_DEVICES") != ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in {"", "-1"}
    if (libraries / "torch_cuda.dll").exists():
        return visible
    return (libraries / "libtorch_cuda.so").exists() and visible and any(node.exists() for node in _CUDA_NODES)


def _torch_libraries() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "lib"

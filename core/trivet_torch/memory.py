"""How much memory there is for the KV cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trivet.roles.model import ModelInfo

_CGROUPS = Path("/sys/fs/cgroup")
_GRAPH_BYTES = 16 << 20


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process can still take on a device, and all that the device has. Elsewhere than on CUDA and ROCm
    it is the machine's RAM."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return free, total
    return free_ram(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(
    device: torch.device, *, workspace: int, gpu_share: float, cpu_share: float, to_load: int = 0
) -> int:
    """Bytes that the KV cache may take once the weights are loaded.

    On an accelerator: ``gpu_share`` of its memory, less what is in use and ``workspace``, the bytes of the largest
    step. Elsewhere: ``cpu_share`` of the RAM that is free for this process, less ``workspace``; the rest is for
    other programs.

    Args:
        device: Where the cache will be.
        workspace: Bytes of the largest step.
        gpu_share: Share of an accelerator's memory for everything.
        cpu_share: Share of the free RAM for the cache.
        to_load: Bytes of weights that are yet to be loaded.
    """
    free, total = device_memory(device)
    if device.type == "cuda":
        return max(0, int(total * gpu_share) - (total - free) - to_load - workspace)
    return max(0, int(max(0, free - to_load) * cpu_share) - workspace)


def workspace_bytes(info: ModelInfo, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """An upper estimate of what a step allocates beside weights and cache: float32 logits with three copies while
    sampling, and sixteen activations of hidden size per token in the widest layer."""
    logits = 4 * max_num_seqs * info.vocab_size * 4
    activations = 16 * max_num_batched_tokens * info.hidden_size * (4 if info.dtype == "float32" else 2)
    return logits + activations


def graph_bytes(info: ModelInfo, sizes: Sequence[int]) -> int:
    """An estimate of what recorded decode steps of ``sizes`` rows take: the intermediate results of the largest, which
    all share, and 16 MiB for each. That is a guess at what a driver keeps of a graph; a profile measures it."""
    return workspace_bytes(info, max(sizes), max(sizes)) + len(sizes) * _GRAPH_BYTES if sizes else 0


def free_ram(cgroups: Path = _CGROUPS, proc: Path = Path("/proc")) -> int:
    """Bytes of RAM that this process can still take: what the system has free, or less where a control group limits it.

    Args:
        cgroups: Mount point of the control groups.
        proc: Mount point of the process information.
    """
    limits = [_system_available(proc)]
    groups = (proc / "self" / "cgroup").read_text().splitlines() if (proc / "self" / "cgroup").is_file() else []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _group_rooms(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            limits += _group_rooms(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return max(0, min(limits))


def _system_available(proc: Path) -> int:
    meminfo = proc / "meminfo"
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _group_rooms(root: Path, path: str, limit_name: str, usage_name: str, cached_name: str) -> list[int]:
    """What the group and every group above it leave. Inside a container the path may not exist: the mount is then the
    group itself."""
    rooms: list[int] = []
    folder = root / path.lstrip("/")
    if not folder.is_dir():
        folder = root
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        limit = _read_number(group / limit_name)
        usage = _read_number(group / usage_name)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + _reclaimable(group / "memory.stat", cached_name))
    return rooms


def _read_number(file: Path) -> int | None:
    """The number in a file; None if there is no such file or it says ``max``."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None


def _reclaimable(file: Path, name: str) -> int:
    """Cached file pages, which count as used but are given up on demand."""
    if file.is_file():
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0

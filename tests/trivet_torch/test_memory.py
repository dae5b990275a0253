"""How much memory the runner promises to the KV cache."""

from __future__ import annotations

import unittest.mock
from pathlib import Path

import torch

from trivet.roles import ModelInfo
from trivet_torch.memory import available_bytes, free_ram, workspace_bytes

MIB = 1 << 20
INFO = ModelInfo(vocab_size=1000, max_model_len=64, hidden_size=32)


def machine(root: Path, *, available: int, group: str = "", files: dict[str, str] | None = None) -> tuple[Path, Path]:
    """Folders like ``/sys/fs/cgroup`` and ``/proc`` of a machine with so much free."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(group)
    cgroups.mkdir()
    for name, text in (files or {}).items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return cgroups, proc


def test_without_a_limit_it_is_what_the_system_has(tmp_path: Path) -> None:
    files = {"a/memory.max": "max\n", "a/memory.current": "5\n"}
    cgroups, proc = machine(tmp_path, available=100 * MIB, group="0::/a\n", files=files)
    assert free_ram(cgroups, proc) == 100 * MIB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{50 * MIB}\n",
        "a/memory.current": f"{30 * MIB}\n",
        "a/memory.stat": f"anon 7\ninactive_file {4 * MIB}\n",
        "a/b/memory.max": f"{90 * MIB}\n",
        "a/b/memory.current": f"{10 * MIB}\n",
    }
    cgroups, proc = machine(tmp_path, available=100 * MIB, group="0::/a/b\n", files=files)
    assert free_ram(cgroups, proc) == 24 * MIB, "what is cached is given up on demand"


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    files = {"memory.max": f"{40 * MIB}\n", "memory.current": f"{10 * MIB}\n"}
    cgroups, proc = machine(tmp_path, available=100 * MIB, group="0::/not/here\n", files=files)
    assert free_ram(cgroups, proc) == 30 * MIB


def test_groups_of_version_one(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": f"{60 * MIB}\n",
        "memory/job/memory.usage_in_bytes": f"{20 * MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": f"{20 * MIB}\n",
    }
    group = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    cgroups, proc = machine(tmp_path, available=100 * MIB, group=group, files=files)
    assert free_ram(cgroups, proc) == 40 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": f"{10 * MIB}\n", "memory.current": f"{12 * MIB}\n"}
    cgroups, proc = machine(tmp_path, available=100 * MIB, group="0::/\n", files=files)
    assert free_ram(cgroups, proc) == 0


def test_a_cpu_gives_the_configured_share() -> None:
    def available(share: float, workspace: int = 0, to_load: int = 0) -> int:
        device = torch.device("cpu")
        return available_bytes(device, workspace=workspace, gpu_share=0.9, cpu_share=share, to_load=to_load)

    with unittest.mock.patch("trivet_torch.memory.free_ram", return_value=100 * MIB):
        assert [available(0.25), available(0.5)] == [25 * MIB, 50 * MIB]
        assert available(0.5, workspace=20 * MIB) == 30 * MIB
        assert available(0.5, workspace=20 * MIB, to_load=40 * MIB) == 10 * MIB
        assert available(0.5, to_load=200 * MIB) == 0


def test_a_gpu_keeps_room_for_weights_and_workspace() -> None:
    def available(share: float, to_load: int = 0) -> int:
        device = torch.device("cuda")
        return available_bytes(device, workspace=30 * MIB, gpu_share=share, cpu_share=0.5, to_load=to_load)

    with unittest.mock.patch("torch.cuda.mem_get_info", return_value=(600 * MIB, 1000 * MIB)):
        assert available(0.9) == (900 - 400 - 30) * MIB
        assert available(0.9, to_load=100 * MIB) == (900 - 400 - 100 - 30) * MIB
        assert available(0.3) == 0


def test_the_estimate_grows_with_tokens_rows_and_width() -> None:
    base = workspace_bytes(INFO, 4, 64)
    assert workspace_bytes(INFO, 4, 128) - base == 16 * 64 * 32 * 4, "sixteen float32 activations per token"
    assert workspace_bytes(INFO, 8, 64) - base == 4 * 4 * 1000 * 4, "four times the float32 logits per row"

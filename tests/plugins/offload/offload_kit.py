"""Both halves of the tier without an engine, over storage that tests can look into."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trivet.plan import Transfer
from trivet.roles import KVGroup, KVLayout, KVStorage, LayerKVSpec, TransferReport
from trivet_offload.geometry import Geometry
from trivet_offload.options import OffloadOptions
from trivet_offload.policies import ArcPolicy, LruPolicy
from trivet_offload.segments import SegmentPlan
from trivet_offload.tier import OffloadTier
from trivet_offload.worker import OffloadWorker

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def make_layout(
    groups: Sequence[Sequence[int]] = ((0,),), *, size: int = 4, heads: int = 2, dim: int = 3, dtype: str = "float32"
) -> KVLayout:
    """Layers by group; the second group has a window."""
    specs = tuple(
        LayerKVSpec(layer, "sliding" if g else "full", heads, dim, dtype, 8 if g else None)
        for g, layers in enumerate(groups)
        for layer in layers
    )
    made = tuple(
        KVGroup(g, tuple(layers), "sliding" if g else "full", size, 8 if g else None) for g, layers in enumerate(groups)
    )
    return KVLayout(specs, made, tuple(KVStorage((spec.layer,), 40) for spec in specs))


class Storage:
    """Noise in every layer; ``strided`` pages hold keys, values and something else side by side."""

    def __init__(self, layout: KVLayout, num_blocks: int = 40, *, strided: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pages: list[torch.Tensor] = []
        sizes = {layer: group.block_size for group in layout.groups for layer in group.layers}
        for spec in layout.specs:
            shape = (num_blocks, 3 if strided else 2, sizes[spec.layer], spec.num_kv_heads, spec.head_dim)
            page = torch.randn(shape, generator=generator).to(DTYPES[spec.dtype])
            self.pages.append(page)
            self.layers[spec.layer] = page[:, 0], page[:, 1]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer]

    def content(self, layers: Sequence[int], block: int) -> bytes:
        """A block's bytes in all of these layers."""
        parts = [part[block].contiguous().view(torch.uint8) for layer in layers for part in self.layers[layer]]
        return b"".join(part.numpy().tobytes() for part in parts)

    def poison(self, blocks: Sequence[int]) -> None:
        for page in self.pages:
            page.view(torch.uint8)[list(blocks), :2] = 0x5A


def context(layout: KVLayout, tier: Any = None, *, model: str = "fake", device: str = "cpu", rank: int = 0) -> Any:
    """What the halves ask of their contexts."""
    policies = {"lru": LruPolicy, "arc": ArcPolicy}
    return SimpleNamespace(
        layout=layout,
        config=SimpleNamespace(model=model, revision=None, dtype="auto"),
        info=SimpleNamespace(device=device),
        device=device,
        rank=rank,
        selected=lambda role: [(f"some {role}", {})],
        all=lambda role: [] if tier is None else [tier],
        component=lambda kind, name, capacity: policies[name](capacity),
    )


def options(slots: int, layout: KVLayout, *, disk: int = 0, path: Path | None = None, **fields: Any) -> OffloadOptions:
    """Room for ``slots`` blocks in memory, and for ``disk`` on disk."""

    size = Geometry.of(layout).slot_bytes
    more: dict[str, Any] = {"path": str(path), "disk_memory": disk_bytes(size, disk)} if path is not None else {}
    return OffloadOptions(host_memory=slots * size, **more | fields)


def disk_bytes(slot_bytes: int, slots: int) -> int:
    """``disk_memory`` with room for so many blocks in one file."""

    size = 3 * 4096 + slots * (slot_bytes + 88)
    assert SegmentPlan.of(slot_bytes, size).num_slots == slots
    return size


class Rig:
    """An engine half and one worker half, with the core's part of moving between them."""

    def __init__(self, layout: KVLayout, chosen: OffloadOptions, storage: Any = None, **details: Any) -> None:
        self.layout, self.options = layout, chosen
        self.storage = storage if storage is not None else Storage(layout)
        self.tier = OffloadTier(None, chosen)
        shared = context(layout, self.tier, **details)
        self.worker = OffloadWorker(shared, chosen)
        self.worker.bind(self.storage)
        try:
            self.tier.bind(shared)
        except BaseException:
            self.worker.shutdown()
            raise
        self._ids = 0

    def transfer(self, entries: Sequence[tuple[int, int, bytes]], payload: bytes, *, blocking: bool) -> Transfer:
        """A transfer of ``(group, block, key)``; every group begins with a null block."""
        self._ids += 1
        blocks, keys = [], []
        for group in self.layout.groups:
            mine = [(block, key) for g, block, key in entries if g == group.index]
            blocks.append(np.array([0, *(block for block, _ in mine)], np.int32))
            keys += [b"", *(key for _, key in mine)]
        return Transfer(self._ids, "offload", -1, -1, 0, 0, blocks, keys, blocking, payload)

    def store(self, *entries: tuple[int, int, bytes]) -> list[bool]:
        """Offer blocks, and carry the transfer out."""
        entries = tuple(sorted(entries, key=lambda entry: entry[0]))
        choice = self.tier.store([key for _, _, key in entries])
        kept = [entry for entry, taken in zip(entries, choice.taken, strict=True) if taken]
        if kept:
            transfer = self.transfer(kept, choice.payload, blocking=True)
            self.worker.submit(transfer, store=True)
            report = self.worker.poll()
            assert report.finished == [transfer.transfer_id]
            self.tier.settled(transfer, store=True, ok=True)
        self.tier.check_integrity()
        return choice.taken

    def load(self, *entries: tuple[int, int, bytes]) -> tuple[bool, list[list[int]]]:
        """Load into blocks; whether it went well, and the blocks that are bad, per group."""
        entries = tuple(sorted(entries, key=lambda entry: entry[0]))
        how = self.tier.load([key for _, _, key in entries])
        transfer = self.transfer(entries, how.payload, blocking=how.blocking)
        self.worker.submit(transfer, store=False)
        report = self.wait(patient=not how.blocking)
        ok = report.finished == [transfer.transfer_id]
        assert ok or report.failed == [transfer.transfer_id]
        bad = {block for blocks in report.invalid_blocks for block in blocks}
        self.tier.forget([key for _, block, key in entries if block in bad])
        self.tier.settled(transfer, store=False, ok=ok)
        self.tier.check_integrity()
        return ok, report.invalid_blocks

    def wait(self, *, patient: bool = True) -> TransferReport:
        """The next report that says anything."""
        while True:
            report = self.worker.poll()
            if report.finished or report.failed or not patient:
                return report
            time.sleep(0.001)

    def end(self) -> None:
        self.worker.shutdown()
        self.tier.shutdown()

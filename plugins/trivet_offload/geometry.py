"""How large a block is, from the KV layout: the same arithmetic in the engine and in the workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivet.errors import TrivetError
from trivet_offload.segments import SegmentPlan
from trivet_schemas.options import format_size

if TYPE_CHECKING:
    from trivet.roles import KVLayout
    from trivet_offload.options import OffloadOptions

_PATH = "plugins.cache_tier.offload"


@dataclass(frozen=True, slots=True)
class Geometry:
    """``group_bytes[g]``: keys and values of one block of group ``g``, over all its layers. A place of a tier has room
    for a block of any group."""

    group_bytes: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        """The size of a place, a multiple of 64 bytes."""
        return -(-max(self.group_bytes) // 64) * 64

    @classmethod
    def of(cls, layout: KVLayout) -> Geometry:
        """From what the cache decided."""
        sizes = {spec.layer: spec.bytes_per_token for spec in layout.specs}
        return cls(tuple(g.block_size * sum(sizes[layer] for layer in g.layers) for g in layout.groups))

    def host_slots(self, options: OffloadOptions) -> int:
        """Places in host memory. Raises TrivetError if there is not even one."""
        count = options.host_memory // self.slot_bytes
        if count < 1:
            raise TrivetError(
                f"{_PATH}.host_memory: {format_size(options.host_memory)} is less than one block of this model, which "
                f"has {format_size(self.slot_bytes)}; set it to a multiple of that, or remove the tier"
            )
        return count

    def segments(self, options: OffloadOptions) -> SegmentPlan:
        """Places on disk. Raises TrivetError if there is not even one."""
        plan = SegmentPlan.of(self.slot_bytes, options.disk_memory)
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * plan.table_bytes > ram:  # the engine reads it too, and there are other things
            raise TrivetError(
                f"{_PATH}.disk_memory: {format_size(options.disk_memory)} are {plan.num_slots} blocks of this model, "
                f"and the list of them, {format_size(plan.table_bytes)}, takes too much memory; set it lower"
            )
        return plan

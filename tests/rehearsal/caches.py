"""A cache that stores blocks to a tier of its own while requests run."""

from __future__ import annotations

from typing import Any

from trivet.hookspecs import hookimpl
from trivet.plan import Transfer
from trivet.provider import Provider
from trivet_paged.cache import PagedCache


class StoringCache(PagedCache):
    """Stores the first block of every request as soon as it is final, and keeps it until it is stored."""

    def configure(self, need: Any) -> Any:
        layout = super().configure(need)
        self.wants_commits = True
        return layout

    def bind(self, context: Any) -> None:
        super().bind(context)
        self._seen, self._stores = set(), []
        self._kept: dict[int, int] = {}
        self.ended: list[bool] = []

    def commit(self, slots: Any, num_tokens: Any) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            epoch = int(self._table.epoch[slot])
            if count >= self.block_size and epoch not in self._seen:
                self._seen.add(epoch)
                blocks = self._ledger.blocks(slot)[:1]
                named = (slot, epoch) if epoch % 2 else (-1, -1)  # a tier's blocks need not be one request's
                store = Transfer(-1, "shelf", *named, 0, self.block_size, [blocks])
                self._kept[id(store)] = self._ledger.lease(blocks.tolist())
                self._stores.append(store)

    def take_stores(self) -> list[Transfer]:
        stores, self._stores = self._stores, []
        return stores

    def transfer_ended(self, transfer: Transfer, *, ok: bool) -> None:
        self.settle(self._kept.pop(id(transfer)))
        self.ended.append(ok)


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("cache", "storing", "caches:StoringCache", "trivet_paged.options:PagedOptions")]

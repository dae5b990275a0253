"""Caches with one fault each, beside :mod:`conformance_faults`."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance_faults import found_by
from conformance_providers import SharingCache, WindowCache

from trivet.roles import Allocation, CacheHit, CacheStats
from trivet_paged.cache import PagedCache
from trivet_paged.options import PagedOptions

LIVES = ("CacheSuite", "test_long_lives_against_a_naive_memory")


@found_by(*LIVES, "an appended block is one that no table and no lease needs")
class FreesRetiredBlocksAtOnce(SharingCache):
    def retire(self, slot: int) -> int:
        blocks = self._ledger.blocks(slot).tolist()
        lease = super().retire(slot)
        self._free.extend(b for b in blocks if b not in self._free)
        return lease

    def check_integrity(self) -> None:
        pass


@found_by(*LIVES, "what admission finds is the KV of these very tokens and tags")
class IgnoresTags(SharingCache):
    def key(self, request: Any, tokens: Any) -> Any:
        return tokens.tobytes()


@found_by(*LIVES, "what admission finds is the KV of these very tokens and tags")
class LooksAtTheLastBlockOnly(SharingCache):
    def key(self, request: Any, tokens: Any) -> Any:
        tags, _, images = super().key(request, tokens)
        return tags, len(tokens), tokens[-self._size :].tobytes(), images


@found_by(*LIVES, "what admission finds is the KV of these very tokens and tags")
class IgnoresImages(SharingCache):
    def key(self, request: Any, tokens: Any) -> Any:
        return super().key(request, tokens)[:2]


@found_by(*LIVES, "nothing is found for a request with prompt_logprobs")
class FindsPromptsWhoseLogprobsAreWanted(SharingCache):
    def admit(self, slot: int, request: Any) -> CacheHit:
        self._table.prompt_logprobs[slot], wanted = False, self._table.prompt_logprobs[slot]
        hit = super().admit(slot, request)
        self._table.prompt_logprobs[slot] = wanted
        return hit


@found_by(*LIVES, "what admission finds is the KV of these very tokens and tags")
class RemembersWhatIsNotComputed(SharingCache):
    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        got = super().extend(slots, totals, reserve)
        for slot in slots[: got.rows].tolist():
            self.remember(slot, int(self._table.num_known[slot]))
        return got


@found_by(*LIVES, "at least the last known token is never counted as found")
class FindsEverything(SharingCache):
    def admit(self, slot: int, request: Any) -> CacheHit:
        hit = super().admit(slot, request)
        return CacheHit(request.num_prompt if hit.num_tokens else 0)


@found_by(*LIVES, "a fork gets a copy of a last block that is partly filled")
class ForksWithoutCopies(SharingCache):
    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        blocks = self._ledger.blocks(parent)[: -(-num_tokens // self._size)].tolist()
        self._ledger.append(child, blocks)
        return Allocation(1, [[child] * len(blocks)], [blocks])


@found_by(*LIVES, "stays in its blocks")
class ForgetsToCopy(SharingCache):
    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        got = super().fork(parent, child, num_tokens)
        if got is not None:
            got.copies = None
        return got


@found_by(*LIVES, "stays in its blocks")
class NamesNobody(SharingCache):
    def invalidate(self, blocks: Any) -> list[tuple[int, int]]:
        super().invalidate(blocks)
        return []


@found_by(*LIVES, "rows that got no memory are left as they were")
class TakesWhatThereIs(SharingCache):
    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        got = super().extend(slots, totals, reserve)
        if got.rows < len(slots) and self._free:
            self._ledger.append(int(slots[got.rows]), [self.take()])
        return got


@found_by(*LIVES, "reset forgets all content when no block is in use")
class ResetsAtAnyTime(SharingCache):
    def reset(self) -> bool:
        super().reset()
        return True


@found_by("CacheSuite", "test_a_prompt_is_found_again", "what admission finds is the KV of these")
class ResetsNothing(SharingCache):
    def reset(self) -> bool:
        return self._ledger.idle


@found_by("CacheSuite", "test_a_prompt_is_found_again", "a prompt is found again under the same tags")
class FindsNothing(SharingCache):
    def commit(self, slots: Any, num_tokens: Any) -> None:
        pass


@found_by(*LIVES, "a block is used while a live table holds it")
class CountsRetiredBlocksAsFree(SharingCache):
    def stats(self) -> CacheStats:
        stats = super().stats()
        return CacheStats(stats.total, stats.free + stats.retired, stats.used, 0, stats.leased)


@found_by("CacheSuite", "test_tables_that_were_read_do_not_change", "does not change later")
class GivesViews(SharingCache):
    def tables(self, slot: int) -> list[Any]:
        return [self._ledger.tables[0][slot, : self._ledger.length[slot]]]

    def retire(self, slot: int) -> int:
        lease = super().retire(slot)
        self._ledger.tables[0][slot] = 0
        return lease


@found_by("CacheSuite", "test_block_sizes_are_ones_that_attention_can_do", "a multiple of", multiple=8, largest=64)
class TakesAnyBlockSize(SharingCache):
    def configure(self, need: Any) -> Any:
        from dataclasses import replace

        from trivet.roles import AttentionSupport

        return super().configure(replace(need, support=tuple(AttentionSupport() for _ in need.support)))


@found_by(*LIVES, "when it leaves a window")
class GivesBackABlockTooEarly(WindowCache):
    windows = (8, 8)

    def outside(self, count: int) -> int:
        return max(0, count - self._window + 2) // self._size


@found_by(*LIVES, "when it leaves a window")
class ShortensTables(WindowCache):
    windows = (8, 8)

    def tables(self, slot: int) -> list[Any]:
        return [np.array([b for b in self._tables[slot] if b], np.int32)]


class _Paged(PagedCache):
    """The bundled cache in a small pool."""

    windows = (None, 6)
    tiers = (12,)

    def __init__(self, context: Any, options: Any) -> None:
        super().__init__(context, PagedOptions(block_size=4, num_blocks=1 + 36))


@found_by(*LIVES, "a row within `rows` covers its tokens")
class ReservesNothing(_Paged):
    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        return super().extend(slots, totals)


@found_by(*LIVES, "blocks that have left the window are given back")
class KeepsItsWindowsForEver(_Paged):
    def commit(self, slots: Any, num_tokens: Any) -> None:
        self._passed[:, slots] = 10**6
        super().commit(slots, num_tokens)


@found_by(*LIVES, "a block that others hold, or that can be found, is never written")
class KeepsQuietAboutEvictions(_Paged):
    def take_events(self) -> Any:
        stored, _ = super().take_events()
        return stored, []


@found_by(*LIVES, "what events and tiers say is there is found")
class TellsOfWhatItDoesNotUse(_Paged):
    def admit(self, slot: int, request: Any) -> CacheHit:
        self._table.whole_prompt[slot], wanted = True, self._table.whole_prompt[slot]
        hit = super().admit(slot, request)
        self._table.whole_prompt[slot] = wanted
        return hit


@found_by(*LIVES, "only blocks that are full of committed tokens can be found")
class NamesWhatIsInFlight(_Paged):
    def commit(self, slots: Any, num_tokens: Any) -> None:
        super().commit(slots, np.minimum(num_tokens + 4, self._table.num_known[slots]).astype(np.int32))


@found_by(*LIVES, "nobody waits for requests that make no progress")
class ForgetsThoseWhoWait(_Paged):
    def take_stores(self) -> Any:
        return [] if self._tiers is None else self._tiers.take_stores()


@found_by(*LIVES, "only blocks that are full of committed tokens can be found")
class TrustsLoadsThatFailed(_Paged):
    def transfer_ended(self, transfer: Any, *, ok: bool) -> None:
        super().transfer_ended(transfer, ok=True)


@found_by(*LIVES, "are read before anything is written")
class StoresAtLeisure(_Paged):
    def take_stores(self) -> Any:
        stores = super().take_stores()
        for store in stores:
            store.blocking = False
        return stores

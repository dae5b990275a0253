"""What an engine may do to a cache, in any order: by hypothesis, for short examples, and in long random walks."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from trivet.roles import Cache
from trivet.state import PromptRange
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_model import CacheModel

MAX_MODEL_LEN = 40
MAX_NUM_SEQS = 5
LENGTHS = (1, 4, 8, 9, 16, 17, 24, 31, 39)
#: place at which a prompt differs from the others of its kind; most do not
CHANGES = (99, 99, 99, 99, 0, 5, 9, 17)
TAGS: tuple[dict[str, bytes], ...] = ({}, {}, {}, {}, {"adapter": b"a"}, {"cache_salt": b"a"})
#: images in the prompt, if it is long enough
RANGES: tuple[tuple[PromptRange, ...], ...] = (
    *[()] * 6,
    (PromptRange(2, 6, "cat", b"cat"),),
    (PromptRange(2, 6, "dog", b"dog"),),
    (PromptRange(2, 6, "dog", b"dog", offset=1),),
)


class Lives:
    """Turns arbitrary numbers into something that an engine might do just now."""

    def __init__(self, model: CacheModel) -> None:
        self.model = model

    def slot(self, index: int) -> int | None:
        """A live slot, if there is one."""
        self.model.close()  # a load that fails takes its slot
        slots = sorted(self.model.live)
        return slots[index % len(slots)] if slots else None

    def _idle(self, index: int) -> int | None:
        """A live slot that no step in flight and no load writes to."""
        self.model.close()
        slots = [s for s in sorted(self.model.live) if self._may_run(s) and not self.model.table.in_flight[s]]
        return slots[index % len(slots)] if slots else None

    def _may_run(self, slot: int) -> bool:
        return not self.model.live[slot].loading

    def _make_room(self, index: int, *, at_once: bool) -> None:
        if len(self.model.live) == MAX_NUM_SEQS:
            self.end(index, at_once=at_once)

    def admit(
        self,
        length: int,
        kind: int,
        changed: int,
        tag: dict[str, bytes],
        computed: bool,
        how: dict[str, Any],
    ) -> None:
        """A request comes; one whose prompt is computed at once makes it findable."""
        self._make_room(kind, at_once=computed)
        prompt = [(kind + i) % 5 + kind // 5 for i in range(length)]
        if changed < length:
            prompt[changed] = 7
        how = dict(how)
        how["ranges"] = tuple(one for one in how.get("ranges", ()) if one.start + one.length <= length)
        before = set(self.model.live)
        if not self.model.admit(prompt, dict(tag), MAX_MODEL_LEN, **how):
            self.end(kind, at_once=True)  # as memory is short
        elif computed:
            self.compute(set(self.model.live) - before, 99, 3)

    def follow(self, length: int, kind: int, most: int) -> None:
        """A request comes, and while a step computes part of its prompt another one like it."""
        before = set(self.model.live)
        self.admit(length, kind, 99, {}, False, {})
        self.compute(set(self.model.live) - before, most, 3, wait=True)
        self.admit(length, kind, 99, {}, False, {})

    def compute(self, slots: set[int], most: int, token: int, *, wait: bool = False) -> None:
        """A step; ``wait`` leaves it in flight."""
        self.model.commit()
        rows = []
        for slot in sorted(slots & set(self.model.live)):
            live = self.model.live[slot]
            pending = min(most, len(live.names) - live.computed)
            if pending and self._may_run(slot):
                rows.append((slot, pending))
        if rows:
            self.model.submit(rows, [token] * len(rows), num_drafts=token % 4)
            if not wait:
                self.model.commit()

    def end(self, index: int, *, at_once: bool) -> None:
        """A request ends; steps in flight may keep its blocks for a while."""
        slot = self.slot(index)
        if slot is None:
            return
        lease = self.model.retire(slot)
        if at_once:
            self.model.settle(lease)
        self.limit()

    def preempt(self, index: int) -> None:
        """A request loses its slot."""
        slot = self.slot(index)
        if slot is not None:
            self.model.preempt(slot)

    def resume(self, index: int, chunk: int | None) -> None:
        """A preempted request comes back, and finds what it computed if that is still there."""
        self._make_room(index, at_once=True)
        waiting = self.model.preempted
        if waiting:
            request = waiting.pop(index % len(waiting))
            if request.num_known < MAX_MODEL_LEN and not self.model.enter(request, chunk=chunk, reserve=4):
                request.holds.clear()
                waiting.append(request)
        del waiting[:-4]

    def transfer(self, index: int) -> None:
        """Blocks of a live request are read."""
        slot = self.slot(index)
        if slot is not None:
            self.model.lease(slot)
            self.limit()

    def limit(self) -> None:
        """The oldest of many leases ends."""
        while len(kept := self._kept()) > 2:
            self.model.settle(min(kept))

    def _kept(self) -> list[int]:
        loads = {load.lease for load in self.model.loads}
        return sorted(lease for lease in self.model.leases if lease not in loads)

    def settle(self, index: int) -> None:
        """A lease ends."""
        if leases := self._kept():
            self.model.settle(leases[index % len(leases)])

    def loaded(self, index: int, lost: float, *, named: bool) -> None:
        """A load ends, well or badly."""
        self.model.close()
        if loads := self.model.loads:
            self.model.end_load(loads[index % len(loads)], lost, named=named)

    def fork(self, index: int) -> None:
        """A child of a request whose prompt is computed."""
        slot = self.slot(index)
        if slot is None or not self.model.cache.can_fork or len(self.model.live) == MAX_NUM_SEQS:
            return
        parent = self.model.live[slot]
        if parent.computed >= parent.request.num_prompt and self._may_run(slot):
            tags = dict(parent.request.cache_tags)
            prompt, ranges = parent.request.prompt_ids.tolist(), parent.request.ranges
            self.model.admit(prompt, tags, MAX_MODEL_LEN, parent=slot, ranges=ranges)

    def fail(self, index: int, start: int) -> None:
        """What was loaded into a request's blocks is junk from some block on."""
        slot = self._idle(index)
        if slot is not None and not self.model.windowed:
            step = self.model.memory.alignment
            start = min(start, len(self.model.live[slot].names) // step, *(len(t) for t in self.model.tables[slot]))
            self.model.invalidate(slot, start * step)

    def reset(self) -> None:
        """An idle moment for everything to be forgotten in, or not."""
        self.model.reset()

    def finish(self) -> None:
        """Everything ends, and nothing is left."""
        model = self.model
        model.commit()
        for load in list(model.loads):
            model.end_load(load)
        for slot in sorted(model.live):
            model.retire(slot)
        for lease in sorted(model.leases):
            model.settle(lease)
        for _ in range(2):
            model.flush()  # stores of the one are reported to the other
        require(model.reset(), "with nothing in use, everything can be forgotten", Cache.reset)
        stats = model.cache.stats()
        require(stats.free == stats.total, "once drained, no block is in use", Cache.stats, stats=stats)
        for tier in model.tiers.values():
            require(not tier.content, "a reset forgets what tiers hold", Cache.reset, tier=tier.endpoint)

    def operation(self, rng: random.Random) -> None:
        """One of these at random, the productive ones more often."""
        kind, index = rng.random(), rng.randrange(10)
        if kind < 0.35:
            how = {
                "chunk": rng.choice((None, None, 3, 8)),
                "reserve": rng.choice((0, 0, 0, 0, 0, 9)),
                "ranges": rng.choice(RANGES),
                "prompt_logprobs": rng.random() < 0.05,
                "flush": rng.random() < 0.8,
            }
            # Few beginnings come often, so that they are found again; many others push them out of memory.
            first = rng.randrange(3) if rng.random() < 0.8 else rng.randrange(40)
            self.admit(rng.choice(LENGTHS), first, rng.choice(CHANGES), rng.choice(TAGS), rng.random() < 0.6, how)
        elif kind < 0.4:
            self.follow(rng.choice(LENGTHS), rng.randrange(40), rng.choice((5, 9, 99)))
        elif kind < 0.55:
            self.compute(set(self.model.live), rng.choice((1, 5, 99)), rng.randrange(10), wait=rng.random() < 0.4)
        elif kind < 0.64:
            self.end(index, at_once=rng.random() < 0.6)
        elif kind < 0.68:
            self.preempt(index)
        elif kind < 0.73:
            self.resume(index, rng.choice((None, 1, 6)))
        elif kind < 0.8:
            self.fork(index)
        elif kind < 0.9 and self.model.loads:
            self.loaded(index, rng.choice((0.0, 0.0, 0.2, 1.0)), named=rng.random() < 0.8)
        elif kind < 0.92:
            self.transfer(index)
        elif kind < 0.96:
            self.fail(index, rng.randrange(3))
        elif kind < 0.99:
            self.settle(index)
        else:
            self.reset()

    def walk(self, seed: int, steps: int) -> None:
        """Many of them, and the end."""
        rng = random.Random(seed)
        for _ in range(steps):
            self.operation(rng)
        self.finish()


class CacheMachine(RuleBasedStateMachine):
    """The same by hypothesis, which looks for a short sequence that breaks a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = Lives(self.fresh())

    def fresh(self) -> CacheModel:
        """A new cache and its reference."""
        raise NotImplementedError

    @rule(
        length=st.sampled_from(LENGTHS),
        kind=st.integers(0, 1),
        changed=st.sampled_from(CHANGES),
        tag=st.sampled_from(TAGS),
        computed=st.booleans(),
        how=st.fixed_dictionaries(
            {},
            optional={
                "chunk": st.sampled_from((3, 8)),
                "reserve": st.just(9),
                "ranges": st.sampled_from(RANGES),
                "prompt_logprobs": st.booleans(),
                "flush": st.booleans(),
            },
        ),
    )
    def admit(
        self, length: int, kind: int, changed: int, tag: dict[str, bytes], computed: bool, how: dict[str, Any]
    ) -> None:
        """See :meth:`Lives.admit`."""
        self.lives.admit(length, kind, changed, tag, computed, how)

    @rule(length=st.sampled_from(LENGTHS), kind=st.integers(0, 1), most=st.sampled_from((99, 5)))
    def follow(self, length: int, kind: int, most: int) -> None:
        """See :meth:`Lives.follow`."""
        self.lives.follow(length, kind, most)

    @rule(most=st.sampled_from((99, 1, 5)), token=st.integers(0, 9), wait=st.booleans())
    def compute(self, most: int, token: int, wait: bool) -> None:
        """See :meth:`Lives.compute`."""
        self.lives.compute(set(self.lives.model.live), most, token, wait=wait)

    @rule(index=st.integers(0, 9), at_once=st.booleans())
    def end(self, index: int, at_once: bool) -> None:
        """See :meth:`Lives.end`."""
        self.lives.end(index, at_once=at_once)

    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        """See :meth:`Lives.preempt`."""
        self.lives.preempt(index)

    @rule(index=st.integers(0, 9), chunk=st.sampled_from((None, 1, 6)))
    def resume(self, index: int, chunk: int | None) -> None:
        """See :meth:`Lives.resume`."""
        self.lives.resume(index, chunk)

    @rule(index=st.integers(0, 9))
    def transfer(self, index: int) -> None:
        """See :meth:`Lives.transfer`."""
        self.lives.transfer(index)

    @rule(index=st.integers(0, 9))
    def settle(self, index: int) -> None:
        """See :meth:`Lives.settle`."""
        self.lives.settle(index)

    @rule(index=st.integers(0, 9), lost=st.sampled_from((0.0, 0.2, 1.0)), named=st.booleans())
    def loaded(self, index: int, lost: float, named: bool) -> None:
        """See :meth:`Lives.loaded`."""
        self.lives.loaded(index, lost, named=named)

    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        """See :meth:`Lives.fork`."""
        self.lives.fork(index)

    @rule(index=st.integers(0, 9), start=st.integers(0, 5))
    def fail(self, index: int, start: int) -> None:
        """See :meth:`Lives.fail`."""
        self.lives.fail(index, start)

    @rule()
    def reset(self) -> None:
        """See :meth:`trivet.roles.Cache.reset`."""
        self.lives.reset()

    def teardown(self) -> None:
        """See :meth:`Lives.finish`."""
        self.lives.finish()

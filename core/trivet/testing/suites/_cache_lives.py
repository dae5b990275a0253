"""What an engine may do to a cache, in any order: by hypothesis, for short examples, and in long random walks."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from trivet.roles import Cache
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_model import CacheModel

MAX_MODEL_LEN = 40
MAX_NUM_SEQS = 5
LENGTHS = (1, 4, 8, 9, 16, 17, 24, 31, 39)
#: place at which a prompt differs from the others of its kind; most do not
CHANGES = (99, 99, 0, 5, 9, 17)
TAGS: tuple[dict[str, bytes], ...] = ({}, {}, {"adapter": b"a"})


class Lives:
    """Turns arbitrary numbers into something that an engine might do just now."""

    def __init__(self, model: CacheModel) -> None:
        self.model = model

    def slot(self, index: int) -> int | None:
        """A live slot, if there is one."""
        slots = sorted(self.model.live)
        return slots[index % len(slots)] if slots else None

    def admit(self, length: int, kind: int, changed: int, tag: dict[str, bytes], computed: bool) -> None:
        """A request comes; one whose prompt is computed at once makes it findable."""
        if len(self.model.live) == MAX_NUM_SEQS:
            self.end(kind, at_once=computed)
        prompt = [(kind + i) % 5 for i in range(length)]
        if changed < length:
            prompt[changed] = 7
        before = set(self.model.live)
        if self.model.admit(prompt, dict(tag), MAX_MODEL_LEN) and computed:
            self.compute(set(self.model.live) - before, 99, 3)

    def compute(self, slots: set[int], most: int, token: int) -> None:
        """A step."""
        rows = []
        for slot in sorted(slots):
            live = self.model.live[slot]
            pending = min(most, len(live.names) - live.computed)
            if pending:
                rows.append((slot, pending))
        if rows:
            self.model.step(rows, [token] * len(rows), num_drafts=token % 4)

    def end(self, index: int, *, at_once: bool) -> None:
        """A request ends, or is preempted; steps in flight may keep its blocks for a while."""
        slot = self.slot(index)
        if slot is None:
            return
        lease = self.model.retire(slot)
        if at_once:
            self.model.settle(lease)
        self.limit()

    def transfer(self, index: int) -> None:
        """Blocks of a live request are read."""
        slot = self.slot(index)
        if slot is not None:
            self.model.lease(slot)
            self.limit()

    def limit(self) -> None:
        """The oldest of many leases ends."""
        while len(self.model.leases) > 2:
            self.model.settle(min(self.model.leases))

    def settle(self, index: int) -> None:
        """A lease ends."""
        leases = sorted(self.model.leases)
        if leases:
            self.model.settle(leases[index % len(leases)])

    def fork(self, index: int) -> None:
        """A child of a request whose prompt is computed."""
        slot = self.slot(index)
        if slot is None or not self.model.cache.can_fork or len(self.model.live) == MAX_NUM_SEQS:
            return
        parent = self.model.live[slot]
        if parent.computed >= parent.request.num_prompt:
            tags = dict(parent.request.cache_tags)
            self.model.admit(parent.request.prompt_ids.tolist(), tags, MAX_MODEL_LEN, parent=slot)

    def fail(self, index: int, start: int) -> None:
        """What was loaded into a request's blocks is junk from some block on."""
        slot = self.slot(index)
        if slot is not None and not self.model.windowed:
            self.model.invalidate(slot, min(start, *(len(t) for t in self.model.tables[slot])))

    def finish(self) -> None:
        """Everything ends, and nothing is left."""
        for slot in sorted(self.model.live):
            self.model.retire(slot)
        for lease in sorted(self.model.leases):
            self.model.settle(lease)
        require(self.model.reset(), "with nothing in use, everything can be forgotten", Cache.reset)
        stats = self.model.cache.stats()
        require(stats.free == stats.total, "once drained, no block is in use", Cache.stats, stats=stats)

    def walk(self, seed: int, steps: int) -> None:
        """Many of these at random, the productive ones more often."""
        rng = random.Random(seed)
        for _ in range(steps):
            kind, index = rng.random(), rng.randrange(10)
            if kind < 0.3:
                prompt = rng.choice(LENGTHS), rng.randrange(2), rng.choice(CHANGES)
                self.admit(*prompt, rng.choice(TAGS), rng.random() < 0.7)
            elif kind < 0.6:
                self.compute(set(self.model.live), rng.choice((1, 5, 99)), rng.randrange(10))
            elif kind < 0.75:
                self.end(index, at_once=rng.random() < 0.6)
            elif kind < 0.85:
                self.fork(index)
            elif kind < 0.9:
                self.transfer(index)
            elif kind < 0.95:
                self.fail(index, rng.randrange(6))
            else:
                self.settle(index)
                self.model.reset()
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
    )
    def admit(self, length: int, kind: int, changed: int, tag: dict[str, bytes], computed: bool) -> None:
        """See :meth:`Lives.admit`."""
        self.lives.admit(length, kind, changed, tag, computed)

    @rule(most=st.sampled_from((99, 1, 5)), token=st.integers(0, 9))
    def compute(self, most: int, token: int) -> None:
        """See :meth:`Lives.compute`."""
        self.lives.compute(set(self.lives.model.live), most, token)

    @rule(index=st.integers(0, 9), at_once=st.booleans())
    def end(self, index: int, at_once: bool) -> None:
        """See :meth:`Lives.end`."""
        self.lives.end(index, at_once=at_once)

    @rule(index=st.integers(0, 9))
    def transfer(self, index: int) -> None:
        """See :meth:`Lives.transfer`."""
        self.lives.transfer(index)

    @rule(index=st.integers(0, 9))
    def settle(self, index: int) -> None:
        """See :meth:`Lives.settle`."""
        self.lives.settle(index)

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
        self.lives.model.reset()

    def teardown(self) -> None:
        """See :meth:`Lives.finish`."""
        self.lives.finish()

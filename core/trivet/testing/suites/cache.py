"""Conformance of ``cache`` providers: a naive memory that stores every token list is the reference."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from trivet.errors import CacheMemoryError
from trivet.roles import AttentionSupport, Cache, CacheRequirements, KVLayout, LayerKVSpec
from trivet.roles.kv import KVKind
from trivet.state import Request, RequestTable
from trivet.testing.suites._base import Suite, promised, require
from trivet.testing.suites._cache_lives import MAX_MODEL_LEN, MAX_NUM_SEQS, CacheMachine, Lives
from trivet.testing.suites._cache_model import CacheModel
from trivet.testing.suites._cache_names import pools_of
from trivet.testing.suites._cache_tier import NaiveTier


class CacheSuite(Suite):
    """Runs a cache against a memory in which every cell knows which tokens it belongs to.

    The cache gets layers as :meth:`specs` says, and room for about :attr:`tokens` tokens if its options name no size.
    """

    role: ClassVar[str] = "cache"
    #: blocks are taken one by one as tokens need them: a row is refused only when too few blocks are free
    on_demand: ClassVar[bool] = False
    #: prompts are found again: the cache keeps blocks of requests that have ended
    finds_prefixes: ClassVar[bool] = False
    #: options that name the size of the memory
    size_options: ClassVar[tuple[str, ...]] = ("memory", "num_blocks")
    #: windows of the layers, None for full attention; override for a cache that treats windows apart
    windows: ClassVar[tuple[int | None, ...]] = (None, 8)
    #: kinds of the layers: full, sliding, chunked; by default sliding where there is a window
    kinds: ClassVar[tuple[KVKind, ...]] = ()
    #: KV heads of the layers, by default one: layers with fewer bytes per token may get longer blocks
    heads: ClassVar[tuple[int, ...]] = ()
    #: tiers that the cache may store to and load from, each of as many blocks
    tiers: ClassVar[tuple[int, ...]] = ()
    #: tokens of memory; room for about two long requests, so that memory is short most of the time
    tokens: ClassVar[int] = 2 * MAX_MODEL_LEN

    # ------------------------------------------------------------------ building

    def specs(self) -> tuple[LayerKVSpec, ...]:
        """The layers that the cache has to serve."""
        kinds = self.kinds or tuple("full" if w is None else "sliding" for w in self.windows)
        heads = self.heads or (1,) * len(kinds)
        return tuple(
            LayerKVSpec(i, kind, count, 4, "float32", window)
            for i, (kind, window, count) in enumerate(zip(kinds, self.windows, heads, strict=True))
        )

    def requirements(self, **changes: Any) -> CacheRequirements:
        """What :meth:`Cache.configure` is given."""
        specs = self.specs()
        given: dict[str, Any] = {
            "specs": specs,
            "support": tuple(AttentionSupport() for _ in specs),
            "available_bytes": (self.tokens + 16) * sum(s.bytes_per_token for s in specs),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
        }
        return CacheRequirements(**given | changes)

    def unsized(self) -> Cache:
        """A cache whose options name no size."""
        options = {name: value for name, value in self.options.items() if name not in self.size_options}
        cache: Cache = self.engine_context().build(self.role, self.use, **options)
        return cache

    def bound(self, context: Any = None) -> tuple[Cache, KVLayout, RequestTable]:
        """A cache that is ready for requests."""
        context = context or self.engine_context()
        cache: Cache = self.make(context)
        layout = cache.configure(self.requirements())
        table = context.table = RequestTable(MAX_NUM_SEQS, MAX_MODEL_LEN)
        context.max_model_len, context.layout = MAX_MODEL_LEN, layout
        cache.bind(context)
        return cache, layout, table

    def fresh(self, context: Any = None, seed: int = 0) -> CacheModel:
        """A new cache with its reference; ``seed`` draws the tiers' luck."""
        context = context or self.engine_context()
        tiers = [NaiveTier(f"naive{i}", capacity, seed + i) for i, capacity in enumerate(self.tiers)]
        context.all = lambda role: tiers if role == "cache_tier" else ()
        cache, layout, table = self.bound(context)
        return CacheModel(cache, layout, table, context, on_demand=self.on_demand, tiers=tiers, seed=seed)

    # ------------------------------------------------------------------ negotiation

    def test_every_layer_has_a_group_and_a_buffer(self) -> None:
        """The layout covers the layers that were asked for, each once."""
        cache: Cache = self.make(self.engine_context())
        layout = cache.configure(self.requirements())
        layers = [s.layer for s in self.specs()]
        windows = {s.layer: s.window or MAX_MODEL_LEN for s in self.specs()}
        grouped = sorted(layer for g in layout.groups for layer in g.layers)
        stored = sorted(layer for s in layout.storage for layer in s.layers)
        require(
            grouped == stored == layers and layout.specs == self.specs(),
            "every layer is in one KV group and in one buffer",
            KVLayout,
            in_groups=grouped,
            in_buffers=stored,
        )
        require(
            [g.index for g in layout.groups] == list(range(len(layout.groups))),
            "groups are numbered in order",
            KVLayout,
            groups=layout.groups,
        )
        for group in layout.groups:
            widest = max(windows[layer] for layer in group.layers)
            require(
                (group.window or MAX_MODEL_LEN) >= widest,
                "a group's window is at least as long as each of its layers'",
                KVLayout,
                group=group,
                longest_window_of_a_layer=widest,
            )

    def test_the_memory_given_is_not_exceeded(self) -> None:
        """Buffers fit into the memory that is free when the options name no size."""
        need = self.requirements()
        layout = self.unsized().configure(need)
        require(
            layout.num_bytes <= need.available_bytes,
            "buffers fit into available_bytes when the options name no size",
            CacheRequirements,
            bytes_of_buffers=layout.num_bytes,
            available=need.available_bytes,
        )

    @pytest.mark.parametrize(("multiple", "largest"), [(1, None), (4, None), (8, 64), (1, 8)])
    def test_block_sizes_are_ones_that_attention_can_do(self, multiple: int, largest: int | None) -> None:
        """The block size is a multiple of what attention asks for and at most its largest, or it is refused."""
        support = AttentionSupport(block_size_multiple=multiple, block_size_max=largest)
        need = self.requirements(support=tuple(support for _ in self.specs()))
        cache: Cache = self.make(self.engine_context())
        try:
            layout = cache.configure(need)
        except CacheMemoryError as error:
            require(
                "block_size" in self.options and str(self.options["block_size"]) in str(error),
                "a block size is refused only when the options name one, and the message says which",
                AttentionSupport,
                message=error,
            )
            return
        for group in layout.groups:
            fits = group.block_size % multiple == 0 and (largest is None or group.block_size <= largest)
            require(
                fits,
                "block sizes are a multiple of block_size_multiple and at most block_size_max",
                AttentionSupport,
                block_size=group.block_size,
                multiple=multiple,
                largest=largest,
            )

    def test_too_little_memory_is_refused_with_what_would_fit(self) -> None:
        """One request of the maximum length must fit, and the error says how long a request would."""
        need = self.requirements(max_model_len=100 * self.tokens)
        with pytest.raises(CacheMemoryError) as caught:
            self.unsized().configure(need)
        fits = caught.value.fits_tokens
        require(
            fits is not None and 0 < fits < need.max_model_len,
            "the error says in fits_tokens how long a request may be",
            Cache.configure,
            fits_tokens=fits,
        )
        self.unsized().configure(self.requirements(max_model_len=fits))

    def test_what_fits_alone_can_be_allocated(self) -> None:
        """``fits`` is right about a request that has the cache to itself."""
        cache, layout, table = self.bound()
        slot = table.assign(Request("r", np.ones(1, np.int32), None, MAX_MODEL_LEN, 0), (), 0)
        require(cache.fits(MAX_MODEL_LEN), "a request of the maximum length fits", Cache.fits)
        cache.admit(slot, table.requests[slot])  # type: ignore[arg-type]
        for total in (1, MAX_MODEL_LEN // 2, MAX_MODEL_LEN):
            rows = cache.extend(np.array([slot], np.int32), np.array([total], np.int32)).rows
            require(rows == 1, "what fits can be allocated when nothing else runs", Cache.fits, tokens=total)
        room = sum(s.num_blocks for s in layout.storage) * max(g.size for g in pools_of(layout))
        require(
            not cache.fits(room + 1), "more tokens than there is memory for do not fit", Cache.fits, tokens=room + 1
        )

    # ------------------------------------------------------------------ life

    def test_random_lives_against_a_naive_memory(self) -> None:
        """Admit, compute, draft, fork, preempt, transfer, fail, reset in any order: every request keeps its KV."""
        suite, context = self, self.engine_context()

        class Machine(CacheMachine):
            def fresh(self) -> CacheModel:
                return suite.fresh(context)

        run_state_machine_as_test(Machine, settings=self.budget(stateful_step_count=30))

    def test_long_lives_against_a_naive_memory(self) -> None:
        """The same in long random walks, in which memory is used many times over."""
        context = self.engine_context()
        for seed in range(max(self.examples // 2, 1)):
            Lives(self.fresh(context, seed)).walk(seed, steps=60)

    def test_tables_that_were_read_do_not_change(self) -> None:
        """A plan keeps the arrays that ``tables`` returned, so they are no views of the cache's state."""
        model = self.fresh()
        model.admit([1] * 3, {}, MAX_MODEL_LEN)
        slot = next(iter(model.live))
        tables = model.cache.tables(slot)
        kept = copy.deepcopy(tables)
        model.extend([slot], [MAX_MODEL_LEN])
        model.retire(slot)
        for before, now in zip(kept, tables, strict=True):
            require(
                np.array_equal(before, now),
                "plans are pure data: an array that tables() returned does not change later",
                Cache.tables,
                before=before,
                now=now,
            )

    def test_running_out_of_memory_leaves_later_rows_as_they_were(self) -> None:
        """Rows are served in order until memory is short, and everything can be given back."""
        model = self.fresh()
        while len(model.live) < MAX_NUM_SEQS and model.admit([1, 2], {}, MAX_MODEL_LEN):
            pass
        slots = list(model.live)
        model.extend(slots, [MAX_MODEL_LEN] * len(slots))
        for slot in slots:
            model.settle(model.retire(slot))
        stats = model.cache.stats()
        require(stats.free == stats.total, "blocks that nobody needs are free", Cache.settle, stats=stats)

    @promised("finds_prefixes")
    def test_a_prompt_is_found_again(self) -> None:
        """A prefix cache finds the prompt of a request that has ended, except its last token, under the same tags."""
        prompt = [i % 7 for i in range(33)]
        model = self.fresh()
        for tags, finds in (({}, False), ({}, True), ({"cache_salt": b"x"}, False), ({"cache_salt": b"x"}, True)):
            hits = model.hits
            require(model.admit(prompt, tags, MAX_MODEL_LEN), "a short prompt gets blocks", Cache.extend)
            found = model.hits - hits
            require(
                (found > 0) == finds,
                "a prompt is found again under the same tags and only under them",
                Cache.admit,
                tags=tags,
                found_tokens=found,
            )
            slot = next(iter(model.live))
            model.step([(slot, len(prompt) - model.live[slot].computed)], [5])
            model.settle(model.retire(slot))
        model.reset()
        hits = model.hits
        model.admit(prompt, {}, MAX_MODEL_LEN)
        require(model.hits == hits, "reset forgets all cached content", Cache.reset, found_tokens=model.hits - hits)

"""Conformance of ``attention`` providers: a loop over queries, heads and keys in float64 is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from trivet.roles import Attention, AttentionSupport, LayerKVSpec
from trivet.testing.suites._attention_case import NUM_BLOCKS, Case, Context, Extras, Row
from trivet.testing.suites._base import ArraySuite, promised, require


class AttentionSuite(ArraySuite):
    """Mixed batches over a poisoned cache, in every block size and type that the provider says it can do."""

    role: ClassVar[str] = "attention"
    #: (num_heads, num_kv_heads, head_dim, v_head_dim or None) that it serves
    shapes: ClassVar[Sequence[tuple[int, int, int, int | None]]] = ((4, 4, 8, None), (4, 2, 16, None), (6, 1, 8, None))
    #: soft caps on scores
    softcaps: ClassVar[bool] = True
    #: attention sinks
    sinks: ClassVar[bool] = True
    #: drafts in trees
    trees: ClassVar[bool] = True
    #: layers of kind ``chunked``
    chunks: ClassVar[bool] = True

    # ------------------------------------------------------------------ cases

    def support_of(self, shape: tuple[int, int, int, int | None], dtype: str = "float32") -> AttentionSupport:
        """What the provider says of a full layer of ``shape``."""
        provider: Attention = self.make(self.worker)
        support = provider.support(LayerKVSpec(0, "full", shape[1], shape[2], dtype, v_head_dim=shape[3]))
        require(
            support.problem is None,
            "the shapes and types of the suite are served; set its `shapes` and `float_types`",
            Attention.support,
            shape=shape,
            dtype=dtype,
            problem=support.problem,
        )
        return support

    def block_sizes(self, support: AttentionSupport) -> list[int]:
        """Small, odd where that is allowed, and the usual ones."""
        step, most = support.block_size_multiple, support.block_size_max or 64
        return sorted({size for size in (step, 3 * step, -(-16 // step) * step) if size <= most})

    def case(
        self, *extras: Extras, shape: Any = None, block_size: int | None = None, dtype: str = "float32", seed: int = 0
    ) -> Case:
        """A provider and the reference, with a layer per entry of ``extras``."""
        shape = shape or self.shapes[-1]
        size = block_size or self.block_sizes(self.support_of(shape, dtype))[-1]
        provider: Attention = self.make(self.worker)
        given = {"shape": shape, "block_size": size, "dtype": dtype, "extras": extras, "seed": seed}
        return Case(provider, self.tensor, self.numpy, **given)

    def play(self, case: Case, *, trees: bool = False, steps: int = 6) -> None:
        """Several contexts grow at once, by prompts in chunks, single tokens and trees of drafts."""
        contexts = [Context() for _ in range(3)]
        rng = case.rng
        for _ in range(steps):
            rows = []
            for context in contexts:
                kind = rng.integers(4)
                if kind == 0:
                    continue
                count = 1 if kind == 1 else int(rng.integers(1, 12))
                parents: list[int] = []
                if trees and context.length and kind == 3:
                    parents = [int(rng.integers(-1, node)) for node in range(count)]
                    count += 1  # the last known token precedes the tree
                rows.append(Row(context, count, parents))
            if not rows:
                continue
            case.step(rows)
            for row in rows:
                if row.parents:
                    path = [int(rng.integers(len(row.parents)))]
                    while row.parents[path[0]] >= 0:
                        path.insert(0, row.parents[path[0]])
                    case.accept(row, path)
        case.compare_storage("the cache holds the keys and values that were given, and nothing else", Attention.forward)

    # ------------------------------------------------------------------ tests

    def test_prompts_and_decodes_in_one_batch(self) -> None:
        """Chunks of prompts and single tokens of several requests, in every shape and block size."""
        for shape in self.shapes:
            for size in self.block_sizes(self.support_of(shape)):
                self.play(self.case(Extras(), shape=shape, block_size=size, seed=size))

    def test_windows(self) -> None:
        """A window counts the query itself; blocks outside of it hold NaN or are gone from the table."""
        for window in (1, 2, 5, 16, 17):
            self.play(self.case(Extras(window=window), seed=window))

    def test_layers_that_differ_in_one_group(self) -> None:
        """Layers that share tables may have different windows in one step."""
        self.play(self.case(Extras(), Extras(window=4), Extras(window=9), Extras(), seed=1))

    @promised("chunks")
    def test_chunks(self) -> None:
        """A query in a layer of kind ``chunked`` sees its chunk up to itself, and only itself at
        a chunk's first position."""
        provider: Attention = self.make(self.worker)
        _, num_kv_heads, head_dim, v_head_dim = self.shapes[-1]
        problem = provider.support(LayerKVSpec(0, "chunked", num_kv_heads, head_dim, "float32", 8, v_head_dim)).problem
        require(
            problem is None,
            "chunked layers are served; set `chunks` if they are not",
            Attention.support,
            problem=problem,
        )
        for length in (1, 3, 8, 16, 17):
            self.play(self.case(Extras(window=length, chunked=True), seed=length))
        self.play(self.case(Extras(window=4, chunked=True), Extras(), Extras(window=4), seed=9))
        if self.trees:
            for seed in range(3):
                self.play(self.case(Extras(window=5, chunked=True), seed=seed), trees=True)

    @promised("softcaps")
    def test_soft_caps(self) -> None:
        """Scores are capped by ``c * tanh(s / c)`` before anything is masked."""
        self.play(self.case(Extras(softcap=1.5), Extras(softcap=30.0, window=6), seed=2))

    @promised("sinks")
    def test_sinks(self) -> None:
        """A sink is one more logit per head in the softmax's denominator."""
        self.play(self.case(Extras(sinks=True), Extras(sinks=True, window=3), seed=3))

    @promised("trees")
    def test_trees_of_drafts(self) -> None:
        """A node sees what precedes the tree, its ancestors and itself; the accepted path is moved into place."""
        for seed in range(4):
            self.play(self.case(Extras(), Extras(window=5), seed=seed), trees=True)

    def test_every_type(self) -> None:
        """The types that ``support`` names and the suite can make."""
        support = self.support_of(self.shapes[-1])
        types = [dtype for dtype in self.float_types if dtype in support.dtypes]
        require(types, "the provider serves a type that the suite can make", Attention.support, dtypes=support.dtypes)
        for dtype in types:
            self.play(self.case(Extras(), Extras(window=7), dtype=dtype, seed=5))

    def test_random_cases(self) -> None:
        """Shapes, block sizes and windows at random."""
        rng = np.random.default_rng(0)
        for seed in range(self.examples):
            shape = self.shapes[seed % len(self.shapes)]
            sizes = self.block_sizes(self.support_of(shape))
            window = None if rng.random() < 0.5 else int(rng.integers(1, 24))
            size = sizes[int(rng.integers(len(sizes)))]
            case = self.case(Extras(window=window), shape=shape, block_size=size, seed=100 + seed)
            self.play(case, trees=self.trees, steps=4)

    def test_blocks_are_copied_and_zeroed(self) -> None:
        """Whole blocks, in every layer of the group, keys and values."""
        case = self.case(Extras(), Extras(), seed=6)
        context = Context()
        case.step([Row(context, 3 * case.block_size)])
        first, second, _ = context.blocks
        targets = case.free[:3]
        pairs = np.array([[first, targets[0]], [second, targets[1]], [first, targets[2]]], np.int32)
        case.provider.copy_blocks(0, self.tensor(pairs))
        case.reference.copy_blocks(0, pairs)
        case.compare_storage("copy_blocks copies whole blocks within every layer of the group", Attention.copy_blocks)
        blocks = np.array([second, targets[2]], np.int32)
        case.provider.zero_blocks(0, self.tensor(blocks))
        case.reference.zero_blocks(0, blocks)
        case.compare_storage("zero_blocks fills whole blocks with zeros", Attention.zero_blocks)

    def test_tokens_are_moved_all_at_once(self) -> None:
        """Sources are read before anything is written, so a shift by one place works."""
        case = self.case(Extras(), Extras(), seed=7)
        context = Context()
        case.step([Row(context, 6)])
        places = np.array(
            [context.blocks[p // case.block_size] * case.block_size + p % case.block_size for p in range(6)]
        )
        source, destination = places[:5].astype(np.int64), places[1:].astype(np.int64)
        case.provider.move_tokens(0, self.tensor(source), self.tensor(destination))
        case.reference.move_tokens(0, source, destination)
        case.compare_storage("move_tokens reads every source before it writes", Attention.move_tokens)

    def test_storage_has_the_promised_shape(self) -> None:
        """``kv`` gives views that writes go through."""
        case = self.case(Extras(), seed=8)
        keys, values = case.provider.kv(0)
        shape = (NUM_BLOCKS, case.block_size, case.num_kv_heads)
        require(
            (tuple(keys.shape), tuple(values.shape)) == ((*shape, case.head_dim), (*shape, case.v_head_dim)),
            "kv gives views of shape [num_blocks, block_size, num_kv_heads, head_dim]",
            Attention.kv,
            keys=tuple(keys.shape),
            values=tuple(values.shape),
        )
        keys[1] = 3.0
        again = self.numpy(case.provider.kv(0)[0][1])
        require(bool((again == 3.0).all()), "what is written to kv's views is in the storage", Attention.kv)

    def test_what_cannot_be_served_is_said(self) -> None:
        """``support`` answers for any layer, with a problem in words where it cannot serve it."""
        provider: Attention = self.make(self.worker)
        kinds: tuple[Any, ...] = ("full", "sliding", "chunked", "recurrent")
        for kind in kinds:
            answer = provider.support(LayerKVSpec(0, kind, 2, 8, "float32", None if kind == "full" else 8))
            require(
                answer.problem is None or answer.problem.strip(),
                "a problem is said in words",
                AttentionSupport,
                kind=kind,
                answer=answer,
            )
            require(answer.block_size_multiple >= 1, "block sizes are positive", AttentionSupport, answer=answer)

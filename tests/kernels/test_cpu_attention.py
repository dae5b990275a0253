"""The compiled attention on every instruction set against the reference in float64, and what its results may not
depend on: the rest of the batch, chunks of a prompt, threads, and whatever else the cache holds."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import build
from trivet_kernels.cpu.attention import CachedAttention, Step
from trivet_kernels.cpu.levels import LEVELS, usable_levels
from trivet_kernels.reference.attention import paged_attention, plan_attention

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")

FLOAT, BFLOAT = torch.float32, torch.bfloat16
SCALE = 0.3
Rows = list[tuple[int, int]]
#: queries and contexts of rows: single tokens, blocks just full and just begun, prompts, chunks, a row without queries
MIXED: Rows = [(1, 1), (1, 64), (3, 65), (0, 40), (20, 20), (64, 128), (1, 130), (18, 33), (1, 513), (5, 600)]
LONG: Rows = [(1, 1500), (1, 700), (30, 1100), (1, 40), (3, 513), (1, 2049), (130, 130)]


@pytest.fixture(scope="module", params=["amx", "avx512_bf16", "avx512", "avx2", "generic"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels for an instruction set, compiled once for all processes and modules of the test run."""
    level = next(level for level in LEVELS if level.name == request.param)
    if level not in usable_levels():
        pytest.skip(f"this processor has no {level.name}")
    return build.load(build.build([level], tmp_path_factory.getbasetemp().parent / "kernels"))


@pytest.fixture(params=[FLOAT, BFLOAT], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass
class Case:
    """A step, and a cache with what precedes it; everything that no query sees is NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    window: int | None = None
    chunked: bool = False
    scale: float = SCALE

    def run(self, library: ctypes.CDLL, **extras: object) -> Tensor:
        """Attend over copies of the caches."""
        caches = _copied(self.key_cache), _copied(self.value_cache)
        return self.run_on(library, *caches, **extras)

    def run_on(self, library: ctypes.CDLL, key_cache: Tensor, value_cache: Tensor, **extras: object) -> Tensor:
        return CachedAttention(library, key_cache, value_cache)(
            self.query,
            self.key,
            self.value,
            Step(self.query_start, self.seq_lens, self.block_table, self.slot_mapping),
            scale=self.scale,
            window=self.window,
            chunked=self.chunked,
            **extras,
        )

    def expected(self, **extras: object) -> Tensor:
        """The reference in float64."""
        caches = [self.key_cache.double(), self.value_cache.double()]
        for cache, tokens in zip(caches, (self.key, self.value), strict=True):
            cache.flatten(0, 1)[self.slot_mapping] = tokens.double()
        plan = plan_attention(
            self.query_start,
            self.seq_lens,
            self.block_table,
            self.key_cache.shape[1],
            window=self.window,
            chunked=self.chunked,
        )
        return paged_attention(self.query.double(), *caches, plan, scale=self.scale, **extras)

    def rows(self, first: int, last: int) -> Case:
        """A step of some of the rows alone."""
        begin, end = int(self.query_start[first]), int(self.query_start[last])
        return Case(
            self.query[begin:end],
            self.key[begin:end],
            self.value[begin:end],
            self.key_cache,
            self.value_cache,
            self.query_start[first : last + 1] - begin,
            self.seq_lens[first:last],
            self.block_table[first:last],
            self.slot_mapping[begin:end],
            self.window,
            self.chunked,
            self.scale,
        )


def make_case(
    rows: Rows,
    dtype: torch.dtype = FLOAT,
    *,
    block_size: int = 16,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    window: int | None = None,
    chunked: bool = False,
    spread: float = 1.0,
) -> Case:
    """A step whose queries, keys and values are views of one fused matrix, and whose keys and values lie in one page
    each, as in the buffers of :mod:`trivet_torch.paged_attention`. Entries of tables before the window are stale."""
    g = torch.Generator().manual_seed(len(rows) + heads + head_dim)
    v_head_dim = v_head_dim or head_dim
    needs = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(needs) + 2
    order = (torch.randperm(num_blocks - 2, generator=g) + 1).tolist()
    sizes = kv_heads * block_size * head_dim, kv_heads * block_size * v_head_dim
    pages = torch.full((num_blocks, sum(sizes) + 4), torch.nan, dtype=dtype)
    key_cache = pages[:, : sizes[0]].view(num_blocks, block_size, kv_heads, head_dim)
    value_cache = pages[:, sizes[0] : sum(sizes)].view(num_blocks, block_size, kv_heads, v_head_dim)
    table = torch.full((len(rows), max(needs) + 1), num_blocks - 1, dtype=torch.int32)
    slots = []
    for row, (count, seq_len) in enumerate(rows):
        table[row, : needs[row]] = torch.tensor([order.pop() for _ in range(needs[row])])
        first = seq_len - count
        low = 0 if window is None else first // window * window if chunked else max(0, first - window + 1)
        table[row, : low // block_size] = num_blocks - 1
        before = torch.arange(min(low, first), first)
        blocks = table[row, before // block_size].long()
        for cache in (key_cache, value_cache):
            shape = len(before), *cache.shape[2:]
            cache[blocks, before % block_size] = (spread * torch.randn(shape, generator=g)).to(dtype)
        positions = torch.arange(first, seq_len)
        slots.append(table[row, positions // block_size].long() * block_size + positions % block_size)
    counts = torch.tensor([0] + [count for count, _ in rows])
    total = int(counts.sum())
    widths = heads * head_dim, kv_heads * head_dim, kv_heads * v_head_dim
    fused = (spread * torch.randn(total, sum(widths) + 8, generator=g)).to(dtype)
    query, key, value, _ = fused.split([*widths, 8], 1)
    return Case(
        query.unflatten(1, (heads, head_dim)),
        key.unflatten(1, (kv_heads, head_dim)),
        value.unflatten(1, (kv_heads, v_head_dim)),
        key_cache,
        value_cache,
        counts.cumsum(0).int(),
        torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32),
        table,
        torch.cat(slots),
        window,
        chunked,
    )


def _copied(cache: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype).copy_(cache)


def check(out: Tensor, expected: Tensor, *, largest_score: float = 10.0) -> None:
    tolerance = 2e-6 * largest_score if out.dtype is FLOAT else 1e-2
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("window", "chunked"), [(None, False), (1, False), (5, False), (64, False), (100, False), (5, True), (64, True)]
)
def test_mixed_batches_and_windows(library: ctypes.CDLL, dtype: torch.dtype, window: int | None, chunked: bool) -> None:
    case = make_case(MIXED, dtype, window=window, chunked=chunked)
    out = case.run(library)
    assert out.dtype is dtype
    check(out, case.expected())


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (5, 5), (6, 3), (7, 1), (14, 2), (24, 1), (33, 1), (128, 1), (40, 40)]
)
def test_heads_that_share_a_key_head(library: ctypes.CDLL, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    case = make_case([(1, 70), (2, 66), (7, 40), (40, 40)], dtype, heads=heads, kv_heads=kv_heads)
    check(case.run(library), case.expected())


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [
        (16, 16),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (256, 256),
        (192, 128),
        (64, 80),
        (72, 40),
        (1, 1),
        (33, 17),
        (7, 65),
    ],
)
def test_head_sizes(library: ctypes.CDLL, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
    case = make_case([(1, 90), (19, 25), (1, 5), (17, 17)], dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    out = case.run(library)
    assert out.shape == (38, 6, v_head_dim)
    check(out, case.expected())


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 48, 128, 1000])
def test_block_sizes(library: ctypes.CDLL, dtype: torch.dtype, block_size: int) -> None:
    case = make_case([(1, 150), (30, 41), (1, 2)], dtype, block_size=block_size, window=99)
    check(case.run(library), case.expected())


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_and_sinks(library: ctypes.CDLL, dtype: torch.dtype, sinks: bool, window: int | None) -> None:
    case = make_case(MIXED, dtype, window=window)
    extras = {"softcap": 2.0} | ({"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, -90.0, 90.0])} if sinks else {})
    check(case.run(library, **extras), case.expected(**extras))


def test_a_key_counts_less_the_farther_back_it_is(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    rows = [(1, 80), (9, 70), (30, 30)]
    case = make_case(rows, dtype, heads=4, kv_heads=2)
    slopes = torch.tensor([0.5, 0.25, 0.01, 1.0])
    expected = []
    for number, (count, seq_len) in enumerate(rows):
        part = case.rows(number, number + 1)
        places = torch.arange(seq_len)
        flat = part.block_table[0, places // 16].long() * 16 + places % 16
        keys, values = case.key_cache.double().flatten(0, 1)[flat], case.value_cache.double().flatten(0, 1)[flat]
        keys[-count:], values[-count:] = part.key.double(), part.value.double()
        scores = torch.einsum("qhd,khd->hqk", part.query.double(), keys.repeat_interleave(2, 1)) * SCALE
        behind = torch.arange(seq_len - count, seq_len)[:, None] - places
        scores = (scores - slopes[:, None, None] * behind).masked_fill(behind < 0, -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(2, 1)))
    check(case.run(library, alibi_slopes=slopes), torch.cat(expected))


def test_large_scores_do_not_overflow(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 200), (40, 140)], dtype, spread=30.0)
    torch.testing.assert_close(case.run(library).double(), case.expected(), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 2.0])
@pytest.mark.parametrize("window", [None, 30])
def test_any_factor_of_scores(library: ctypes.CDLL, dtype: torch.dtype, scale: float, window: int | None) -> None:
    case = make_case([(1, 90), (40, 140), (3, 3)], dtype, window=window)
    case.scale = scale
    check(case.run(library), case.expected())


@pytest.mark.parametrize("most", [10.0, 30.0, 300.0])
@pytest.mark.parametrize("falling", [False, True])
def test_scores_that_rise_or_fall_along_a_context(
    library: ctypes.CDLL, dtype: torch.dtype, most: float, falling: bool
) -> None:
    rows = [(1, 700), (60, 200)]
    case = make_case(rows, dtype, head_dim=64)
    case.query = torch.ones_like(case.query) / 64
    caches = case.key_cache, case.value_cache
    for row, (count, seq_len) in enumerate(rows):
        places = torch.arange(seq_len)
        scores = most * (places.flip(0) if falling else places) / seq_len / SCALE
        keys = scores[:, None, None].expand(-1, 2, 64).to(dtype)
        blocks = case.block_table[row, places // 16].long()
        case.key_cache[blocks[:-count], places[:-count] % 16] = keys[:-count]
        begin, end = case.query_start[row : row + 2].tolist()
        case.key = torch.cat([case.key[:begin], keys[-count:], case.key[end:]])
    together = case.run_on(library, *map(_copied, caches))
    check(together, case.expected(), largest_score=most)
    for row in range(len(rows)):
        begin, end = case.query_start[row : row + 2].tolist()
        assert torch.equal(case.rows(row, row + 1).run(library), together[begin:end])


def test_the_arithmetic_of_callers_stays_as_it_is(
    library: ctypes.CDLL, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    case = make_case(LONG, dtype, head_dim=64)
    small = torch.full((1 << 16,), 1e-38)
    for number in (1, 2):
        threads(number)
        case.run(library)
        assert (small * 0.1 > 0).all()  # numbers too small for all bits are not zeros


def test_keys_and_values_are_written_and_nothing_else(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 33), (20, 50), (70, 70)], dtype, head_dim=24, v_head_dim=40, block_size=5)
    caches = _copied(case.key_cache), _copied(case.value_cache)
    case.run_on(library, *caches)
    for cache, before, tokens in zip(caches, (case.key_cache, case.value_cache), (case.key, case.value), strict=True):
        wanted = before.flatten(0, 1).clone()
        wanted[case.slot_mapping] = tokens
        assert torch.equal(cache.flatten(0, 1).nan_to_num(9.0), wanted.nan_to_num(9.0))


def test_tokens_of_no_row_get_zeros(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(3, 9), (2, 2), (4, 30)], dtype)
    whole = case.run(library)
    case.query_start, case.seq_lens = case.query_start[1:3], case.seq_lens[1:2]
    case.block_table = case.block_table[1:2]
    out = case.run(library)
    assert torch.equal(out[3:5], whole[3:5])
    assert not out[:3].any()
    assert not out[5:].any()


def test_layers_of_a_step_do_not_disturb_each_other(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (20, 20), (3, 70)], dtype)
    step = Step(case.query_start, case.seq_lens, case.block_table, case.slot_mapping)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, -90.0, 90.0])
    given = [{}, {"softcap": 2.0}, {"sinks": sinks}, {"sinks": -sinks}, {"alibi_slopes": sinks.abs()}]
    pairs = []
    for number in range(40):
        extras = given[number % len(given)]
        case.scale = SCALE + number // 10
        if number % 3:
            case.query.mul_(0.9)  # the next layer's queries, where those of this one were
        else:
            case.query, case.key, case.value = case.query.clone(), case.key * 1.1, case.value - 1
        kernel = CachedAttention(library, _copied(case.key_cache), _copied(case.value_cache))
        out = kernel(case.query, case.key, case.value, step, scale=case.scale, **extras)
        pairs.append((out, case.run(library, **extras)))
    for out, expected in pairs:
        assert torch.equal(out, expected)
    kernel = CachedAttention(library, _copied(case.key_cache), _copied(case.value_cache))
    for number in range(10):  # a layer is called anew, with other scores
        extras, case.scale = given[number % 5], SCALE * (1 + number % 2)
        out = kernel(case.query, case.key, case.value, step, scale=case.scale, **extras)
        assert torch.equal(out, case.run(library, **extras))


def test_tensors_whose_elements_lie_apart_are_read_anew_in_every_layer(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    case = make_case([(1, 40), (3, 70)], dtype)
    step = Step(case.query_start, case.seq_lens, case.block_table, case.slot_mapping)
    case.query = case.query.transpose(0, 2).contiguous().transpose(0, 2)
    for _ in range(3):
        case.query.mul_(0.5)
        kernel = CachedAttention(library, _copied(case.key_cache), _copied(case.value_cache))
        assert torch.equal(kernel(case.query, case.key, case.value, step, scale=SCALE), case.run(library))


def test_tensors_of_another_type_than_the_cache_are_refused(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 40)], dtype)
    case.value = case.value.double()
    with pytest.raises(ValueError, match=r"cache's type, torch\.\w+, not torch\.\w+, torch\.\w+, torch\.float64"):
        case.run(library)


def test_an_empty_step(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(0, 4), (0, 70)], dtype)
    assert case.run(library).shape == (0, 6, 32)


@pytest.mark.parametrize("window", [None, 600])
def test_threads_do_not_change_a_bit(
    library: ctypes.CDLL, dtype: torch.dtype, window: int | None, threads: Callable[[int], None]
) -> None:
    for case in (make_case(LONG, dtype, head_dim=64, window=window), make_case([(1, 6000)], dtype, head_dim=128)):
        threads(1)
        alone = case.run(library)
        check(alone, case.expected())
        for number in (2, 3, 7):
            threads(number)
            assert torch.equal(case.run(library), alone)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (14, 2), (4, 4), (40, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_neighbours_do_not_change_a_bit(
    library: ctypes.CDLL, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int
) -> None:
    case = make_case(LONG, dtype, window=window, heads=heads, kv_heads=kv_heads)
    together = case.run(library)
    for row in range(len(LONG)):
        begin, end = case.query_start[row : row + 2].tolist()
        assert torch.equal(case.rows(row, row + 1).run(library), together[begin:end])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (14, 2), (4, 4)])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (100, False), (96, True)])
def test_chunks_of_a_prompt_do_not_change_a_bit(
    library: ctypes.CDLL, dtype: torch.dtype, window: int | None, chunked: bool, heads: int, kv_heads: int
) -> None:
    case = make_case([(700, 700)], dtype, window=window, chunked=chunked, heads=heads, kv_heads=kv_heads)
    whole = case.run(library)
    caches = _copied(case.key_cache), _copied(case.value_cache)
    first = 0
    for count in (1, 7, 64, 100, 1, 1, 26, 311, 2, 1, 130, 55, 1):
        part = slice(first, first + count)
        first += count
        chunk = Case(
            case.query[part],
            case.key[part],
            case.value[part],
            *caches,
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([first], dtype=torch.int32),
            case.block_table,
            case.slot_mapping[part],
            window,
            chunked,
        )
        assert torch.equal(chunk.run_on(library, *caches), whole[part])
    assert first == 700


def test_numbers_that_are_none_stay_in_their_row(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (3, 20), (1, 70)], dtype)
    clean = case.run(library)
    case.query[1, 2, 3] = torch.nan
    out = case.run(library)
    assert out[1, 2].isnan().all()
    out[1, 2] = clean[1, 2]
    assert torch.equal(out, clean)
    case.value[4] = torch.nan
    assert case.run(library)[4].isnan().all()


def test_any_strides_and_integer_types(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (20, 20), (3, 70)], dtype)
    expected = case.run(library)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # head by head
    case.key = case.key.transpose(1, 2).contiguous().transpose(1, 2)  # heads with gaps
    case.block_table = case.block_table.long().t().contiguous().t()
    case.seq_lens, case.slot_mapping = case.seq_lens.long(), case.slot_mapping.int()
    assert torch.equal(case.run(library), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_a_thread_that_ends_leaves_no_memory_behind(library: ctypes.CDLL) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])

    case = make_case([(1, 600)], head_dim=256)
    caches = _copied(case.key_cache), _copied(case.value_cache)

    def run_threads(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=case.run_on, args=(library, *caches))
            thread.start()
            thread.join()

    run_threads(5)
    before = resident()
    run_threads(200)
    assert (resident() - before) * 4096 < 16 << 20


def test_caches_that_it_cannot_read_are_refused(library: ctypes.CDLL) -> None:
    keys = torch.zeros(2, 4, 1, 8)
    for other, message in (
        (keys.half(), "float32 and torch.float16"),
        (keys.bfloat16(), "both be bfloat16"),
        (torch.zeros(2, 4, 2, 8), "different shapes"),
        (torch.zeros(2, 4, 1, 16)[..., ::2], "side by side"),
    ):
        with pytest.raises(ValueError, match=message):
            CachedAttention(library, keys, other)

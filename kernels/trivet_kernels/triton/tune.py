"""Which tiles the attention kernels work in: defaults per architecture, and a choice measured on the device.

Tiles belong to a class of shapes (:class:`Shape`). Choosing them is done at the start, never within a step, and what
was measured is kept in a file per device, Triton version and kernel source.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton

from trivet_kernels._cache import cache_home

logger = logging.getLogger("trivet.kernels")

#: rows of a tile of a decode: queries times heads
_FEWEST_ROWS, _MOST_ROWS = 16, 64
#: no row with more queries than this counts as one with few
_FEW_QUERIES = 16
#: programs that fill a large device several times over, so that none of it waits for the longest row
_ENOUGH_PROGRAMS = 1024
_FEWEST_PART_PROGRAMS = 4


def _power_of_2(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(least - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Shape:
    """What the best tiles depend on. ``group`` is query heads per key head."""

    head_dim: int
    v_head_dim: int
    num_kv_heads: int
    group: int
    dtype: str
    kv_dtype: str
    windowed: bool
    arch: str

    @property
    def key(self) -> str:
        """The shape's class, as it is named in the cache. Heads of similar sizes and groups share one."""
        group = min(_power_of_2(self.group), 64)
        window = "-window" if self.windowed else ""
        return f"{self.arch}-d{self.block_d}-{self.dtype}-{self.kv_dtype}-g{group}{window}"

    @property
    def block_d(self) -> int:
        """The power of two that the larger of the heads is computed in."""
        return max(16, _power_of_2(max(self.head_dim, self.v_head_dim)))


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and keys of a tile, and how it is compiled. Decodes take their ``block_m`` from the step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def launch_options(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Tiles:
    """What both kernels work in. Keys of a row with few queries are cut into parts of ``min_keys`` or more."""

    prefill: Tile
    decode: Tile
    min_keys: int = 256

    def few_queries(self, group: int) -> int:
        """Up to how many queries a row's keys are split: as long as they and their heads fit into one tile."""
        return max(1, min(_FEW_QUERIES, _MOST_ROWS // group))

    def decode_rows(self, group: int, queries: int) -> int:
        """Rows of a decode's tile for rows with up to this many queries."""
        return min(_MOST_ROWS, max(_FEWEST_ROWS, _power_of_2(group * queries)))

    def tree_tile(self) -> Tile:
        """The tile of a prefill that ends in trees, whose masks take registers: smaller, with more threads."""
        tile = self.prefill
        return Tile(min(tile.block_m, 64), min(tile.block_n, 32), max(tile.num_warps, 8), min(tile.num_stages, 2))

    def decode_tile(self, block_m: int) -> Tile:
        """How a decode of ``block_m`` rows is compiled: with more threads for more rows, or their registers spill."""
        more = 1 if block_m <= _FEWEST_ROWS else 2
        return replace(self.decode, block_m=block_m, num_warps=self.decode.num_warps * more)

    def max_parts(self, num_kv_heads: int) -> int:
        """Into how many parts a row may be cut: enough to fill a device with one request."""
        return min(128, max(16, _power_of_2(256 // num_kv_heads)))

    def part_programs(self, others: int, parts: int) -> int:
        """How many programs share a row's parts, where the rest of the grid has ``others``."""
        return min(parts, max(_FEWEST_PART_PROGRAMS, -(-_ENOUGH_PROGRAMS // others)))


def default_tiles(shape: Shape) -> Tiles:
    """What is taken where nothing was measured."""
    size = shape.block_d
    if shape.arch == "interpreter":
        return Tiles(Tile(32, 32, 4, 1), Tile(0, 32, 4, 1))
    if shape.dtype == "float32":
        return Tiles(Tile(32, 16, 8, 2), Tile(0, 32 if size <= 128 else 16, 4, 2))
    if shape.arch.startswith("gfx"):
        prefill = Tile(128, 64 if size <= 64 else 32, 8, 1) if size <= 128 else Tile(64, 32, 4, 1)
        return Tiles(prefill, Tile(0, 64 if size <= 128 else 32, 4, 1))
    ampere = shape.arch.startswith("sm_8")
    if size <= 64:
        prefill = Tile(128, 64, 8, 3)
    elif size <= 128:
        prefill = Tile(128, 32, 8, 3) if ampere else Tile(128, 64, 8, 3)
    else:
        prefill = Tile(64, 32, 8, 2) if ampere else Tile(128, 32, 8, 3)
    return Tiles(prefill, Tile(0, 64 if size <= 128 else 32, 4, 3))


def candidates(shape: Shape) -> list[Tiles]:
    """What is worth measuring for a shape, about a dozen; the default comes first."""
    base = default_tiles(shape)
    amd = shape.arch.startswith("gfx")
    stages = (1, 2) if amd else (2, 3)
    prefills = [
        Tile(block_m, block_n, num_warps, num_stages)
        for block_m, block_n, num_warps, num_stages in (
            (128, 64, 8, stages[0]),
            (128, 128, 8, stages[0]),
            (128, 64, 4, stages[1]),
            (64, 64, 4, stages[1]),
            (64, 128, 4, stages[0]),
            (128, 32, 8, stages[1]),
        )
        # Four warps have no registers for more sums.
        if block_m * shape.block_d <= 128 * 128 or num_warps == 8
    ]
    decodes = [
        Tile(0, block_n, num_warps, num_stages)
        for block_n, num_warps, num_stages in (
            (64, 4, stages[0]),
            (64, 2, stages[1]),
            (32, 4, 2 if amd else 4),
            (128, 4, stages[0]),
        )
    ]
    tried = [base]
    tried += [replace(base, prefill=tile) for tile in prefills if tile != base.prefill]
    tried += [replace(base, decode=tile) for tile in decodes if tile != base.decode]
    tried += [replace(base, min_keys=keys) for keys in (128, 512)]
    return tried


def choose(
    options: Iterable[Tiles],
    measure_prefill: Callable[[Tiles], float],
    measure_decode: Callable[[Tiles], float],
    *,
    limit: float = math.inf,
) -> Tiles:
    """The fastest tiles for both kernels, of ``options`` whose first is the default.

    The measuring functions return seconds, and raise ``triton.runtime.errors.OutOfResources`` for what a device cannot
    hold, which is passed over. After ``limit`` seconds nothing more is measured: the best so far is returned.
    """
    end = time.monotonic() + limit
    chosen, *rest = options
    best_prefill, best_decode = measure_prefill(chosen), measure_decode(chosen)
    default = chosen
    for count, tiles in enumerate(rest):
        if time.monotonic() >= end:
            logger.debug("%d of %d tiles were measured in %g s", count + 1, len(rest) + 1, limit)
            break
        try:
            if tiles.prefill != default.prefill:
                seconds = measure_prefill(tiles)
                if seconds < best_prefill:
                    best_prefill, chosen = seconds, replace(chosen, prefill=tiles.prefill)
            else:
                seconds = measure_decode(tiles)
                if seconds < best_decode:
                    best_decode, chosen = seconds, replace(chosen, decode=tiles.decode, min_keys=tiles.min_keys)
        except triton.runtime.errors.OutOfResources as exc:
            logger.debug("tiles %s do not fit: %s", tiles, exc)
    return chosen


class TileCache:
    """Measured choices in a JSON file, by :attr:`Shape.key`.

    The file is named by the device, the version of Triton and the source of the kernels, so that no choice outlives
    what it was measured with. A file that cannot be read is passed over with a warning and written anew.
    """

    def __init__(self, device_name: str, folder: Path | None = None) -> None:
        if folder is None:
            folder = cache_home() / "trivet" / "tiles"
        name = "".join(c if c.isalnum() else "-" for c in device_name)
        self.path = folder / f"{name}-{triton.__version__}-{_source_digest()}.json"
        self._choices = self._read()

    def get(self, shape: Shape) -> Tiles | None:
        """The choice for a shape's class, if one was measured."""
        return self._choices.get(shape.key)

    def put(self, shape: Shape, tiles: Tiles) -> None:
        """Keep a choice. One that cannot be written is good for this process only, and a warning says so."""
        self._choices[shape.key] = tiles
        text = json.dumps({key: asdict(choice) for key, choice in self._choices.items()}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                file.write(text)
            Path(file.name).replace(self.path)
        except OSError as exc:
            logger.warning("the measured tiles of %s cannot be kept in %s: %s", shape.key, self.path, exc)

    def _read(self) -> dict[str, Tiles]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as exc:
            logger.warning("cannot read the measured tiles in %s: %s", self.path, exc)
            return {}
        try:
            return {key: _parse(choice) for key, choice in json.loads(text).items()}
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            logger.warning("the measured tiles in %s are damaged and not used: %r", self.path, exc)
            return {}


def _parse(choice: dict[str, Any]) -> Tiles:
    tiles = Tiles(Tile(**choice["prefill"]), Tile(**choice["decode"]), choice["min_keys"])
    numbers = [*asdict(tiles.prefill).values(), *asdict(tiles.decode).values(), tiles.min_keys]
    sizes = [size for tile in (tiles.prefill, tiles.decode) for size in (tile.block_m, tile.block_n, tile.num_warps)]
    if not all(type(number) is int and 0 <= number <= 4096 for number in numbers) or any(n & (n - 1) for n in sizes):
        raise ValueError(f"no tiles: {choice}")
    return tiles


def _source_digest() -> str:
    """Of all that the kernels are compiled from."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in ("_span.py", "_prefill.py", "_decode.py", "compat.py", "tune.py", "attention.py"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]

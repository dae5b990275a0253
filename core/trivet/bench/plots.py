"""Plots of what the benchmarks measured; they need the extra ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import TrivetError

if TYPE_CHECKING:
    from trivet.bench.memory import MemoryUse

_STATES = (
    ("token_states", "token states", "#2a7f62"),
    ("reservation", "reservation", "#f2c14e"),
    ("internal_fragmentation", "internal fragmentation", "#f78154"),
    ("external_fragmentation", "external fragmentation & others", "#b4adb8"),
)
_SMALLEST = 0.025  # a part of a bar with less than that has no room for its figure


def new_figure(**options: Any) -> Any:
    """A ``matplotlib.figure.Figure``, which belongs to no window and no global state.

    Raises TrivetError naming the extra when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrivetError('a plot needs matplotlib, which is not installed: pip install "trivet[bench]"') from error
    return Figure(**options)


def check_plot(path: Path) -> None:
    """Raise TrivetError when a plot could not be written to ``path``: before the time for a benchmark is spent."""
    kinds = new_figure().canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        raise TrivetError(f"{path}: plots are written as {', '.join(sorted(kinds))}, by the ending of the file's name")


def plot_memory(uses: Sequence[MemoryUse], title: str, path: Path) -> None:
    """Stacked bars, one per cache: what its memory holds, in percent. Writes ``path``."""
    figure = new_figure(figsize=(1.6 + 1.5 * len(uses), 4.8), layout="constrained", dpi=150)
    axes = figure.subplots()
    names = [use.cache.replace("-", "\n") for use in uses]
    bottom = [0.0] * len(uses)
    for field, label, colour in _STATES:
        shares = [100 * float(getattr(use, field)) for use in uses]
        bars = axes.bar(names, shares, 0.62, bottom=bottom, label=label, color=colour)
        texts = [f"{share:.1f}" if share >= 100 * _SMALLEST else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", fontsize=9)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_ylabel("KV cache memory (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path)

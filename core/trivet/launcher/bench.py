"""``trivet bench``: measurements, each as a table, as JSON and where it helps as a plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trivet.launcher.bench_shared import check_path, progress_bar, set_completed, write_json
from trivet.launcher.bench_speed import latency, throughput
from trivet.launcher.bench_startup import startup
from trivet.launcher.errors import complain

if TYPE_CHECKING:
    from trivet.bench.lengths import LengthDistribution
    from trivet.bench.memory import MemoryUse

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory; results as a table, JSON or a plot.")
_ENGINE_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
for _command in (throughput, latency, startup):
    bench_app.command(context_settings=_ENGINE_ARGUMENTS, options_metavar="[CONFIG] [OPTIONS]")(_command)

_CACHES = "contiguous-max,contiguous-pow2,contiguous-oracle,paged"
#: the setting of the paper's figure
_KV_TOKENS, _MAX_MODEL_LEN, _BLOCK_SIZE = 15_700, 2048, 16
#: more than anybody has the time for
_MOST_REQUESTS, _MOST_TOKENS = 10**7, 10**9


@bench_app.command("memory")
def memory(
    workload: Annotated[
        Literal["sharegpt", "alpaca"], typer.Option("--workload", help="Whose lengths requests have.")
    ] = "sharegpt",
    caches: Annotated[
        str, typer.Option("--caches", metavar="NAMES", help="What to compare, by commas.", show_default="all")
    ] = _CACHES,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests",
            min=1,
            max=_MOST_REQUESTS,
            help="Requests to run; by default 12 times what fits.",
            show_default=False,
        ),
    ] = None,
    kv_tokens: Annotated[
        int, typer.Option("--kv-tokens", min=1, max=_MOST_TOKENS, help="Tokens that the memory holds.")
    ] = _KV_TOKENS,
    max_model_len: Annotated[
        int,
        typer.Option("--max-model-len", min=2, max=_MOST_TOKENS, help="Longest request, prompt and output together."),
    ] = _MAX_MODEL_LEN,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, help="Tokens per block of the paged cache.")
    ] = _BLOCK_SIZE,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For the draw of the lengths.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it too; needs the extra bench.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON too.")] = None,
) -> None:
    """Show which share of the KV memory holds tokens, for caches that reserve ahead and for one that pages.

    Runs the scheduler and the caches without a model while requests always wait for memory: the comparison of figure 2
    of the PagedAttention paper (Kwon et al., SOSP 2023). Its setting is the default: OPT-13B on an A100 of 40 GB, which
    leaves room for 15.7K tokens. Lengths are lognormal, with the means of the data set.
    """
    from trivet.bench.lengths import LENGTHS
    from trivet.bench.memory import check_setting, enough_requests, measure

    names = _names(caches)
    for option, path in (("--plot", plot), ("--json", as_json)):
        check_path(option, path)
    if plot is not None:
        from trivet.bench.plots import check_plot

        check_plot(plot)
    lengths = LENGTHS[workload]
    count = enough_requests(lengths, kv_tokens) if num_requests is None else num_requests
    setting = {
        "num_requests": count,
        "kv_tokens": kv_tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "seed": seed,
    }
    for name in names:
        check_setting(name, kv_tokens=kv_tokens, max_model_len=max_model_len, block_size=block_size)
    uses: list[MemoryUse] = []
    with progress_bar() as bar:
        for name in names:
            show = partial(set_completed, bar, bar.add_task(name, total=count))
            uses.append(measure(name, lengths, on_ended=show, **setting))
    report = _report(lengths, setting, uses)
    _show(report, uses)
    if as_json is not None:
        write_json(as_json, report)
    if plot is not None:
        from trivet.bench.plots import plot_memory

        plot_memory(uses, f"{workload} lengths, {kv_tokens} tokens of KV memory, requests always waiting", plot)
        complain(f"the plot is in {plot}", kind="note")


def _names(caches: str) -> list[str]:
    from trivet.bench.memory import CACHES

    names = [name.strip() for name in caches.split(",") if name.strip()]
    unknown = [name for name in names if name not in CACHES]
    if unknown or not names:
        given = ", ".join(map(repr, unknown)) or "nothing"
        raise typer.BadParameter(f"{given} is none of {', '.join(CACHES)}", param_hint="--caches")
    return list(dict.fromkeys(names))


def _report(lengths: LengthDistribution, setting: dict[str, int], uses: Sequence[MemoryUse]) -> dict[str, Any]:
    from trivet.bench.memory import PAPER

    drawn = lengths.draw(setting["num_requests"], setting["max_model_len"], setting["seed"])
    prompt, output = (round(float(values.mean()), 2) for values in drawn)
    known = (setting["kv_tokens"], setting["max_model_len"], setting["block_size"])
    comparable = lengths.name == "sharegpt" and known == (_KV_TOKENS, _MAX_MODEL_LEN, _BLOCK_SIZE)
    return {
        "benchmark": "memory",
        "workload": lengths.name,
        **setting,
        "mean_prompt_tokens": prompt,
        "mean_output_tokens": output,
        "caches": [asdict(use) | {"paper_token_states": PAPER[use.cache] if comparable else None} for use in uses],
    }


def _show(report: dict[str, Any], uses: Sequence[MemoryUse]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="Share of the KV memory (%)", title_justify="left", pad_edge=False)
    table.add_column("cache", no_wrap=True)
    headings = ("token\nstates", "the\npaper's", "reser-\nvation", "internal\nfragm.", "external\n& others", "running")
    for title in headings:
        table.add_column(title, justify="right", no_wrap=True)
    for use, entry in zip(uses, report["caches"], strict=True):
        paper = entry["paper_token_states"]
        table.add_row(
            use.cache,
            f"{100 * use.token_states:.1f}",
            "" if paper is None else f"{100 * paper:.1f}",
            f"{100 * use.reservation:.1f}",
            f"{100 * use.internal_fragmentation:.1f}",
            f"{100 * use.external_fragmentation:.1f}",
            f"{use.mean_running:.1f}",
        )
    Console(file=sys.stdout).print(table)
    prompt, output = report["mean_prompt_tokens"], report["mean_output_tokens"]
    typer.echo(
        f"{report['num_requests']} requests with the lengths of {report['workload']}: prompts of {prompt:.0f} tokens, "
        f"outputs of {output:.0f} on average, at most {report['max_model_len']} together; memory for "
        f"{report['kv_tokens']} tokens. Averages over the steps in which requests waited for memory.\n"
        "contiguous: reservations of single tokens, buddy allocator; what it rounds up is external fragmentation. "
        f"paged: blocks of {report['block_size']} tokens, no prefix caching."
    )
    if any(entry["paper_token_states"] is not None for entry in report["caches"]):
        typer.echo(
            "The paper's figures are of real conversations, arriving at a finite rate. Here requests always wait, and "
            "their lengths share only the means and the spread with those."
        )

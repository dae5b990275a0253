"""``trivet bench startup``, with the options and JSON keys of vLLM's benchmark."""

from __future__ import annotations

from typing import Annotated

import typer

from trivet.launcher.bench_engine import engine_config
from trivet.launcher.bench_shared import (
    ModelOption,
    OutputJsonOption,
    check_path,
    counting,
    progress_bar,
    show_table,
    write_json,
)
from trivet.launcher.options import SetOption


def startup(
    ctx: typer.Context,
    model: ModelOption = None,
    num_iters_cold: Annotated[int, typer.Option("--num-iters-cold", min=0, help="Starts with empty caches.")] = 3,
    num_iters_warmup: Annotated[
        int, typer.Option("--num-iters-warmup", min=0, help="Starts that fill the caches and do not count.")
    ] = 1,
    num_iters_warm: Annotated[int, typer.Option("--num-iters-warm", min=0, help="Starts with full caches.")] = 3,
    output_json: OutputJsonOption = None,
    set_: SetOption = None,
) -> None:
    """Measure how long an engine takes to start, every time in a process of its own, and what the time goes into.

    trivet bench startup [CONFIG] [--model NAME] [OPTIONS] [ENGINE ARGUMENTS]. The engine is described by CONFIG, a YAML
    file, or by --model; flat arguments of engines are flags too: --max-num-seqs 64, --dtype bfloat16. Options and JSON
    keys are those of vLLM's `bench startup`. A start counts from the launch of the process, imports included, until
    the engine takes requests. Before a cold one the model's files are dropped from memory, as far as the system does
    that, and compiled kernels are hidden, so that it compiles them anew, which counts where they are first needed: as
    a rule under `load` or `allocate`; `compilation` is what the native kernels took of that. The first token's time,
    not part of the start, tells of what is left to then.
    """
    from trivet.bench.startup import measure_startup, startup_report

    total = num_iters_cold + num_iters_warmup + num_iters_warm
    if not num_iters_cold + num_iters_warm:
        raise typer.BadParameter(
            "nothing would be measured: one of it and --num-iters-warm must be at least 1",
            param_hint="--num-iters-cold",
        )
    check_path("--output-json", output_json)
    config = engine_config(ctx, model, set_, None)
    with progress_bar() as bar:
        starts = measure_startup(
            config,
            num_iters_cold=num_iters_cold,
            num_iters_warmup=num_iters_warmup,
            num_iters_warm=num_iters_warm,
            on_start=counting(bar, "Starts", total),
        )
    measured = {name: each for name, each in starts.items() if each}
    headings, names = [""], list(next(iter(measured.values()))[0].figures)
    rows = [[name.replace("_", " ")] for name in names]
    report = startup_report(starts)
    for temperature in measured:
        headings += [f"{temperature}\naverage", "median", "90%"]
        for name, row in zip(names, rows, strict=True):
            parts = report[f"{temperature}_{name}_percentiles"]
            row += [f"{value:.3f}" for value in (report[f"avg_{temperature}_{name}_time"], parts["50"], parts["90"])]
    show_table(f"Start-up of {config.model} (s)", headings, rows)
    for temperature, each in measured.items():
        shares = [start.page_cache for start in each if start.page_cache is not None]
        if shares:
            typer.echo(
                f"{temperature}: {100 * sum(shares) / len(shares):.0f}% of the model's files were in memory before."
            )
    if output_json is not None:
        write_json(output_json, {"model_id": config.model, **report})

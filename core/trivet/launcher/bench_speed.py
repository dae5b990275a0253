"""``trivet bench throughput`` and ``trivet bench latency``, with the options and JSON keys of vLLM's benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.launcher.bench_engine import engine_config
from trivet.launcher.bench_requests import (
    INPUT_LEN,
    NUM_PREFIXES,
    OUTPUT_LEN,
    PREFIX_LEN,
    Source,
    Wanted,
    one_of,
    parse_range_ratio,
)
from trivet.launcher.bench_shared import (
    DisableDetokenizeOption,
    ModelOption,
    OutputJsonOption,
    SeedOption,
    check_path,
    counting,
    progress_bar,
    show_table,
    write_json,
)
from trivet.launcher.errors import complain
from trivet.launcher.options import SetOption

if TYPE_CHECKING:
    from trivet.bench.streams import Streams
    from trivet.llm import LLM
    from trivet_schemas.config import EngineConfig


def throughput(
    ctx: typer.Context,
    model: ModelOption = None,
    dataset_name: Annotated[
        Source | None,
        typer.Option(
            "--dataset-name", help="By default sharegpt with --dataset-path, else random.", show_default=False
        ),
    ] = None,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path", metavar="FILE", help="Conversations, in the JSON of ShareGPT.", show_default=False
        ),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option("--input-len", min=1, help="Short for --random-input-len.", show_default=False)
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option("--output-len", min=1, help="Tokens per output, also for a data set.", show_default=False),
    ] = None,
    custom_output_len: Annotated[
        int | None,
        typer.Option("--custom-output-len", min=1, help="--output-len, of a file only.", show_default=False),
    ] = None,
    random_input_len: Annotated[
        int | None,
        typer.Option("--random-input-len", min=1, help="Tokens per random prompt.", show_default=str(INPUT_LEN)),
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option("--random-output-len", min=1, help="Tokens per random output.", show_default=str(OUTPUT_LEN)),
    ] = None,
    random_range_ratio: Annotated[
        str,
        typer.Option(
            "--random-range-ratio",
            metavar="R",
            help='Lengths vary by this share: 0.2, or {"input": 0.2, "output": 0.5}.',
        ),
    ] = "0.0",
    random_prefix_len: Annotated[
        int | None,
        typer.Option(
            "--random-prefix-len",
            "--prefix-len",
            min=0,
            help="Tokens that all random prompts begin with, besides their own.",
            show_default="0",
        ),
    ] = None,
    prefix_repetition_prefix_len: Annotated[
        int | None,
        typer.Option("--prefix-repetition-prefix-len", min=0, help="Tokens of a prefix.", show_default=str(PREFIX_LEN)),
    ] = None,
    prefix_repetition_suffix_len: Annotated[
        int | None,
        typer.Option(
            "--prefix-repetition-suffix-len", min=1, help="Tokens after a prefix.", show_default=str(PREFIX_LEN)
        ),
    ] = None,
    prefix_repetition_num_prefixes: Annotated[
        int | None,
        typer.Option(
            "--prefix-repetition-num-prefixes",
            min=1,
            help="Prefixes, each of them for as many requests.",
            show_default=str(NUM_PREFIXES),
        ),
    ] = None,
    prefix_repetition_output_len: Annotated[
        int | None,
        typer.Option("--prefix-repetition-output-len", min=1, help="Tokens per output.", show_default=str(OUTPUT_LEN)),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests.")] = 1000,
    num_warmups: Annotated[int, typer.Option("--num-warmups", min=0, help="Requests to run before these.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Outputs per prompt.")] = 1,
    no_oversample: Annotated[
        bool, typer.Option("--no-oversample", help="Run no conversation twice: fewer requests, if need be.")
    ] = False,
    backend: Annotated[str, typer.Option("--backend", hidden=True)] = "vllm",
    async_engine: Annotated[
        bool, typer.Option("--async-engine", help="Through AsyncEngine, every request a stream of its own.")
    ] = False,
    seed: SeedOption = None,
    disable_detokenize: DisableDetokenizeOption = False,
    output_json: OutputJsonOption = None,
    set_: SetOption = None,
) -> None:
    """Measure requests and tokens per second when all requests are there from the beginning.

    trivet bench throughput [CONFIG] [--model NAME] [OPTIONS] [ENGINE ARGUMENTS]. The engine is described by CONFIG, a
    YAML file, or by --model; flat arguments of engines are flags too: --max-num-seqs 64, --dtype bfloat16,
    --no-enable-prefix-caching. Options and JSON keys are those of vLLM's `bench throughput`. Outputs are sampled at
    temperature 1 and never end early.
    """
    from trivet.bench.throughput import measure_throughput

    if backend != "vllm":
        raise typer.BadParameter(
            f"{backend!r} is one of vLLM's backends that is not here: this engine is measured, which `vllm` names",
            param_hint="--backend",
        )
    wanted = Wanted(
        source=dataset_name or ("random" if dataset_path is None else "sharegpt"),
        path=dataset_path,
        input_len=one_of("--input-len", input_len, "--random-input-len", random_input_len),
        output_len=one_of("--output-len", output_len, "--random-output-len", random_output_len),
        custom_output_len=custom_output_len,
        range_ratio=parse_range_ratio(random_range_ratio),
        prefix_len=random_prefix_len,
        oversample=not no_oversample,
        repeated_prefix_len=prefix_repetition_prefix_len,
        repeated_suffix_len=prefix_repetition_suffix_len,
        num_prefixes=prefix_repetition_num_prefixes,
        repeated_output_len=prefix_repetition_output_len,
        count=num_prompts,
    )
    wanted.check()
    check_path("--output-json", output_json)
    config = engine_config(ctx, model, set_, seed)
    with _load_streams(config) if async_engine else _load(config) as llm:
        requests = wanted.draw(llm, num_prompts, config.seed)
        warmups = wanted.draw(llm, num_warmups, config.seed + 1) if num_warmups else []
        with progress_bar() as bar:
            settings: dict[str, Any] = {"n": n, "detokenize": not disable_detokenize}
            if warmups:
                measure_throughput(llm, warmups, on_ended=counting(bar, "Warm-up", len(warmups)), **settings)
            result = measure_throughput(llm, requests, on_ended=counting(bar, "Requests", len(requests)), **settings)
    report = {"model_id": config.model, **result.as_json()}
    _show_throughput(report)
    if output_json is not None:
        write_json(output_json, report)


def latency(
    ctx: typer.Context,
    model: ModelOption = None,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens per prompt.")] = 32,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens per output.")] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts that run together.")] = 8,
    n: Annotated[int, typer.Option("--n", min=1, help="Outputs per prompt, or beams.")] = 1,
    use_beam_search: Annotated[
        bool, typer.Option("--use-beam-search", help="Search for the likeliest outputs with --n beams.")
    ] = False,
    num_iters_warmup: Annotated[
        int, typer.Option("--num-iters-warmup", min=0, help="Iterations before those that count.")
    ] = 10,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="Iterations that count.")] = 30,
    seed: SeedOption = None,
    disable_detokenize: DisableDetokenizeOption = False,
    output_json: OutputJsonOption = None,
    set_: SetOption = None,
) -> None:
    """Measure how long a batch takes, from its arrival to its last token.

    trivet bench latency [CONFIG] [--model NAME] [OPTIONS] [ENGINE ARGUMENTS]. The engine is described by CONFIG, a YAML
    file, or by --model; flat arguments of engines are flags too: --max-num-seqs 64, --dtype bfloat16. Options and JSON
    keys are those of vLLM's `bench latency`. Every iteration has random prompts of its own, so that a prefix cache
    finds nothing; outputs are sampled at temperature 1, or searched for with --use-beam-search, and never end early.
    """
    from trivet.bench.latency import measure_latency

    check_path("--output-json", output_json)
    config = engine_config(ctx, model, set_, seed)
    with _load(config) as llm:
        slots = llm.engine.parts.limits.max_num_seqs
        if batch_size * n > slots:
            complain(
                f"--batch-size {batch_size} with --n {n} is more than max_num_seqs {slots}: the batch runs in parts",
                kind="note",
            )
        with progress_bar() as bar:
            latencies = measure_latency(
                llm,
                input_len=input_len,
                output_len=output_len,
                batch_size=batch_size,
                num_iters=num_iters,
                num_iters_warmup=num_iters_warmup,
                n=n,
                beam_search=use_beam_search,
                detokenize=not disable_detokenize,
                seed=config.seed,
                on_iteration=counting(bar, "Iterations", num_iters_warmup + num_iters),
            )
    _report_latency(config.model, latencies, output_json)


def _load(config: EngineConfig) -> LLM:
    from trivet.llm import LLM

    with progress_bar() as bar:
        bar.add_task(f"Loading {config.model}", total=None)
        return LLM.from_config(config)


def _load_streams(config: EngineConfig) -> Streams:
    from trivet.bench.streams import Streams

    with progress_bar() as bar:
        bar.add_task(f"Loading {config.model}", total=None)
        return Streams(config)


def _show_throughput(report: dict[str, Any]) -> None:
    seconds = report["elapsed_time"]
    counts = {
        "requests": report["num_requests"],
        "prompt tokens": report["total_prompt_tokens"],
        "output tokens": report["total_output_tokens"],
        "all tokens": report["total_num_tokens"],
    }
    rows = [[name, f"{count}", f"{count / seconds:.2f}"] for name, count in counts.items()]
    show_table(f"Throughput of {report['model_id']} in {seconds:.2f} s", ["", "total", "per second"], rows)


def _report_latency(model: str, latencies: list[float], path: Path | None) -> None:
    from trivet.bench.runs import percentiles

    average, parts = sum(latencies) / len(latencies), percentiles(latencies)
    rows = [["average", f"{average:.4f}"], *([f"{key}%", f"{value:.4f}"] for key, value in parts.items())]
    show_table(f"Latency of {model} over {len(latencies)} iterations", ["", "seconds"], rows)
    if path is not None:
        report = {"model_id": model, "avg_latency": average, "latencies": latencies, "percentiles": parts}
        write_json(path, report)

"""``trivet bench throughput`` and ``trivet bench latency``, with the options and JSON keys of vLLM's benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trivet.launcher.bench_engine import engine_config
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
    from trivet.bench.datasets import BenchRequest
    from trivet.llm import LLM

_INPUT_LEN, _OUTPUT_LEN = 1024, 128  # of random requests, where nothing is given


def throughput(
    ctx: typer.Context,
    model: ModelOption = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt"] | None,
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
    random_input_len: Annotated[
        int | None,
        typer.Option("--random-input-len", min=1, help="Tokens per random prompt.", show_default=str(_INPUT_LEN)),
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option("--random-output-len", min=1, help="Tokens per random output.", show_default=str(_OUTPUT_LEN)),
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
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests.")] = 1000,
    num_warmups: Annotated[int, typer.Option("--num-warmups", min=0, help="Requests to run before these.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Outputs per prompt.")] = 1,
    no_oversample: Annotated[
        bool, typer.Option("--no-oversample", help="Run no conversation twice: fewer requests, if need be.")
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

    source = dataset_name or ("random" if dataset_path is None else "sharegpt")
    if source == "sharegpt" and dataset_path is None:
        raise typer.BadParameter("sharegpt needs a file: give --dataset-path", param_hint="--dataset-name")
    if source == "random" and dataset_path is not None:
        raise typer.BadParameter(
            "random requests come from no file: leave one of the two out", param_hint="--dataset-path"
        )
    wanted = _Wanted(
        source=source,
        path=dataset_path,
        input_len=_one_of("--input-len", input_len, "--random-input-len", random_input_len),
        output_len=_one_of("--output-len", output_len, "--random-output-len", random_output_len),
        range_ratio=_range_ratio(random_range_ratio),
        prefix_len=random_prefix_len,
        oversample=not no_oversample,
    )
    wanted.check()
    check_path("--output-json", output_json)
    config = engine_config(ctx, model, set_, seed)
    with _load(config) as llm:
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
    n: Annotated[int, typer.Option("--n", min=1, help="Outputs per prompt.")] = 1,
    use_beam_search: Annotated[
        bool, typer.Option("--use-beam-search", help="Refused: there is no beam search yet.", hidden=True)
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
    finds nothing; outputs are sampled at temperature 1 and never end early.
    """
    from trivet.bench.latency import measure_latency

    if use_beam_search:
        raise typer.BadParameter(
            "this engine has no beam search; leave it out, or measure several outputs per prompt with --n",
            param_hint="--use-beam-search",
        )
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
                detokenize=not disable_detokenize,
                seed=config.seed,
                on_iteration=counting(bar, "Iterations", num_iters_warmup + num_iters),
            )
    _report_latency(config.model, latencies, output_json)


class _Wanted:
    """Which requests throughput is measured with."""

    def __init__(
        self,
        *,
        source: str,
        path: Path | None,
        input_len: int | None,
        output_len: int | None,
        range_ratio: tuple[float, float],
        prefix_len: int | None,
        oversample: bool,
    ) -> None:
        self._path = path
        self._input_len, self._output_len = input_len, output_len
        self._range_ratio, self._prefix_len, self._oversample = range_ratio, prefix_len, oversample
        self._is_random = source == "random"

    def check(self) -> None:
        """Refuse options that would have no effect."""
        useless = {
            "--input-len": self._input_len is not None,
            "--random-range-ratio": self._range_ratio != (0.0, 0.0),
            "--random-prefix-len": self._prefix_len is not None,
        }
        if self._is_random:
            useless = {"--no-oversample": not self._oversample}
        for option, given in useless.items():
            if given:
                goes_with = "a file" if self._is_random else "random requests"
                raise typer.BadParameter(f"goes with {goes_with} only: leave it out", param_hint=option)

    def draw(self, llm: LLM, count: int, seed: int) -> list[BenchRequest]:
        """Draw requests that the engine takes."""
        from trivet.bench import datasets

        engine = llm.engine
        if not self._is_random:
            assert self._path is not None
            return datasets.sharegpt_requests(
                self._path,
                count,
                llm.get_tokenizer(),
                output_len=self._output_len,
                max_model_len=engine.max_model_len,
                seed=seed,
                oversample=self._oversample,
            )
        input_len = _INPUT_LEN if self._input_len is None else self._input_len
        output_len = _OUTPUT_LEN if self._output_len is None else self._output_len
        prefix_len, options = self._prefix_len or 0, ("--random-input-len", "--random-output-len")
        prompt, output = map(datasets.shortest, (input_len, output_len), self._range_ratio)
        datasets.check_length(prefix_len + prompt, output, engine.max_model_len, options)
        requests = datasets.random_requests(
            count,
            datasets.plain_token_ids(engine),
            input_len=input_len,
            output_len=output_len,
            range_ratio=self._range_ratio,
            prefix_len=prefix_len,
            seed=seed,
        )
        datasets.check_lengths(requests, engine.max_model_len, options)
        return requests


def _one_of(first: str, one: int | None, second: str, other: int | None) -> int | None:
    """The value of two options that mean the same."""
    if one is not None and other is not None and one != other:
        raise typer.BadParameter(f"{one} contradicts {second} {other}: give one of them", param_hint=first)
    return other if one is None else one


def _range_ratio(text: str) -> tuple[float, float]:
    """Of prompts and outputs."""
    hint = "--random-range-ratio"
    try:
        value = json.loads(text)
        given = value if isinstance(value, dict) else {"input": value, "output": value}
        ratios = (float(given.pop("input")), float(given.pop("output")))
    except (ValueError, KeyError, TypeError):
        given, ratios = {"nothing": text}, (0.0, 0.0)
    if given:
        shape = 'must be a number, or an object like {"input": 0.2, "output": 0.5}'
        raise typer.BadParameter(f"{shape}, got {text!r}", param_hint=hint)
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise typer.BadParameter(f"must be at least 0 and less than 1, got {text}", param_hint=hint)
    return ratios


def _load(config: Any) -> LLM:
    from trivet.llm import LLM

    with progress_bar() as bar:
        bar.add_task(f"Loading {config.model}", total=None)
        return LLM.from_config(config)


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

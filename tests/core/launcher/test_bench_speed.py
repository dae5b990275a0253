"""``trivet bench throughput`` and ``trivet bench latency``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Result, Run, Site

from trivet.llm import LLM
from trivet_schemas.outputs import BeamSearchOutput

#: what vLLM's benchmarks write
THROUGHPUT_KEYS = {
    "model_id",
    "elapsed_time",
    "num_requests",
    "total_num_tokens",
    "requests_per_second",
    "tokens_per_second",
}
LATENCY_KEYS = {"model_id", "avg_latency", "latencies", "percentiles"}
PERCENTILES = ["10", "25", "50", "75", "90", "99"]


def plain(text: str) -> str:
    """What a box says, without the box."""
    return " ".join(text.replace("│", " ").split())


def report(result: Result, path: Path) -> dict[str, Any]:
    assert result.code == 0, result.err
    return json.loads(path.read_text(encoding="utf-8"))


def test_throughput_counts_requests_and_tokens_under_vllms_names(run: Run, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ("--random-input-len", 9, "--random-output-len", 4, "--random-prefix-len", 3)
    result = run("bench", "throughput", site.config(), *lengths, "--num-prompts", 7, "--n", 2, "--output-json", out)
    found = report(result, out)
    assert set(found) >= THROUGHPUT_KEYS
    assert found["model_id"] == "demo"
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (7, 7 * 12, 7 * 4 * 2)
    assert found["total_num_tokens"] == 7 * 12 + 7 * 4 * 2
    seconds = found["elapsed_time"]
    assert found["requests_per_second"] == pytest.approx(7 / seconds)
    assert found["tokens_per_second"] == pytest.approx(found["total_num_tokens"] / seconds)
    assert found["output_tokens_per_second"] == pytest.approx(56 / seconds)
    rows = {" ".join(line.split()[:-2]): line.split()[-2:] for line in result.out.splitlines() if line.strip()}
    assert rows["requests"] == ["7", f"{7 / seconds:.2f}"]
    assert rows["prompt tokens"][0] == "84"
    assert rows["output tokens"][0] == "56"
    assert rows["all tokens"] == ["140", f"{140 / seconds:.2f}"]


def test_the_short_lengths_and_a_range_are_taken(run: Run, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--input-len", 8, "--output-len", 4, "--random-range-ratio", '{"input": 0.5, "output": 0}')
    found = report(run("bench", "throughput", site.config(), *options, "--num-prompts", 30, "--output-json", out), out)
    assert found["total_output_tokens"] == 30 * 4
    assert 30 * 4 < found["total_prompt_tokens"] < 30 * 12
    again = tmp_path / "again.json"
    command = ("bench", "throughput", site.config(), *options, "--num-prompts", 30, "--output-json", again)
    assert report(run(*command), again)["total_prompt_tokens"] == found["total_prompt_tokens"]
    assert report(run(*command, "--seed", 5), again)["total_prompt_tokens"] != found["total_prompt_tokens"]


def test_conversations_of_a_file_are_run(run: Run, site: Site, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "how are you"}, {"from": "gpt", "value": "very well"}]
    data = site.write("talk.json", json.dumps([{"conversations": turns}]))
    out = tmp_path / "out.json"
    command = ("bench", "throughput", site.config(), "--dataset-path", data, "--num-prompts", 3, "--output-json", out)
    found = report(run(*command, "--num-warmups", 2), out)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (3, 33, 27)
    found = report(run(*command, "--no-oversample", "--dataset-name", "sharegpt", "--output-len", 5), out)
    assert (found["num_requests"], found["total_output_tokens"]) == (1, 5)


def test_latency_lists_the_iterations_that_count_under_vllms_names(run: Run, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--input-len", 5, "--output-len", 3, "--batch-size", 4, "--num-iters-warmup", 1, "--num-iters", 6)
    result = run("bench", "latency", site.config(), *options, "--output-json", out)
    found = report(result, out)
    assert set(found) == LATENCY_KEYS
    assert len(found["latencies"]) == 6
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 6)
    assert list(found["percentiles"]) == PERCENTILES
    assert found["percentiles"]["50"] == pytest.approx(sum(sorted(found["latencies"])[2:4]) / 2)
    rows = {line.split()[0]: line.split()[1] for line in result.out.splitlines() if len(line.split()) == 2}
    assert rows["average"] == f"{found['avg_latency']:.4f}"
    assert rows["99%"] == f"{found['percentiles']['99']:.4f}"
    assert result.err == ""


def test_a_batch_that_does_not_run_at_once_is_pointed_out(run: Run, site: Site) -> None:
    options = ("--input-len", 5, "--output-len", 3, "--batch-size", 4, "--num-iters-warmup", 0, "--num-iters", 1)
    result = run("bench", "latency", site.config(), *options, "--n", 2, "--max-num-seqs", 7)
    assert result.code == 0, result.err
    assert "--batch-size 4 with --n 2 is more than max_num_seqs 7" in result.err


def test_beams_are_searched_for(run: Run, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[BeamSearchOutput]] = []
    search = LLM.beam_search

    def noted(self: LLM, *arguments: Any, **options: Any) -> list[BeamSearchOutput]:
        outputs = search(self, *arguments, **options)
        found.append(outputs)
        return outputs

    monkeypatch.setattr(LLM, "beam_search", noted)
    out = tmp_path / "out.json"
    options = ("--input-len", 5, "--output-len", 4, "--batch-size", 3, "--num-iters-warmup", 1, "--num-iters", 2)
    command = ("bench", "latency", site.config(), *options, "--n", 2, "--use-beam-search", "--output-json", out)
    assert len(report(run(*command), out)["latencies"]) == 2
    assert [[len(output.sequences) for output in outputs] for outputs in found] == [[2, 2, 2]] * 3
    lengths = {len(sequence.tokens) for outputs in found for output in outputs for sequence in output.sequences}
    assert lengths == {5 + 4}, "a prompt and its output, whatever ends a sequence"


def test_prefixes_are_repeated(run: Run, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = {"prefix-len": 7, "suffix-len": 3, "num-prefixes": 2, "output-len": 4}
    options = [part for name, value in lengths.items() for part in (f"--prefix-repetition-{name}", value)]
    command = ("bench", "throughput", site.config(), "--dataset-name", "prefix_repetition", "--num-prompts", 7)
    found = report(run(*command, *options, "--num-warmups", 1, "--output-json", out), out)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (6, 60, 24)


def test_the_async_engine_runs_the_same_requests(run: Run, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--input-len", 9, "--output-len", 4, "--num-prompts", 7, "--n", 2, "--num-warmups", 2)
    command = ("bench", "throughput", site.config(), *options, "--backend", "vllm", "--async-engine")
    found = report(run(*command, "--output-json", out), out)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (7, 63, 56)
    turns = [{"value": "how are you"}, {"value": "very well"}]
    data = site.write("talk.json", json.dumps([{"conversations": turns}]))
    found = report(
        run(
            *command[:3],
            "--async-engine",
            "--dataset-path",
            data,
            "--num-prompts",
            2,
            "--custom-output-len",
            5,
            "--output-json",
            out,
        ),
        out,
    )
    assert (found["num_requests"], found["total_output_tokens"]) == (2, 10)


def test_a_request_that_fails_ends_a_benchmark_of_the_async_engine_too(run: Run, site: Site) -> None:
    config = site.config(plugins=site.spoil("a"), model={"vocab_size": 2, "eos_token_ids": [1]})
    result = run("bench", "throughput", config, "--input-len", 5, "--output-len", 3, "--async-engine")
    assert result.code == 1
    assert "requests failed; the first:" in result.err
    refused = run("bench", "throughput", site.config(max_num_seqs=0), "--async-engine")
    assert refused.code == 2
    assert "Traceback" not in refused.err


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_a_request_that_fails_ends_the_benchmark(run: Run, site: Site, tmp_path: Path, command: str) -> None:
    config = site.config(plugins=site.spoil("a"), model={"vocab_size": 2, "eos_token_ids": [1]})
    out = tmp_path / "out.json"
    result = run("bench", command, config, "--input-len", 5, "--output-len", 3, "--output-json", out)
    assert result.code == 1
    assert "requests failed; the first:" in result.err
    assert "Traceback" not in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        ("latency", ("--num-iters", 0), "--num-iters"),
        ("latency", ("--input-len", 500, "--output-len", 13), "--input-len and --output-len"),
        ("latency", ("--num-iters", -3), "--num-iters"),
        ("latency", ("--num-iters", "many"), "--num-iters"),
        ("latency", ("--input-len", 10**30), f"--input-len and --output-len: a prompt of {10**30} tokens"),
        ("throughput", ("--input-len", 10**12), f"a prompt of {10**12} tokens and 128 to generate"),
        ("throughput", ("--output-len", 10**12), f"and {10**12} to generate"),
        ("throughput", ("--prefix-len", 10**12), "more than the 512 that the engine takes"),
        ("latency", ("--output-json", "no/such/folder/out.json"), "--output-json"),
        ("throughput", ("--random-input-len", 500, "--output-len", 13), "more than the 512 that the engine takes"),
        ("throughput", ("--input-len", 5, "--random-input-len", 6), "--input-len: 5 contradicts --random-input-len 6"),
        ("throughput", ("--dataset-name", "sharegpt"), "--dataset-name: sharegpt needs a file"),
        ("throughput", ("--dataset-name", "random", "--dataset-path", "x.json"), "--dataset-path: random requests"),
        ("throughput", ("--dataset-name", "gsm8k"), "gsm8k"),
        ("throughput", ("--dataset-path", "x.json"), "--dataset-path: x.json cannot be read"),
        ("throughput", ("--dataset-path", "x.json", "--input-len", 5), "--input-len: goes with random requests only"),
        ("throughput", ("--no-oversample",), "--no-oversample: goes with a file only"),
        ("throughput", ("--custom-output-len", 4), "--custom-output-len: goes with a file only"),
        ("throughput", ("--backend", "hf"), "--backend: 'hf' is one of vLLM's backends that is not here"),
        (
            "throughput",
            ("--prefix-repetition-prefix-len", 4),
            "--prefix-repetition-prefix-len: goes with --dataset-name prefix_repetition only",
        ),
        (
            "throughput",
            ("--dataset-name", "prefix_repetition", "--num-prompts", 9),
            "--num-prompts: 9 requests are fewer than the 10 prefixes",
        ),
        (
            "throughput",
            ("--dataset-name", "prefix_repetition"),
            "a prompt of 512 tokens and 128 to generate are 640 together",
        ),
        (
            "throughput",
            ("--dataset-name", "prefix_repetition", "--dataset-path", "x.json"),
            "--dataset-path: prefix_repetition requests come from no file",
        ),
        (
            "throughput",
            ("--dataset-path", "x.json", "--output-len", 4, "--custom-output-len", 5),
            "--output-len: 4 contradicts --custom-output-len 5",
        ),
        ("throughput", ("--random-range-ratio", "1"), "--random-range-ratio: must be at least 0 and less than 1"),
        ("throughput", ("--random-range-ratio", "a"), "--random-range-ratio: must be a number"),
        ("throughput", ("--random-range-ratio", '{"input": 0.1}'), "--random-range-ratio: must be a number"),
        ("throughput", ("--random-range-ratio", '{"input": 0, "output": 0, "x": 0}'), "must be a number"),
    ],
)
def test_wrong_input_is_named(run: Run, site: Site, command: str, arguments: tuple[Any, ...], named: str) -> None:
    result = run("bench", command, site.config(), *arguments)
    assert result.code == 2
    assert named in plain(result.err)
    assert "Traceback" not in result.err
    assert result.out == ""

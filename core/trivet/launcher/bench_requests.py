"""Which requests ``trivet bench throughput`` runs, by its options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from trivet.bench.datasets import BenchRequest
    from trivet.bench.runs import Subject

Source = Literal["random", "sharegpt", "prefix_repetition"]

# vLLM's, where nothing is given: of random requests, and of those with repeated prefixes.
INPUT_LEN, OUTPUT_LEN = 1024, 128
PREFIX_LEN, NUM_PREFIXES = 256, 10


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options as given; None: not given."""

    source: Source
    path: Path | None
    input_len: int | None
    output_len: int | None
    custom_output_len: int | None
    range_ratio: tuple[float, float]
    prefix_len: int | None
    oversample: bool
    repeated_prefix_len: int | None
    repeated_suffix_len: int | None
    num_prefixes: int | None
    repeated_output_len: int | None
    count: int

    def check(self) -> None:
        """Refuse options that would have no effect, and those that contradict each other."""
        if self.source == "sharegpt" and self.path is None:
            raise typer.BadParameter("sharegpt needs a file: give --dataset-path", param_hint="--dataset-name")
        if self.source != "sharegpt" and self.path is not None:
            raise typer.BadParameter(
                f"{'random' if self.source == 'random' else self.source} requests come from no file: leave one of the "
                "two out",
                param_hint="--dataset-path",
            )
        goes_with: dict[str, tuple[Source, bool]] = {
            "--input-len": ("random", self.input_len is not None),
            "--random-range-ratio": ("random", self.range_ratio != (0.0, 0.0)),
            "--random-prefix-len": ("random", self.prefix_len is not None),
            "--no-oversample": ("sharegpt", not self.oversample),
            "--custom-output-len": ("sharegpt", self.custom_output_len is not None),
            "--prefix-repetition-prefix-len": ("prefix_repetition", self.repeated_prefix_len is not None),
            "--prefix-repetition-suffix-len": ("prefix_repetition", self.repeated_suffix_len is not None),
            "--prefix-repetition-num-prefixes": ("prefix_repetition", self.num_prefixes is not None),
            "--prefix-repetition-output-len": ("prefix_repetition", self.repeated_output_len is not None),
        }
        names = {
            "random": "random requests",
            "sharegpt": "a file",
            "prefix_repetition": "--dataset-name prefix_repetition",
        }
        for option, (source, given) in goes_with.items():
            if given and source != self.source:
                raise typer.BadParameter(f"goes with {names[source]} only: leave it out", param_hint=option)
        one_of("--output-len", self.output_len, "--custom-output-len", self.custom_output_len)
        one_of("--output-len", self.output_len, "--prefix-repetition-output-len", self.repeated_output_len)
        prefixes = _or(self.num_prefixes, NUM_PREFIXES)
        if self.source == "prefix_repetition" and self.count < prefixes:
            raise typer.BadParameter(
                f"{self.count} requests are fewer than the {prefixes} prefixes: raise it, or lower "
                "--prefix-repetition-num-prefixes",
                param_hint="--num-prompts",
            )

    def draw(self, subject: Subject, count: int, seed: int) -> list[BenchRequest]:
        """Draw requests that the engine takes."""
        if self.source == "sharegpt":
            return self._of_file(subject, count, seed)
        return self._random(subject, count, seed) if self.source == "random" else self._repeated(subject, count, seed)

    def _of_file(self, subject: Subject, count: int, seed: int) -> list[BenchRequest]:
        from trivet.bench import datasets

        assert self.path is not None
        return datasets.sharegpt_requests(
            self.path,
            count,
            subject.get_tokenizer(),
            output_len=self.output_len if self.custom_output_len is None else self.custom_output_len,
            max_model_len=subject.engine.max_model_len,
            seed=seed,
            oversample=self.oversample,
        )

    def _random(self, subject: Subject, count: int, seed: int) -> list[BenchRequest]:
        from trivet.bench import datasets

        engine = subject.engine
        input_len, output_len = _or(self.input_len, INPUT_LEN), _or(self.output_len, OUTPUT_LEN)
        prefix_len, options = self.prefix_len or 0, ("--random-input-len", "--random-output-len")
        prompt, output = map(datasets.shortest, (input_len, output_len), self.range_ratio)
        datasets.check_length(prefix_len + prompt, output, engine.max_model_len, options)
        requests = datasets.random_requests(
            count,
            datasets.plain_token_ids(engine),
            input_len=input_len,
            output_len=output_len,
            range_ratio=self.range_ratio,
            prefix_len=prefix_len,
            seed=seed,
        )
        datasets.check_lengths(requests, engine.max_model_len, options)
        return requests

    def _repeated(self, subject: Subject, count: int, seed: int) -> list[BenchRequest]:
        from trivet.bench import datasets

        engine = subject.engine
        prefix_len, suffix_len = _or(self.repeated_prefix_len, PREFIX_LEN), _or(self.repeated_suffix_len, PREFIX_LEN)
        output_len = _or(one_of("", self.output_len, "", self.repeated_output_len), OUTPUT_LEN)
        options = tuple(f"--prefix-repetition-{name}-len" for name in ("prefix", "suffix", "output"))
        datasets.check_length(prefix_len + suffix_len, output_len, engine.max_model_len, options)
        return datasets.prefix_repetition_requests(
            count,
            datasets.plain_token_ids(engine),
            prefix_len=prefix_len,
            suffix_len=suffix_len,
            num_prefixes=min(_or(self.num_prefixes, NUM_PREFIXES), count),
            output_len=output_len,
            seed=seed,
        )


def _or(given: int | None, usual: int) -> int:
    return usual if given is None else given


def one_of(first: str, one: int | None, second: str, other: int | None) -> int | None:
    """The value of two options that mean the same."""
    if one is not None and other is not None and one != other:
        raise typer.BadParameter(f"{one} contradicts {second} {other}: give one of them", param_hint=first)
    return other if one is None else one


def parse_range_ratio(text: str) -> tuple[float, float]:
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

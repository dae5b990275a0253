"""Random requests of every parameter give the same outputs whichever way they run: not their tokens alone, but texts,
reasons, ranks and logprobs. And a request whose logits are damaged takes nobody with it."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kit
import pytest

from trivet import LLM
from trivet.hookspecs import hookimpl
from trivet.provider import Provider
from trivet.roles import LogitsProcessor
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.errors import ParameterError
from trivet_schemas.options import Options
from trivet_schemas.outputs import CompletionOutput, RequestOutput
from trivet_schemas.sampling import SamplingParams

FAMILY, V = "qwen3", kit.VOCAB
Item = tuple[list[int], SamplingParams]
FEW_BLOCKS = 1 + kit.LONGEST // 8 + 2
OVERLAP = {"use": "inline", "async_scheduling": True}


def _random_params(r: random.Random) -> SamplingParams:
    always = {"seed": r.randrange(2**40), "max_tokens": r.choice([1, 2, 5, 16, 24])}
    some: dict[str, Any] = {
        "temperature": r.choice([0.0, 0.5, 1.0, 1.7]),
        "top_p": r.choice([0.3, 0.9, 1.0]),
        "top_k": r.choice([0, 1, 7, V, V + 5, 2**31 - 1]),
        "min_p": r.choice([0.0, 0.05, 0.5]),
        "repetition_penalty": r.choice([0.7, 1.3]),
        "presence_penalty": r.choice([-1.0, 0.7]),
        "frequency_penalty": r.choice([-0.5, 0.9]),
        "stop": [chr(r.randrange(65, 90)) for _ in range(r.choice([1, 2, 6]))],
        "include_stop_str_in_output": True,
        "stop_token_ids": [r.randrange(V) for _ in range(3)],
        "min_tokens": 1,
        "logprobs": r.choice([0, 3, -1, V]),
        "prompt_logprobs": r.choice([0, 2, V]),
        "logprob_token_ids": [r.randrange(V) for _ in range(3)],
        "logit_bias": {r.randrange(V): r.choice([-100, 5.0, 2.0]) for _ in range(5)},
        "allowed_token_ids": r.sample(range(V), r.choice([1, 5, 40])),
        "bad_words": ["a", "Tb", " X"],
        "n": r.choice([2, 3]),
        "best_of": 3,
    }
    while True:
        chosen = {name: some[name] for name in r.sample(sorted(some), r.choice([0, 1, 2, 4, 7]))}
        try:
            return SamplingParams(**always, **chosen)
        except ParameterError:
            continue  # several outputs of a greedy request, say


def _work(count: int, seed: int) -> list[Item]:
    """A quarter of the prompts begin alike."""
    r = random.Random(seed)
    shared = [r.randrange(V) for _ in range(24)]
    found = []
    for number in range(count):
        prompt = [r.randrange(V) for _ in range(r.choice([1, 2, 7, 8, 9, 16, 17, 33, 40]))]
        found.append((shared + prompt[:16] if number % 4 == 0 else prompt, _random_params(r)))
    return found


def _llm(library: Any, *plugins: Any, **roles: Any) -> AbstractContextManager[LLM]:
    config = kit.settings(library.path(FAMILY), FAMILY, block_size=8, budget=64, small=False)
    for role, options in roles.items():
        old = config["plugins"].get(role, {})
        config["plugins"][role] = {**old, **options} if isinstance(options, dict) else options
    return LLM.from_config(config, [FakeTokenizer(), *plugins])


def _run(llm: LLM, work: Sequence[Item]) -> list[RequestOutput]:
    prompts: Any = [prompt for prompt, _ in work]
    outputs = llm.generate(prompts, [params for _, params in work], use_tqdm=False)
    llm.engine.check_integrity()
    return outputs


def _facts(output: CompletionOutput) -> tuple[Any, ...]:
    return output.index, list(output.token_ids), output.text, output.finish_reason, output.stop_reason


def _numbers(entries: Sequence[Any] | None) -> list[Any] | None:
    """What logprobs say: per position the tokens and their logprobs, which may differ in their last digits."""
    if entries is None:
        return None
    return [
        entry and {token: pytest.approx(value.logprob, abs=3e-4) for token, value in entry.items()} for entry in entries
    ]


def _values(entries: Sequence[Any] | None) -> list[Any] | None:
    if entries is None:
        return None
    return [entry and {token: value.logprob for token, value in entry.items()} for entry in entries]


def _same(got: RequestOutput, want: RequestOutput) -> None:
    assert got.error is None
    assert [_facts(output) for output in got.outputs] == [_facts(output) for output in want.outputs]
    assert _values(got.prompt_logprobs) == _numbers(want.prompt_logprobs)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert _values(a.logprobs) == _numbers(b.logprobs)


@pytest.fixture(scope="module")
def work() -> list[Item]:
    return _work(90, seed=3)


@pytest.fixture(scope="module")
def alone(library: Any, work: list[Item]) -> list[RequestOutput]:
    """Each request by itself."""
    with _llm(library) as llm:
        return [_run(llm, [item])[0] for item in work]


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param({}, id="together"),
        pytest.param({"cache": {"num_blocks": FEW_BLOCKS}}, id="preempted"),
        pytest.param({"executor": OVERLAP}, id="overlapping steps"),
        pytest.param({"scheduler": {"max_num_batched_tokens": 11}}, id="in chunks"),
        pytest.param({"cache": {"prefix_caching": False}}, id="without prefix cache"),
        pytest.param({"scheduler": {"use": "static"}}, id="static"),
        pytest.param({"model": {"use": "transformers"}, "attention": {"use": "torch"}}, id="other providers"),
        pytest.param(
            {
                "cache": {"num_blocks": FEW_BLOCKS},
                "executor": OVERLAP,
                "scheduler": {"max_num_batched_tokens": 13, "policy": "shortest_first", "victim": "least_computed"},
            },
            id="all of it",
        ),
    ],
)
def test_every_way_gives_the_same_outputs(
    library: Any, work: list[Item], alone: list[RequestOutput], roles: dict[str, Any]
) -> None:
    with _llm(library, **roles) as llm:
        outputs = _run(llm, work)
    for got, want in zip(outputs, alone, strict=True):
        _same(got, want)
    if "num_blocks" in roles.get("cache", {}):
        assert sum(output.metrics.num_preemptions for output in outputs) >= 10


# ---------------------------------------------------------------- damaged logits


class Damage(LogitsProcessor):
    """Writes the value that a request asks for into one of its logits, or into all, once it has some tokens."""

    def __init__(self, context: Any, options: Options) -> None:
        self._asked: dict[int, tuple[str, int | None, int]] = {}

    def add(self, request: Any) -> bool:
        asked = (request.params.extra_args or {}).get("damage")
        if asked is not None:
            self._asked[request.slot] = (asked[0], asked[1], request.num_prompt + asked[2])
        return asked is not None

    def remove(self, slot: int) -> None:
        del self._asked[slot]

    def apply(self, logits: Any, rows: Any, selected: Any) -> Any:
        for row in selected.tolist():
            slot = int(rows.row_slots[row])
            value, token, length = self._asked[slot]
            if rows.lengths[slot] >= length:
                logits[row, slice(None) if token is None else token] = float(value)
        return logits


class _Plugin:
    @hookimpl
    def trivet_providers(self) -> list[Provider]:
        return [
            Provider(
                role="logits_processor",
                name="damage",
                factory=f"{__name__}:Damage",
                options="trivet_schemas.options:Options",
                summary="damages logits",
            )
        ]


DAMAGES: list[tuple[str, int | None, str]] = [
    ("nan", 7, "NaN"),
    ("nan", None, "NaN"),
    ("inf", 7, "infinite"),
    ("-inf", None, "logits processor Damage"),
]


@pytest.mark.parametrize("executor", [{"use": "inline"}, OVERLAP], ids=["one step", "overlapping steps"])
def test_damaged_logits_end_their_request_alone(
    library: Any, work: list[Item], alone: list[RequestOutput], executor: dict[str, Any]
) -> None:
    """Penalties, biases and logprobs of the neighbours are as ever."""
    mixed: list[tuple[Item, int | None]] = []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 4},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 5},
        {"top_p": 0.8, "logprobs": 3, "seed": 6},
        {"allowed_token_ids": [7, 9], "logit_bias": {7: 3.0}, "seed": 7},
    ]
    expected: list[tuple[str, int]] = []
    for number, item in enumerate(work):
        mixed.append((item, number))
        if number % 4 == 0:
            value, token, message = DAMAGES[number // 4 % len(DAMAGES)]
            after = number // 16 % 3
            extra = {"damage": [value, token, after]}
            params = SamplingParams(**kinds[number // 4 % len(kinds)], max_tokens=9, ignore_eos=True, extra_args=extra)
            mixed.append((([3, 1, 4, number], params) if number < V else ([3, 1, 4], params), None))
            expected.append((message, after))
    with _llm(library, _Plugin(), logits_processor=[{"use": "damage"}], executor=executor) as llm:
        outputs = _run(llm, [item for item, _ in mixed])
        stats = llm.engine.parts.cache.stats()
        assert stats.free == stats.total
    damaged = []
    for output, (_, number) in zip(outputs, mixed, strict=True):
        if number is None:
            damaged.append(output)
        else:
            _same(output, alone[number])
    for output, (message, after) in zip(damaged, expected, strict=True):
        assert output.outputs[0].finish_reason == "error"
        assert output.error is not None
        assert message in output.error
        assert "masked" not in output.error or "penalty" not in output.error, "penalties mask nothing"
        assert len(output.outputs[0].token_ids) == after
        assert not math.isnan(output.outputs[0].cumulative_logprob or 0.0)


@pytest.mark.parametrize("end", [V, 99_999, 2**32 + 4, -1])
def test_an_end_of_sequence_that_the_model_lacks_ends_nothing(library: Any, tmp_path: Path, end: int) -> None:
    """Nor is it masked for the sake of ``min_tokens``, where there is no logit to mask."""
    work: list[Item] = [([3, 1, 4], SamplingParams(seed=n, min_tokens=3 * n, max_tokens=6)) for n in range(3)]
    with _llm(library) as llm:
        want = _run(llm, work)
    model = shutil.copytree(library.path(FAMILY), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    config = kit.settings(model, FAMILY, block_size=8, budget=64, small=False)
    with LLM.from_config(config, [FakeTokenizer()]) as llm:
        for got, one in zip(_run(llm, work), want, strict=True):
            _same(got, one)

"""A logits processor of somebody else's, named in a configuration file, beside every other parameter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from trivet.engine import Engine
from trivet.errors import RequestError
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams

FAMILY = "qwen2"
SOURCE = Path(__file__).parents[1] / "external_plugin" / "src"


@pytest.fixture
def engine(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SOURCE))
    import acme_trivet.plugin

    config = kit.settings(library.path(FAMILY), FAMILY, block_size=8, budget=32, small=False)
    config["plugins"]["logits_processor"] = [{"use": "acme_no_echo", "strength": 4.0}]
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(config))
    built = Engine(str(path), [FakeTokenizer(), acme_trivet.plugin])
    yield built
    built.shutdown()
    for name in [name for name in sys.modules if name.startswith("acme_trivet")]:
        del sys.modules[name]


def run(engine: Engine, work: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    for name, (prompt, params) in work.items():
        engine.add_request(name, prompt, params)
    done: dict[str, list[int]] = {}
    while engine.has_work:
        for end in engine.step().finished:
            assert end.message is None, end.message
            done[end.request.request_id] = end.request.output_ids
    return done


def test_greedy_tokens_are_those_of_the_changed_logits(engine: Engine, library: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(library.path(FAMILY), dtype=torch.float32).eval()
    strengths: dict[str, tuple[Any, float]] = {"none": (None, 0.0), "given": (True, 4.0), "own": (0.7, 0.7)}
    work: dict[str, tuple[list[int], SamplingParams]] = {}
    for name, (asked, _) in strengths.items():
        extra = None if asked is None else {"acme_no_echo": asked}
        params = SamplingParams(max_tokens=20, temperature=0, extra_args=extra, presence_penalty=-1.0, ignore_eos=True)
        work[name] = ([5, 9, 9, 2], params)
    done = run(engine, work)
    for name, (_, strength) in strengths.items():
        tokens = [5, 9, 9, 2]
        for token in done[name]:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[sorted(set(tokens[4:]))] += 1.0
            logits[tokens[-1]] -= strength
            assert token == int(logits.argmax())
            tokens.append(token)


def test_a_row_draws_the_same_alone_and_in_company(engine: Engine) -> None:
    common: dict[str, Any] = {"max_tokens": 16, "seed": 3, "temperature": 0.9, "ignore_eos": True}
    settings: list[dict[str, Any]] = [
        {"extra_args": {"acme_no_echo": True}, "top_p": 0.9},
        {"extra_args": {"acme_no_echo": 2.0}, "frequency_penalty": 0.5, "logit_bias": {4: 3.0}},
        {"repetition_penalty": 1.3},
        {"extra_args": {"acme_no_echo": True}, "allowed_token_ids": list(range(40))},
        {},
    ]
    work = {str(n): ([n, 7, 7], SamplingParams(**common, **own)) for n, own in enumerate(settings)}
    together = run(engine, work)
    for name, item in work.items():
        assert run(engine, {name: item})[name] == together[name]
    assert len({tuple(tokens) for tokens in together.values()}) == len(settings)


def test_wrong_arguments_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(RequestError, match="acme_no_echo.*positive number, got 'much'"):
        engine.add_request("r", [1], SamplingParams(extra_args={"acme_no_echo": "much"}))
    assert not engine.has_work


def test_bad_words_are_kept_out_of_a_text(engine: Engine, library: Any) -> None:
    """Greedy, with words of which the model's own continuation has the letters."""
    tokenizer = FakeTokenizer()
    free = run(engine, {"free": ([5, 9], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))})["free"]
    text = tokenizer.decode(free)
    words = [text[3], text[6:8], text[10:13]]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, bad_words=words)
    kept = tokenizer.decode(run(engine, {"kept": ([5, 9], params)})["kept"])
    assert all(word in text and word not in kept for word in words)
    assert kept[:3] == text[:3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {kit.VOCAB: 1.0}),
        ("allowed_token_ids", [0, kit.VOCAB]),
        ("logprob_token_ids", [kit.VOCAB]),
        ("stop_token_ids", [kit.VOCAB]),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_and_neighbours_finish(engine: Engine, field: str, value: Any) -> None:
    engine.add_request("good", [5, 9], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    with pytest.raises(RequestError, match=f"{field}.*below the vocabulary size {kit.VOCAB}"):
        engine.add_request("bad", [5], SamplingParams(**{field: value}))
    assert len(run(engine, {})["good"]) == 6

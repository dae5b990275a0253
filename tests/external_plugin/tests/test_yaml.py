"""Engines from configuration files that name the plugins of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acme_trivet.watermark import green_tokens

from trivet.engine import Engine
from trivet.errors import PluginError, RequestError, TrivetError
from trivet.registry import Catalog
from trivet.testing import fakes
from trivet.testing.fake_model import reference_logits, reference_tokens
from trivet_schemas.errors import SchemaError
from trivet_schemas.sampling import SamplingParams

FAKES = """
model: fake
max_model_len: 200
plugins:
  model: {use: fake}
  attention: {use: fake}
  sampler: {use: fake}
  runner: {use: fake}
  tokenizer: {use: fake}
  executor: {use: inline}
  cache: {use: paged, block_size: 4}
"""


def generate(path: Path, text: str, prompts: list[list[int]], count: int = 20, *plugins: Any) -> list[list[int]]:
    path.write_text(FAKES + text)
    engine = Engine(str(path), [fakes, *plugins])
    try:
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, SamplingParams(max_tokens=count, temperature=0))
        done = {}
        while engine.has_work:
            done |= {end.request.request_id: end.request for end in engine.step().finished}
        return [done[str(index)].output_ids for index in range(len(prompts))]
    finally:
        engine.shutdown()


def test_the_scheduler_is_selected_by_name(tmp_path: Path) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(12)]
    found = generate(tmp_path / "c.yaml", "  scheduler: {use: acme_shortest, max_num_seqs: 3}\n", prompts)
    assert found == [reference_tokens(prompt, 20) for prompt in prompts]


def test_the_watermark_raises_green_tokens(tmp_path: Path) -> None:
    text = "  scheduler: {use: continuous}\n  extension: [{use: acme_watermark, key: 7, strength: 3.0, share: 0.4}]\n"
    prompt = [3, 1, 4]
    (found,) = generate(tmp_path / "c.yaml", text, [prompt], 60)
    tokens, green = list(prompt), 0
    for token in found:
        logits = reference_logits(tokens, 64, [None])[-1]
        chosen = green_tokens(7, tokens[-1], 64, 0.4)
        logits[chosen] += 3.0
        assert token == int(logits.argmax())
        green += token in chosen
        tokens.append(token)
    assert green > 40, "most tokens are green, although only 40 % of the vocabulary is"
    assert found != reference_tokens(prompt, 60)


def test_the_logits_processor_changes_the_rows_that_ask(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FAKES + "  scheduler: {use: continuous}\n  logits_processor: [{use: acme_no_echo, strength: 50}]\n")
    engine = Engine(str(path), [fakes])
    try:
        for index, extra in enumerate((None, {"acme_no_echo": True}, {"acme_no_echo": 0.5})):
            engine.add_request(str(index), [3, 1], SamplingParams(max_tokens=30, temperature=0, extra_args=extra))
        with pytest.raises(RequestError, match="acme_no_echo.*positive number, got -1"):
            engine.add_request("bad", [1], SamplingParams(extra_args={"acme_no_echo": -1}))
        done = {}
        while engine.has_work:
            done |= {end.request.request_id: end.request.output_ids for end in engine.step().finished}
    finally:
        engine.shutdown()
    assert done["0"] == reference_tokens([3, 1], 30)
    for name, strength in (("1", 50.0), ("2", 0.5)):
        tokens = [3, 1]
        for token in done[name]:
            logits = reference_logits(tokens, 64, [None])[-1]
            logits[tokens[-1]] -= strength
            assert token == int(logits.argmax())
            tokens.append(token)


def test_without_the_extension_nothing_is_wrapped(tmp_path: Path) -> None:
    prompt = [3, 1, 4]
    assert generate(tmp_path / "c.yaml", "  scheduler: {use: continuous}\n", [prompt]) == [reference_tokens(prompt, 20)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  scheduler: {use: acme_shortest, patiense: 3}\n", "patience"),
        ("  scheduler: {use: acme_shortest, patience: -1}\n", "patience"),
        ("  scheduler: {use: acme_shortes}\n", "acme_shortest"),
        ("  logits_processor: [{use: acme_no_echo, strength: 0}]\n", "strength"),
        ("  extension: [{use: acme_watermark}]\n", "key"),
        ("  extension: [{use: acme_watermark, key: 1, share: 2}]\n", "share"),
        ("  extension: [{use: acme_shortest}]\n", "scheduler"),
    ],
)
def test_wrong_selections_name_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises((PluginError, SchemaError, TrivetError), match=words):
        generate(tmp_path / "c.yaml", text, [[1]])


def test_the_package_is_a_distribution_that_discovery_finds() -> None:
    found = {plugin.name: plugin for plugin in Catalog().plugins}
    for name in ("acme_shortest", "acme_watermark"):
        assert found[name].distribution == "acme-trivet"
        assert found[name].version == "1.2.0"
        assert not found[name].problems
    assert np.array_equal(green_tokens(1, 2, 64, 0.5), green_tokens(1, 2, 64, 0.5))

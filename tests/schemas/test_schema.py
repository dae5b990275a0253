from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from trivet_schemas._yaml import read_yaml
from trivet_schemas.errors import ConfigError
from trivet_schemas.options import Options, Size, collect_flat_names, flat
from trivet_schemas.schema import engine_json_schema
from trivet_schemas.validation import validate_options
from trivet_schemas.yaml_io import load_config_file


class Continuous(Options):
    max_num_seqs: int = Field(256, ge=1, json_schema_extra=flat("max_num_seqs"))
    """Most requests that run at once."""
    policy: Literal["fcfs", "priority"] = "fcfs"


class Static(Options):
    max_num_seqs: int = Field(8, ge=1, le=64, json_schema_extra=flat("max_num_seqs"))


class Limits(BaseModel):
    rows: int = 1


class Paged(Options):
    block_size: int = Field(16, ge=1)
    memory: Size | None = None
    limits: Limits | None = None
    by_name: dict[str, Limits] = Field(default_factory=dict)


class Offload(Options):
    host_memory: Size
    """Memory of the host."""


PROVIDERS: dict[str, dict[str, type[BaseModel] | None]] = {
    "scheduler": {"continuous": Continuous, "static": Static},
    "cache": {"paged": Paged},
    "cache_tier": {"offload": Offload},
    "sampler": {"sampler": None},
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    schema = engine_json_schema(PROVIDERS, many=["cache_tier"])
    Draft202012Validator.check_schema(schema)
    return schema


GOOD = [
    "model: demo",
    "{model: demo, dtype: half, device: 'cuda:0', seed: 3, served_model_name: [a, b], max_model_len: null}",
    "{model: demo, plugins: {}}",
    "{model: demo, plugins: {scheduler: static, cache: auto}}",
    "{model: demo, plugins: {scheduler: {use: static, max_num_seqs: 64}}}",
    "{model: demo, plugins: {scheduler: {use: continuous, policy: priority, max_num_seqs: 99}}}",
    "{model: demo, plugins: {scheduler: {policy: priority}}}",
    "{model: demo, plugins: {scheduler: {use: auto, max_num_seqs: 3}}}",
    "{model: demo, plugins: {cache: {use: paged, memory: 4GiB, limits: {rows: 2}, by_name: {a: {rows: 1}}}}}",
    "{model: demo, plugins: {cache: {memory: 1073741824}}}",
    "{model: demo, plugins: {cache_tier: [{use: offload, host_memory: 1.5G}]}}",
    "{model: demo, plugins: {sampler: {use: sampler}}}",
    "{model: demo, max_num_seqs: 4}",
    "{model: demo, generate: {prompts: [a], chat: true, sampling: {temperature: 0, stop: x, logit_bias: {5: 1}}}}",
    "{model: demo, generate: {sampling: {stop: [a, b], max_tokens: null, structured_outputs: {regex: a}, seed: 1}}}",
    "{model: demo, serve: {port: 8000}}",
]
BAD = [
    "{}",
    "{model: 5}",
    "{model: demo, sede: 3}",
    "{model: demo, dtype: fp16}",
    "{model: demo, seed: x}",
    "{model: demo, max_model_len: 0}",
    "{model: demo, plugins: {scheduler: statik}}",
    "{model: demo, plugins: {scheduler: {use: statik}}}",
    "{model: demo, plugins: {scheduler: {use: static, policy: fcfs}}}",
    "{model: demo, plugins: {scheduler: {use: static, max_num_seqs: 65}}}",
    "{model: demo, plugins: {scheduler: {use: auto, blok: 3}}}",
    "{model: demo, plugins: {scheduler: 5}}",
    "{model: demo, plugins: {schedular: static}}",
    "{model: demo, plugins: {cache: {use: paged, memory: 4 gigs}}}",
    "{model: demo, plugins: {cache: {use: paged, limits: {rows: x}}}}",
    "{model: demo, plugins: {cache_tier: [{use: offload}]}}",
    "{model: demo, plugins: {sampler: {use: sampler, top: 1}}}",
    "{model: demo, max_num_seqs: 0}",
    "{model: demo, generate: {promts: [a]}}",
    "{model: demo, generate: {sampling: {temperature: 3}}}",
    "{model: demo, generate: {sampling: {tmp: 1}}}",
    "{model: demo, generate: {sampling: {stop: 5}}}",
]


def errors(schema: dict[str, Any], text: str) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(read_yaml(text).value)]


@pytest.mark.parametrize("text", GOOD)
def test_good_documents_are_valid(schema: dict[str, Any], text: str) -> None:
    assert errors(schema, text) == []


@pytest.mark.parametrize("text", BAD)
def test_bad_documents_are_not(schema: dict[str, Any], text: str) -> None:
    assert errors(schema, text)


def load_and_validate(path: Path) -> None:
    """Load, and look up and validate the plugins as the registry does."""
    config = load_config_file(path, known_flat=collect_flat_names(PROVIDERS))
    for role in config.plugins:
        for selection in config.selections(role):
            use = next(iter(PROVIDERS[role])) if selection.use == "auto" else selection.use
            validate_options(PROVIDERS[role][use] or Options, selection.options, role)


@pytest.mark.parametrize("text", GOOD + BAD)
def test_the_schema_agrees_with_the_loader(schema: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    wrong: str | None = None
    try:
        load_and_validate(path)
    except (ConfigError, LookupError) as exc:
        wrong = str(exc)
    assert bool(errors(schema, text)) == (wrong is not None), wrong


def test_only_roles_with_many_plugins_take_a_list(schema: dict[str, Any]) -> None:
    text = "{model: demo, plugins: {cache: [paged]}}"
    assert errors(schema, text)
    assert not errors(engine_json_schema(PROVIDERS), text)


def test_options_and_keys_are_described(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["model"]["description"] == "Hub id, folder, GGUF file, or ``demo``."
    options = schema["$defs"]["scheduler.continuous"]["properties"]
    assert options["max_num_seqs"]["description"] == "Most requests that run at once."
    sampling = schema["$defs"]["SamplingParams"]["properties"]
    assert sampling["temperature"]["description"] == "Divides the logits; 0 is greedy."
    assert schema["properties"]["max_num_seqs"]["description"] == "Short for plugins.scheduler.max_num_seqs."
    assert all("description" in prop for prop in schema["properties"].values())


def test_it_is_json_and_every_reference_resolves(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert {reference.removeprefix("#/$defs/") for reference in references} <= set(schema["$defs"])


def test_without_plugins_only_the_keys_of_the_configuration_remain() -> None:
    schema = engine_json_schema({})
    assert errors(schema, "model: demo") == []
    assert errors(schema, "{model: demo, plugins: {cache: paged}}")

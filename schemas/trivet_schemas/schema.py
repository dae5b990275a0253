"""One JSON Schema for the whole configuration file, with the options of every installed plugin, for editors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from trivet_schemas._docstrings import add_descriptions
from trivet_schemas.config import AUTO, EngineConfig, GenerateSection
from trivet_schemas.options import collect_flat_names
from trivet_schemas.sampling import SamplingParams

Providers = Mapping[str, Mapping[str, type[BaseModel] | None]]
"""Role → provider name → its option model; None for a provider without options."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def engine_json_schema(
    providers: Providers, many: Collection[str] | None = None, optional: Collection[str] = ()
) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a configuration file.

    Args:
        providers: Every installed provider with its option model.
        many: The roles that take a list of plugins; None lets every role take one.
        optional: The roles whose name is a key of its own, with the name of a provider as its value.

    Returns:
        A schema that accepts what :func:`trivet_schemas.yaml_io.load_config_file` accepts and, beyond that, checks the
        options of each plugin, as the registry does later. ``use: auto`` takes the options of any one provider.
    """
    schema = EngineConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = schema.pop("$defs")
    add_descriptions(EngineConfig, schema)
    add_descriptions(GenerateSection, definitions["GenerateSection"])
    add_descriptions(SamplingParams, definitions["SamplingParams"])
    definitions.pop("PluginSelection", None)
    properties = schema["properties"]
    properties["dtype"]["enum"] = [*properties["dtype"]["enum"], "half", "float"]

    roles: dict[str, Any] = {}
    for role, models in providers.items():
        for name, model in models.items():
            _define_options(definitions, role, name, model)
        one = _selection(role, models)
        takes_list = many is None or role in many
        roles[role] = {"anyOf": [*one, {"type": "array", "items": {"anyOf": one}}] if takes_list else one}
    properties["plugins"] = {
        "type": "object",
        "description": properties["plugins"]["description"],
        "properties": roles,
        "additionalProperties": False,
    }
    for name, targets in collect_flat_names(providers).items():
        properties[name] = _flat_property(definitions, providers, name, targets)
    for role in optional:
        names = {"enum": [AUTO, *providers.get(role, {}), None]}
        properties[role] = {"description": f"Short for plugins.{role}.use.", **names}
    return {"$schema": _DIALECT, **schema, "title": "Trivet configuration", "$defs": definitions}


def _definition_name(role: str, name: str) -> str:
    return f"{role}.{name}".replace("~", "~0").replace("/", "~1")


def _define_options(definitions: dict[str, Any], role: str, name: str, model: type[BaseModel] | None) -> None:
    """Add ``$defs["role.name"]``: the long form of a selection of this provider."""
    key = _definition_name(role, name)
    options: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if model is not None:
        options = model.model_json_schema(ref_template=f"#/$defs/{key}.{{model}}")
        for inner, definition in options.pop("$defs", {}).items():
            definitions[f"{key}.{inner}"] = definition
    own = options.get("properties", {})
    options["properties"] = {"use": {"enum": [name, AUTO], "description": "Name of the provider."}, **own}
    options["title"] = f"{role}: {name}"
    definitions[key] = options


def _selection(role: str, models: Mapping[str, type[BaseModel] | None]) -> list[dict[str, Any]]:
    """The short and the long form of a selection of one of ``models``."""
    names = list(models)
    references = {name: {"$ref": f"#/$defs/{_definition_name(role, name)}"} for name in names}
    chosen = [
        {"if": {"properties": {"use": {"const": name}}, "required": ["use"]}, "then": reference}
        for name, reference in references.items()
    ]
    is_auto = {"anyOf": [{"not": {"required": ["use"]}}, {"properties": {"use": {"const": AUTO}}}]}
    anyone = {"anyOf": list(references.values())} if references else {"maxProperties": 1}
    long = {
        "type": "object",
        "properties": {"use": {"enum": [AUTO, *names], "description": "Name of the provider."}},
        "allOf": [*chosen, {"if": is_auto, "then": anyone}],
    }
    return [{"enum": [AUTO, *names]}, long]


def _flat_property(
    definitions: dict[str, Any], providers: Providers, name: str, targets: list[tuple[str, str]]
) -> dict[str, Any]:
    """A top-level key for a flat argument: what any of the options it sets accepts."""
    accepted: list[Any] = []
    for role, option in targets:
        for provider in providers[role]:
            prop = definitions[_definition_name(role, provider)]["properties"].get(option)
            if prop is not None and name in prop.get("alias_of_flat", []) and prop not in accepted:
                accepted.append(prop)
    places = ", ".join(f"plugins.{role}.{option}" for role, option in targets)
    return {"description": f"Short for {places}.", "anyOf": accepted}

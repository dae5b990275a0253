"""``trivet config``: check a configuration before anything is loaded; the schema of configurations for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from trivet.launcher._tables import columns, heading
from trivet.launcher.errors import WRONG_INPUT, complain
from trivet.launcher.options import ConfigArgument, ConfiguredCommand, JsonOption, SetOption, read_config

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trivet.registry import Catalog, Registry, RoleReport
    from trivet_schemas.config import EngineConfig

config_app = typer.Typer(no_args_is_help=True, help="Check configurations, and print their schema.")


@config_app.command("check", cls=ConfiguredCommand)
def check(config: ConfigArgument, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a file and the plugins that it uses, and show what it comes to, without loading weights.

    Prints the provider of each role with its options and, where the model's configuration or header tells, the memory
    plan: weights, workspace, KV cache per token and per request, groups of layers, blocks, how many requests of the
    full length fit, and the total against what is free. Exit code 2 if the engine could not start like this; where
    memory is short, with the settings that would make it fit.
    """
    from trivet.registry import Registry

    settings = read_config(config, set_)
    registry = Registry(settings)
    try:
        registry.check_factories()
        plan = _memory(settings, registry)
        roles = registry.report()
    finally:
        registry.shutdown()
    if as_json:
        typer.echo(json.dumps(_as_json(settings, roles, plan), indent=2, ensure_ascii=False, default=str))
        _end(plan)
        return
    heading(f"{config}")
    columns([[name, _text(value)] for name, value in _settings(settings)])
    typer.echo()
    heading("Roles")
    columns([row for role in roles for row in _role_rows(role)])
    typer.echo()
    heading("Memory")
    columns([[name, text] for name, text in plan.rows()])
    typer.echo()
    _end(plan)
    typer.echo("no problems found")


@config_app.command("schema")
def schema() -> None:
    """Print the JSON Schema of the configuration file, with the options of every installed plugin.

    Save it and name it in the first line of a file: # yaml-language-server: $schema=trivet.schema.json
    """
    from trivet.registry import Catalog
    from trivet.registry.offers import EXTENSION
    from trivet.roles.base import CARDINALITY, Cardinality
    from trivet_schemas.schema import engine_json_schema

    catalog = Catalog()
    providers: dict[str, Any] = {role: {} for role in CARDINALITY} | catalog.option_models()
    providers[EXTENSION] = dict(_extensions(catalog))
    one = {Cardinality.ONE, Cardinality.OPTIONAL}
    many = [EXTENSION, *(role for role, cardinality in CARDINALITY.items() if cardinality not in one)]
    optional = [role for role, cardinality in CARDINALITY.items() if cardinality is Cardinality.OPTIONAL]
    typer.echo(json.dumps(engine_json_schema(providers, many, optional), indent=2, ensure_ascii=False))
    for plugin in catalog.plugins:
        for problem in plugin.problems:
            complain(f"left out: {problem}", kind="note")


def _extensions(catalog: Catalog) -> Iterator[tuple[str, type[BaseModel] | None]]:
    """Plugins that may stand under ``plugins.extension``, and their options."""
    from trivet.errors import PluginError
    from trivet.registry.imports import load_options_model

    for plugin in catalog.plugins:
        if plugin.problems or all(impl.hook in {"trivet_providers", "trivet_components"} for impl in plugin.hooks):
            continue
        try:
            declared = getattr(plugin.target, "trivet_options", None)
            yield plugin.name, load_options_model(declared, plugin, f"extension {plugin.name!r}")
        except PluginError as error:
            plugin.problems += error.problems


def _end(plan: Any) -> None:
    """Exit with what is wrong, if anything is."""
    for problem in plan.problems:
        complain(problem)
    if plan.problems:
        raise typer.Exit(WRONG_INPUT)


def _memory(config: EngineConfig, registry: Registry) -> Any:
    from trivet.launcher._memory import plan_memory

    return plan_memory(config, registry)


def _settings(config: EngineConfig) -> list[tuple[str, Any]]:
    values = config.model_dump(mode="json", exclude={"plugins", "generate", "serve"})
    return [(name, value) for name, value in values.items() if value is not None]


def _role_rows(role: RoleReport) -> Iterator[list[str]]:
    for chosen in role.chosen:
        options = ", ".join(f"{name}: {_text(value)}" for name, value in chosen.options.items())
        yield [role.role, chosen.provider, f"{chosen.why}{f' {{{options}}}' if options else ''}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _as_json(config: EngineConfig, roles: list[RoleReport], plan: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "source": config.source,
        "settings": dict(_settings(config)),
        "notes": list(config.notes),
        "roles": [asdict(role) for role in roles],
        "memory": asdict(plan),
    }

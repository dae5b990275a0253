"""``trivet plugins``: what is installed, what was chosen and why, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.launcher._tables import columns, heading
from trivet.launcher.errors import FAILED, WRONG_INPUT, complain
from trivet.launcher.options import JsonOption, OptionalConfig, SetOption, read_config
from trivet.launcher.scaffold import new_plugin

if TYPE_CHECKING:
    from trivet.registry import Catalog, PluginReport, Registry, RoleReport
    from trivet_schemas.config import EngineConfig

plugins_app = typer.Typer(no_args_is_help=True, help="Show, check and start plugins.")
plugins_app.command("new")(new_plugin)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A plugin or one of its providers.")]


@plugins_app.command("list")
def list_plugins(config: OptionalConfig = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """List the provider of each role and why it was chosen, then every plugin found.

    Without CONFIG, what a file that only names a model would get. Nothing is loaded. Exit code 2 if the plugins that
    CONFIG names cannot be used; all that are installed are listed then, too.
    """
    from trivet.errors import PluginError

    settings = _config(config, set_)
    try:
        registry = _registry(settings)
    except PluginError:
        if not as_json:
            _print_plugins(_installed())
        raise
    roles, plugins = registry.report(), registry.plugins()
    if as_json:
        _print_json({"roles": [asdict(role) for role in roles], "plugins": [asdict(plugin) for plugin in plugins]})
        return
    heading("Roles")
    columns([row for role in roles for row in role_rows(role)])
    typer.echo()
    _print_plugins(plugins)
    for plugin in plugins:
        for problem in plugin.problems:
            complain(problem, kind="note")


@plugins_app.command("show")
def show_plugin(
    name: NameArgument, config: OptionalConfig = None, set_: SetOption = None, as_json: JsonOption = False
) -> None:
    """Show a plugin: where it comes from, its providers with their options and capabilities, and its hooks.

    With CONFIG, the hooks of an active plugin show their place in the order of calls, and options their values.
    """
    from trivet.errors import PluginError
    from trivet.launcher._details import details, print_details
    from trivet_schemas.errors import unknown_name

    registry = _registry(_config(config, set_))
    plugins = registry.plugins()
    found = [plugin for plugin in plugins if plugin.name == name]
    found = found or [plugin for plugin in plugins if name in {provider for _, provider in plugin.providers}]
    if not found:
        names = {plugin.name for plugin in plugins} | {provider for p in plugins for _, provider in p.providers}
        raise PluginError(unknown_name("plugin", name, names))
    shown = [details(plugin, registry.report()) for plugin in found]
    if as_json:
        _print_json(shown)
        return
    for index, values in enumerate(shown):
        if index:
            typer.echo()
        print_details(values)


@plugins_app.command("check")
def check_plugins(config: OptionalConfig = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check every installed plugin, importing all that it offers, and report all problems.

    Exit code without CONFIG: 1 if anything installed has a problem. With CONFIG: 2 if the problem concerns a plugin
    that CONFIG uses; others are reported and do no harm. What needs an extra that is not installed is no problem until
    a CONFIG uses it.
    """
    from trivet.errors import PluginError
    from trivet.registry import Catalog, Registry

    used: list[str] = []
    if config is not None:
        settings = read_config(config, set_)
        try:
            Registry(settings).check_factories()
        except PluginError as error:
            used = error.problems
    catalog = Catalog()
    others = [problem for problem in catalog.check() if problem not in used]
    missing = _missing_extras(catalog)
    if as_json:
        _print_json({"plugins": len(catalog.plugins), "used": used, "installed": others, "missing": missing})
    else:
        for problem in used:
            complain(problem)
        for problem in others:
            complain(problem, kind="error" if config is None else "note")
        for text in missing:
            complain(text, kind="note")
        subject = f"{config}: its plugins" if config is not None else f"{len(catalog.plugins)} plugins"
        bad = used if config is not None else others
        typer.echo(f"{subject}: {_count(bad)}")
    raise typer.Exit(WRONG_INPUT if used else FAILED if others and config is None else 0)


def role_rows(role: RoleReport) -> Iterator[list[str]]:
    """Cells for a role: its name, each provider, where that comes from, and why it was chosen."""
    for chosen in role.chosen:
        origin = f"{chosen.distribution} {chosen.version}" if chosen.distribution else "object"
        yield [role.role, chosen.provider, origin, chosen.why]
    if not role.chosen:
        yield [role.role, "-", "", role.problem or "optional; none is named"]


def _config(path: Path | None, overrides: list[str] | None) -> EngineConfig:
    if path is not None:
        return read_config(path, overrides)
    if overrides:
        raise typer.BadParameter("needs a CONFIG whose values it overrides", param_hint="--set")
    from trivet_schemas.config import EngineConfig

    return EngineConfig(model="demo")


def _registry(config: EngineConfig) -> Registry:
    """The registry of a configuration; a role may lack its provider, which the report then says."""
    from trivet.registry import Registry

    return Registry(config, required=())


def _installed() -> list[PluginReport]:
    """What is installed, when no configuration says what of it is active."""
    from trivet.registry import Catalog
    from trivet.registry.reports import report_plugin

    return [report_plugin(plugin, [], {}) for plugin in Catalog().plugins]


def _print_plugins(plugins: Sequence[PluginReport]) -> None:
    heading("Plugins")
    columns([_plugin_row(plugin) for plugin in plugins])


def _missing_extras(catalog: Catalog) -> list[str]:
    """What cannot be used before an extra is installed."""
    from trivet.registry.imports import missing_requirements

    offers = [offer for plugin in catalog.plugins for offer in plugin.offers]
    return [f"{offer.label} {text}" for offer in offers for text in missing_requirements(offer)]


def _count(problems: Sequence[str]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}" if problems else "no problems"


def _plugin_row(plugin: PluginReport) -> list[str]:
    offers = [f"{role}: {name}" for role, name in plugin.providers]
    offers += [f"{kind}: {name}" for kind, name in plugin.components]
    offers += [f"{hook.kind} {hook.hook}" for hook in plugin.hooks if hook.kind != "provides"]
    state = "has problems" if plugin.problems else "active" if plugin.active else "inactive"
    return [plugin.name, f"{plugin.distribution} {plugin.version}", plugin.origin, state, ", ".join(offers)]


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))

"""What ``trivet plugins show`` tells about one plugin."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from trivet.launcher._tables import columns, heading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

    from trivet.registry import PluginReport, RoleReport
    from trivet.registry.records import Offer, Plugin


def details(report: PluginReport, roles: Sequence[RoleReport]) -> dict[str, Any]:
    """The report with its providers' options and capabilities; ``roles`` tells which of them were chosen."""
    from trivet.registry import EXTENSION, Catalog

    values: dict[str, Any] = asdict(report)
    plugin = next(
        (p for p in Catalog().plugins if (p.name, p.distribution) == (report.name, report.distribution)), None
    )
    if plugin is not None:
        chosen = {(role.role, one.provider) for role in roles for one in role.chosen if one.plugin == report.name}
        values["providers"] = [_provider(offer, chosen=(offer.role, offer.name) in chosen) for offer in plugin.offers]
        values["components"] = [asdict(component) for component in plugin.components]
        declared = getattr(plugin.target, "trivet_options", None)
        values[f"{EXTENSION}_options"] = option_rows(_model(plugin, declared))
    values["hooks"].sort(key=lambda hook: (hook["order"] is None, hook["order"] or 0))
    return values


def option_rows(model: type[BaseModel] | None) -> list[dict[str, Any]]:
    """Name, type, default and description of each option, as the JSON Schema has them."""
    if model is None:
        return []
    schema = model.model_json_schema()
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "type": _type_name(option),
            "required": name in required,
            "default": option.get("default"),
            "flat": option.get("alias_of_flat", []),
            "description": option.get("description", ""),
        }
        for name, option in schema.get("properties", {}).items()
    ]


def print_details(values: Mapping[str, Any]) -> None:
    """Print what :func:`details` made, for people."""
    heading(values["name"])
    columns(
        [
            ["distribution", f"{values['distribution']} {values['version']}"],
            ["origin", values["origin"]],
            ["state", "active" if values["active"] else "inactive"],
            ["entry point", values["entry_point"] or "-"],
            ["file", values["file"] or "-"],
        ]
    )
    for provider in values["providers"]:
        typer.echo()
        heading(f"{provider['role']}: {provider['name']}{' (chosen)' if provider['chosen'] else ''}")
        rows = [["summary", provider["summary"]], ["factory", provider["factory"]]]
        rows += [
            [f"needs {module}", f'extra "{extra}"' if extra else f"brought by {values['distribution']} itself"]
            for module, extra in provider["requires"].items()
        ]
        rows += [[f"can {name}", str(value)] for name, value in provider["capabilities"].items()]
        columns([row for row in rows if row[1]])
        _print_options("options", provider["options"])
    _print_options("extension options", values.get("extension_options", []))
    if values["components"]:
        typer.echo()
        heading("components")
        columns([[part["kind"], part["name"], part["summary"] or part["factory"]] for part in values["components"]])
    if values["hooks"]:
        typer.echo()
        heading("hooks, in the order of calls")
        columns([[_order(hook), hook["hook"], hook["kind"], hook["place"]] for hook in values["hooks"]])
    if values["problems"]:
        typer.echo()
        heading("problems")
        columns([[problem] for problem in values["problems"]])


def _provider(offer: Offer, *, chosen: bool) -> dict[str, Any]:
    descriptor = offer.provider
    assert descriptor is not None  # only an embedder's objects have none
    return {
        "role": offer.role,
        "name": offer.name,
        "chosen": chosen,
        "summary": descriptor.summary,
        "factory": descriptor.factory,
        "requires": dict(descriptor.requires),
        "capabilities": dict(descriptor.capabilities),
        "options": option_rows(_model(offer.plugin, descriptor.options)),
    }


def _model(plugin: Plugin, declared: Any) -> type[BaseModel] | None:
    from trivet.registry.imports import load_options_model

    return load_options_model(declared, plugin, plugin.name)


def _print_options(title: str, options: Sequence[Mapping[str, Any]]) -> None:
    if not options:
        return
    typer.echo(f"  {title}:")
    rows = []
    for option in options:
        default = "required" if option["required"] else f"= {_yaml(option['default'])}"
        flat = f" (also {', '.join(option['flat'])})" if option["flat"] else ""
        rows.append([option["name"], option["type"], default, " ".join(option["description"].split()) + flat])
    columns(rows, indent="    ")


def _order(hook: Mapping[str, Any]) -> str:
    return "-" if hook["order"] is None else f"{hook['order']}."


def _yaml(value: Any) -> str:
    """A default as it would stand in the file."""
    import json

    return json.dumps(value, ensure_ascii=False)


def _type_name(option: Mapping[str, Any]) -> str:
    """A short name for what a JSON Schema accepts."""
    if "const" in option:
        return _yaml(option["const"])
    if "enum" in option:
        return "|".join(str(value) for value in option["enum"])
    if "anyOf" in option:
        return "|".join(dict.fromkeys(_type_name(one) for one in option["anyOf"]))
    if "$ref" in option:
        return str(option["$ref"]).rpartition("/")[2]
    kind = str(option.get("type", "any"))
    if kind == "array":
        return f"list[{_type_name(option.get('items', {}))}]"
    return kind

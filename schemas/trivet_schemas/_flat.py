"""Spread flat arguments (``max_num_seqs=8`` at the top level) over the options of the plugins that declare them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trivet_schemas.errors import Problem, join_path, show, unknown_name


@dataclass(slots=True)
class Spread:
    """The outcome: ``values`` without flat arguments, the problems, and option path → the flat name it came from."""

    values: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


def distribute_flat(
    values: Mapping[str, Any],
    known_flat: Mapping[str, list[tuple[str, str]]],
    fields: Iterable[str],
    settled: Collection[tuple[str, str]] = (),
) -> Spread:
    """Move every flat argument of ``values`` into ``plugins``; ``values`` itself is not changed.

    Args:
        values: Top-level keys and values.
        known_flat: Flat name → the ``(role, option)`` pairs it sets.
        fields: The top-level keys that are no flat arguments.
        settled: ``(role, option)`` pairs that the command line has decided on: what flat arguments say of them is
            passed over.
    """
    fields = list(fields)
    spread = Spread({key: value for key, value in values.items() if key in fields})
    flats = {key: value for key, value in values.items() if key in known_flat and key not in fields}
    for key in values:
        if key not in fields and key not in flats:
            spread.problems.append(Problem(str(key), unknown_name("key", key, [*fields, *known_flat])))
    plugins = spread.values.get("plugins", {})
    if not flats or not isinstance(plugins, Mapping):
        return spread  # a section of the wrong shape is reported when it is validated
    plugins = dict(plugins)
    for name, value in flats.items():
        for role, option in known_flat[name]:
            if (role, option) in settled:
                continue
            _set_option(spread, plugins, role, option, name, value)
    spread.values["plugins"] = plugins
    return spread


def _set_option(spread: Spread, plugins: dict[str, Any], role: str, option: str, name: str, value: Any) -> None:
    given = plugins.get(role, {})
    path = join_path("plugins", role)
    if isinstance(given, list | tuple):
        if len(given) != 1:
            message = f"sets {path}.*.{option}, and {path} lists {len(given)} plugins; set the option of one of them"
            spread.problems.append(Problem(name, message))
            return
        path = join_path(path, 0)
    section = long_form(given[0] if isinstance(given, list | tuple) else given)
    if section is None:
        return
    if option in section:
        message = f"is given twice, as {name}={show(value)} and as {path}.{option}={show(section[option])}; keep one"
        spread.problems.append(Problem(name, message))
        return
    if option == "use" and value is None:
        return  # no provider is chosen, as if the argument were left out
    section[option] = value
    plugins[role] = [section] if isinstance(given, list | tuple) else section
    spread.origins[join_path(path, option)] = name


def long_form(selection: Any) -> dict[str, Any] | None:
    """A new mapping with ``use`` and the options; None if ``selection`` has the wrong shape for one."""
    if isinstance(selection, str):
        return {"use": selection}
    if isinstance(selection, Mapping):
        return dict(selection)
    if hasattr(selection, "to_file_form"):
        form: dict[str, Any] = selection.to_file_form()
        return form
    return None

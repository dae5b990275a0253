"""Apply ``--set path.to.key=value`` to the raw values of a configuration file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trivet_schemas._flat import long_form
from trivet_schemas._yaml import read_yaml
from trivet_schemas.errors import Problem, join_path, show

_LISTS = {("generate", "prompts")}
"""Lists that an index may begin; under ``plugins`` every role may hold one."""


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed ``--set``: its text, the parts of its path and the value."""

    text: str
    parts: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        """The dotted path."""
        return ".".join(self.parts)

    @property
    def selects_plugin(self) -> bool:
        """Whether it says which plugin a role uses: ``plugins.ROLE``, ``plugins.ROLE.use``, ``plugins.ROLE.0.use``."""
        if self.parts[0] != "plugins" or len(self.parts) < 2:
            return False
        rest = self.parts[2:]
        return rest[1 if rest and rest[0].isdecimal() else 0 :] in {(), ("use",)}

    @property
    def clears_role(self) -> bool:
        """Whether it takes back what the file chooses for a role: ``plugins.ROLE=null``, ``plugins.ROLE.use=null``."""
        return self.value is None and self.selects_plugin and self.parts[2:] in {(), ("use",)}

    def settles(self) -> set[tuple[str, str]]:
        """``(role, option)`` pairs that it decides on, if it selects a plugin."""
        if not self.selects_plugin:
            return set()
        value = self.value[0] if isinstance(self.value, list) and len(self.value) == 1 else self.value
        options = value if isinstance(value, Mapping) and self.parts[-1] != "use" else ("use",)
        return {(self.parts[1], str(option)) for option in options}


def parse_overrides(texts: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    """Parse ``path=value`` texts; values are YAML, so that ``false`` is a boolean and ``[a, b]`` a list."""
    overrides: list[Override] = []
    problems: list[Problem] = []
    for text in texts:
        path, equals, value = text.partition("=")
        parts = tuple(part.strip() for part in path.split("."))
        if not equals or not all(parts):
            message = "must look like path.to.key=value, for example plugins.scheduler.use=static"
            problems.append(Problem("", message, override=text))
            continue
        document = read_yaml(value)
        if document.problems:
            first = document.problems[0].message.partition("\n")[0]
            message = f"the value {show(value)} is {first}; text with special characters needs quotes"
            problems.append(Problem(".".join(parts), message, override=text))
        else:
            overrides.append(Override(text, parts, document.value))
    return overrides, problems


def spread_overrides(overrides: Iterable[Override], known_flat: Mapping[str, list[tuple[str, str]]]) -> list[Override]:
    """Replace an override of a flat argument by one for each option that it sets."""
    result: list[Override] = []
    for override in overrides:
        targets = known_flat.get(override.parts[0]) if len(override.parts) == 1 else None
        if targets is None:
            result.append(override)
        else:
            result += [Override(override.text, ("plugins", role, option), override.value) for role, option in targets]
    return result


def apply_override(values: dict[str, Any], override: Override) -> str | None:
    """Set one value in ``values``, making the sections on its way; if that fails, nothing has changed.

    A role that gets another plugin loses the options of the former one, which would not be valid for it.

    Returns:
        A note for the user if options were dropped.

    Raises:
        LookupError: With a message, if the path leads into a value that is no section, or past the end of a list.
    """
    trial = copy.deepcopy(values)
    note = _apply_in_place(trial, override)
    values.clear()
    values.update(trial)
    return note


def _apply_in_place(values: dict[str, Any], override: Override) -> str | None:
    here: Any = values
    parts = override.parts
    if override.clears_role:
        plugins = values.get("plugins")
        if isinstance(plugins, dict):
            plugins.pop(parts[1], None)
        return None
    for depth, part in enumerate(parts[:-1]):
        path = parts[: depth + 1]
        child = _get(here, part, path)
        if len(path) == 2 and path[0] == "plugins":
            child = _as_role(child, parts[depth + 1])
        elif len(path) == 3 and path[0] == "plugins" and isinstance(here, list):
            child = {} if child is None else long_form(child) or child
        elif child is None:
            child = [] if path in _LISTS and parts[depth + 1].isdecimal() else {}
        _put(here, part, child, path)
        here = child
    note = _change_plugin(here, override) if override.selects_plugin else None
    _put(here, parts[-1], override.value, parts)
    return note


def _as_role(given: Any, next_part: str) -> Any:
    """The value of a role in the form that the rest of a path needs: a list for an index, else the long form."""
    if next_part.isdecimal():
        return given if isinstance(given, list) else [] if given is None else [given]
    if given is None:
        return {}
    return long_form(given) or given


def _change_plugin(section: Any, override: Override) -> str | None:
    """Empty a selection whose ``use`` changes; returns the note. The caller sets the new value."""
    is_use = override.parts[-1] == "use" and len(override.parts) > 2
    if is_use:
        old = section if isinstance(section, dict) else None
    else:
        old = long_form(_get(section, override.parts[-1], override.parts))
    if not old:
        return None
    former = old.get("use", "auto")
    if is_use and former == override.value:
        return None
    new = {} if is_use else long_form(override.value) or {}
    dropped = sorted(key for key in old if key != "use" and key not in new)
    if is_use:
        section.clear()
    if not dropped:
        return None
    role = join_path(*(part for part in override.parts if part != "use"))
    return f"{role}: --set {override.text} drops the options of {show(former)}: {', '.join(dropped)}"


def _get(here: Any, part: str, path: tuple[str, ...]) -> Any:
    if isinstance(here, dict):
        return here.get(part)
    _check_section(here, part, path)
    index = int(part)
    return here[index] if index < len(here) else None


def _put(here: Any, part: str, value: Any, path: tuple[str, ...]) -> None:
    if isinstance(here, dict):
        here[part] = value
        return
    _check_section(here, part, path)
    index = int(part)
    if index < len(here):
        here[index] = value
    else:
        here.append(value)


def _check_section(here: Any, part: str, path: tuple[str, ...]) -> None:
    above = ".".join(path[:-1])
    if not isinstance(here, list):
        raise LookupError(  # noqa: TRY004  the user's path is wrong, not the type of an argument
            f"{above} is {show(here)}, not a section, so that {part!r} cannot be set in it"
        )
    if not part.isdecimal():
        raise LookupError(f"{above} is a list, so that the next part must be an index, not {part!r}")
    if int(part) > len(here):
        raise LookupError(f"{above} has {len(here)} entries; the next index is {len(here)}, got {part}")

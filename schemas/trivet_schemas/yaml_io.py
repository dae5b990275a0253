"""Load a configuration file, with overrides from the command line; every error names file, line and path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trivet_schemas._flat import distribute_flat
from trivet_schemas._overrides import Override, apply_override, parse_overrides, spread_overrides
from trivet_schemas._yaml import Document, read_yaml
from trivet_schemas.config import EngineConfig, nearest_place
from trivet_schemas.errors import ConfigError, Place, Problem, show, suggestion
from trivet_schemas.options import KnownFlat


def load_config_file(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    known_flat: KnownFlat | Callable[[Mapping[str, Any]], KnownFlat] | None = None,
) -> EngineConfig:
    """Read a YAML file into an :class:`EngineConfig`.

    Args:
        path: The file.
        overrides: ``path.to.key=value`` texts, as ``--set`` takes them. The value is YAML; a part of the path may be an
            index. Those that select a plugin (``plugins.scheduler.use=static``) come first, whatever their order, and
            drop the options that the file gives to the plugin before (see ``EngineConfig.notes``); ``null`` takes the
            choice back. Among the others the last wins. An override always wins over the file, whether either of them
            gives an option as a flat argument or under ``plugins``.
        known_flat: The flat arguments that the installed plugins declare
            (:func:`trivet_schemas.options.collect_flat_names`); file and overrides may use them at the top level.
            A function is given the ``plugins`` section, since only active plugins' arguments count.

    Raises:
        ConfigError: If the file cannot be read, is no YAML, repeats a key, or holds anything that the configuration
            refuses; with every problem, its path and its line.
    """
    path = Path(path)
    return _build(_read(path), list(overrides), known_flat or {}, str(path))


def config_from_overrides(
    overrides: Iterable[str], known_flat: KnownFlat | Callable[[Mapping[str, Any]], KnownFlat] | None = None
) -> EngineConfig:
    """Make a configuration from ``--set`` texts alone, like :func:`load_config_file` without a file."""
    return _build(Document({}), list(overrides), known_flat or {}, None)


def _read(path: Path) -> Document:
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no such file{_near_file(path)}", source) from None
    except IsADirectoryError:
        raise ConfigError(f"is a directory; name a YAML file{_files_in(path)}", source) from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"is not UTF-8 text (byte {exc.start}: {exc.reason})", source) from None
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror or exc}", source) from None
    document = read_yaml(text)
    if document.problems:
        raise ConfigError(document.problems, source)
    if document.value is None:
        raise ConfigError("is empty; it needs at least a line like 'model: demo'", source)
    if not isinstance(document.value, dict):
        message = f"must hold keys and values like 'model: demo', got {show(document.value)}"
        raise ConfigError(Problem("", message, 1), source)
    return document


def _near_file(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = suggestion(path.name, names)
    return f"; did you mean {str(path.with_name(near))!r}?" if near else ""


def _files_in(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix in {".yaml", ".yml"})
    return f", such as {str(path / names[0])!r}" if names else ""


def _build(
    document: Document, texts: list[str], flat: KnownFlat | Callable[[Mapping[str, Any]], KnownFlat], source: str | None
) -> EngineConfig:
    overrides, problems = parse_overrides(texts)
    places = {path: Place(line=line) for path, line in document.lines.items()}
    values: dict[str, Any] = document.value
    notes: list[str] = []

    def known() -> KnownFlat:
        section = values.get("plugins")
        return flat(section if isinstance(section, dict) else {}) if callable(flat) else flat

    # Choices of a plugin come first, also those by a flat argument (quantization=int8): which others there are depends
    # on them, and they drop the options of the plugin that they replace.
    choices = [o for o in spread_overrides(overrides, known() if overrides else {}) if o.selects_plugin]
    _apply(choices, values, places, notes, problems)
    known_flat = known()
    rest = [o for o in spread_overrides(overrides, known_flat) if not o.selects_plugin]
    # An override wins over a flat argument of the file; left in, the two would count as one option given twice.
    settled = {pair for choice in choices for pair in choice.settles()}
    spread = distribute_flat(values, known_flat, EngineConfig.model_fields, settled)
    _inherit_places(places, spread.origins)
    _apply(rest, spread.values, places, notes, problems)
    final = distribute_flat(spread.values, known_flat, EngineConfig.model_fields)
    _inherit_places(places, final.origins)

    problems += [*spread.problems, *final.problems]
    try:
        config = EngineConfig._with_problems(final.values, problems)
    except ConfigError as exc:
        located = [problem.at(nearest_place(places, problem.path)) for problem in exc.problems]
        raise ConfigError(located, source) from None
    config._source, config._places, config._notes = source, places, tuple(notes)
    return config


def _apply(
    overrides: list[Override],
    values: dict[str, Any],
    places: dict[str, Place],
    notes: list[str],
    problems: list[Problem],
) -> None:
    for override in overrides:
        try:
            note = apply_override(values, override)
        except LookupError as exc:
            problems.append(Problem(override.path, str(exc.args[0]), override=override.text))
            continue
        replaced = override.path
        if note is not None:
            notes.append(note)
            replaced = replaced.removesuffix(".use")
        for known in [path for path in places if path.startswith(f"{replaced}.")]:
            del places[known]
        places[override.path] = Place(override=override.text)
        for depth in range(1, len(override.parts)):  # sections that the override has made
            places.setdefault(".".join(override.parts[:depth]), Place(override=override.text))


def _inherit_places(places: dict[str, Place], origins: dict[str, str]) -> None:
    for path, name in origins.items():
        places[path] = nearest_place(places, name)

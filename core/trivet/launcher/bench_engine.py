"""The engine of a benchmark: a file, ``--set``, and the flat arguments of engines as flags with vLLM's names. Other
arguments of vLLM's are accepted where they change nothing, see :mod:`trivet.launcher.bench_vllm`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, get_args

import typer

from trivet.launcher import bench_vllm
from trivet.launcher.errors import complain
from trivet.launcher.options import flat_keys

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.options import KnownFlat

# Keys whose values are text, whatever they look like.
_TEXTS = {"tokenizer", "revision", "dtype", "device", "chat_template", "served_model_name"}


def engine_config(
    context: typer.Context, model: str | None, overrides: Sequence[str] | None, seed: int | None
) -> EngineConfig:
    """The configuration that the command line describes; its notes go to stderr.

    Args:
        context: Its ``args`` are what the command's own options left: a file, and flags.
        model: Given with ``--model``.
        overrides: Given with ``--set``.
        seed: Given with ``--seed``.

    Raises:
        typer.BadParameter: For a flag that nothing knows, and where no model is named.
        trivet_schemas.errors.ConfigError: With every problem of the configuration.
    """
    texts = list(overrides or ())
    if model is not None:
        texts.insert(0, f"model={json.dumps(model)}")
    if seed is not None:
        texts.append(f"seed={seed}")
    flags, words = _split(context.args, _switches())
    if len(words) > 1:
        raise typer.BadParameter(f"one configuration file is taken, got {' and '.join(words)}", param_hint="CONFIG")
    path = Path(words[0]) if words else None
    known = flat_keys() - {"model"}  # which is an option of every benchmark
    is_named = path is not None or model is not None
    if any(name not in known for name, _ in flags):
        known |= _selected_keys(path, texts if is_named else [*texts, "model=demo"])
    texts += _overrides(flags, known, _own_options(context))
    if not is_named:  # after the flags, one of which may be --model, misspelt
        raise typer.BadParameter("name a model, or give a configuration file", param_hint="--model")
    config = _load(path, texts)
    for note in config.notes:
        complain(note, kind="note")
    return config


def _load(path: Path | None, overrides: Sequence[str]) -> EngineConfig:
    from trivet.registry import known_flat_names
    from trivet_schemas.yaml_io import config_from_overrides, load_config_file

    def known(section: Mapping[str, object]) -> KnownFlat:
        return known_flat_names((), section)

    return config_from_overrides(overrides, known) if path is None else load_config_file(path, overrides, known)


def _switches() -> set[str]:
    """Names of the arguments that are true or false, so that no value follows their flag."""
    from trivet.registry import Catalog, known_flat_names
    from trivet_schemas.config import EngineConfig

    models = Catalog().option_models()
    found = set(bench_vllm.SWITCHES)
    found |= {name for name, field in EngineConfig.model_fields.items() if _is_switch(field.annotation)}
    for name, targets in known_flat_names().items():
        for role, option in targets:
            fields = [model.model_fields.get(option) for model in models.get(role, {}).values() if model is not None]
            if any(field is not None and _is_switch(field.annotation) for field in fields):
                found.add(name)
    return found


def _is_switch(annotation: object) -> bool:
    return set(get_args(annotation) or (annotation,)) - {NoneType} == {bool}


def _split(tokens: Sequence[str], switches: set[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Flags as ``(name, value)``, the value None where there is none; and the words that belong to no flag."""
    flags: list[tuple[str, str | None]] = []
    words: list[str] = []
    rest = list(reversed(tokens))
    while rest:
        token = rest.pop()
        if not token.startswith("-"):
            words.append(token)
            continue
        if bench_vllm.full_name(token[1:]) != token[1:]:
            token = f"--{bench_vllm.full_name(token[1:])}"
        if not token.startswith("--"):
            raise typer.BadParameter(f"unknown option {token!r}: engine arguments begin with two hyphens")
        name, equals, text = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        value: str | None = text if equals else None
        if value is None and name in switches:
            value = "true"
        elif value is None and name.removeprefix("no_") in switches:
            name, value = name.removeprefix("no_"), "false"
        elif value is None and rest and not rest[-1].startswith("--"):
            value = rest.pop()
        flags.append((name, value))
    return flags, words


def _selected_keys(path: Path | None, overrides: Sequence[str]) -> set[str]:
    """What other distributions' plugins declare too, once the configuration selects them."""
    from trivet.registry import known_flat_names

    return set(known_flat_names((), _load(path, overrides).plugins))


def _own_options(context: typer.Context) -> list[str]:
    return [option for parameter in context.command.params for option in parameter.opts if option.startswith("--")]


def _overrides(flags: Sequence[tuple[str, str | None]], known: set[str], own_options: Sequence[str]) -> Iterator[str]:
    """The flags as texts of ``--set``; without those of vLLM's that ask for what happens anyway."""
    from trivet_schemas.errors import unknown_name

    for name, value in flags:
        flag = f"--{name.replace('_', '-')}"
        if name not in known and bench_vllm.is_known(name):
            problem = bench_vllm.problem(name, value)
            if problem is not None:
                raise typer.BadParameter(problem, param_hint=flag)
            continue
        if name not in known:
            names = [*own_options, *(f"--{each.replace('_', '-')}" for each in known)]
            raise typer.BadParameter(unknown_name("option", flag, names))
        if value is None:
            raise typer.BadParameter("needs a value", param_hint=flag)
        yield f"{name}={json.dumps(value) if name in _TEXTS else value}"

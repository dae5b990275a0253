"""What several commands share: their arguments, and reading the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from trivet.launcher.errors import complain

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig

# What tells of wrong usage has no public name in every version of typer.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
_SECTIONS = {"plugins", "watchdog", "generate", "serve"}

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
OptionalConfig = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML file; without it, the defaults.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the file, as in plugins.scheduler.use=static; may be repeated.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(slots=True)
class Settings:
    """Options of the whole command line; the context's ``obj``."""

    debug: bool = False


class ConfiguredCommand(TyperCommand):
    """A command with ``--set``. Where an option that it lacks is called like a key of the configuration, or nearly, the
    message says how to set that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except CommandLineError as error:
            if hasattr(error, "possibilities") and (key := _meant_key(self, error)) is not None:
                error.message += f"; did you mean --set {key}=VALUE?"  # type: ignore[attr-defined]
                error.possibilities = None
            raise


def _meant_key(command: TyperCommand, error: Any) -> str | None:
    """The key that the unknown option of ``error`` most likely means, None if an option of ``command`` is nearer."""
    from trivet_schemas.errors import suggestion

    keys = flat_keys()
    own = {option.removeprefix("--") for parameter in command.params for option in parameter.opts}
    near = suggestion(error.option_name.removeprefix("--"), keys | own)
    return None if near in own or not error.option_name.startswith("--") else near


def flat_keys() -> set[str]:
    """Keys at the top of a configuration that take a value on a command line; of plugins, the bundled ones'."""
    from trivet.registry import known_flat_names
    from trivet_schemas.config import EngineConfig

    return {*EngineConfig.model_fields, *known_flat_names()} - _SECTIONS


def read_config(path: Path, overrides: list[str] | None) -> EngineConfig:
    """The configuration, with what was overridden; its notes go to stderr.

    Raises:
        trivet_schemas.errors.ConfigError: With every problem, its line and its path.
    """
    from trivet.registry import known_flat_names
    from trivet_schemas.yaml_io import load_config_file

    config = load_config_file(path, overrides or (), lambda section: known_flat_names((), section))
    for note in config.notes:
        complain(note, kind="note")
    return config

"""What several commands share: their arguments, and reading the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.launcher.errors import complain

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig

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

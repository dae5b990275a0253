"""The commands together, and what surrounds each of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trivet.launcher.bench import bench_app
from trivet.launcher.chat import chat
from trivet.launcher.config import config_app
from trivet.launcher.errors import exit_code, set_up_logging
from trivet.launcher.explain import explain
from trivet.launcher.generate import generate
from trivet.launcher.options import CommandLineError, ConfiguredCommand, Settings
from trivet.launcher.plugins import plugins_app


class _Group(TyperGroup):
    """Turns the errors of commands into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a reader that went away is noticed here, not as the interpreter ends
        except (typer.Exit, typer.Abort, CommandLineError):
            raise  # the command line itself: typer reports it
        except BaseException as error:  # noqa: BLE001  # reported, with its traceback if nobody expected it
            raise typer.Exit(exit_code(error, debug=ctx.obj.debug)) from None
        return result


app = typer.Typer(
    cls=_Group,
    help="Trivet: LLM inference from one YAML file, with a plugin for every role.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, chat, explain):
    app.command(cls=ConfiguredCommand)(_command)
app.add_typer(plugins_app, name="plugins")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        from trivet._version import __version__

        typer.echo(f"trivet {__version__}")
        raise typer.Exit


def _set_debug(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.obj.debug = True
        set_up_logging(debug=True)


@app.callback()
def _root(
    version: Annotated[  # the callbacks do the work
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the log.", callback=_set_debug)] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """See :func:`trivet.launcher.main`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Whatever a model writes must be printable, on a terminal of any encoding.
            stream.reconfigure(errors="backslashreplace")
    set_up_logging()
    command = typer.main.get_command(app)
    debug = next(parameter for parameter in command.params if parameter.name == "debug")
    _accept_everywhere(command, debug)
    try:
        command.main(None if arguments is None else list(arguments), prog_name="trivet", obj=Settings())
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _accept_everywhere(command: Any, option: Any) -> None:
    """Let an option of the whole command line also stand after the name of any command."""
    for child in getattr(command, "commands", {}).values():
        own = copy.copy(option)
        own.expose_value = False  # the commands' functions do not take it
        child.params.append(own)
        _accept_everywhere(child, option)

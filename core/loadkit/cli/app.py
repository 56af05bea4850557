"""The ``loadkit`` command: a table of commands, each imported when it is run, and the way out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from loadkit.cli.failures import fail, interrupted
from loadkit.cli.output import Output
from loadkit.cli.streams import drop_stdout, logs_to_stderr, prepare_streams
from loadkit.errors import ConflictError, PluginError
from loadkit.text import nearest, printable

__all__ = ["COMMANDS", "cli", "run"]

# name -> (module with a click command named ``command``, its line in --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("loadkit.cli.plan", "Say what a load would do, from headers alone."),
    "load": ("loadkit.cli.load", "Load a model and report what it took."),
    "generate": ("loadkit.cli.generate", "Continue a prompt, the likeliest token each time."),
    "inspect": ("loadkit.cli.inspect", "List a checkpoint's files and tensors; needs no model."),
    "convert": ("loadkit.cli.convert", "Write a checkpoint, in any format, as another one."),
    "diff": ("loadkit.cli.diff", "Compare two checkpoints, tensor by tensor."),
    "verify": ("loadkit.cli.verify", "Check that a checkpoint's files are what they should be."),
    "bench": ("loadkit.cli.bench", "Measure loads against what this machine can do."),
    "formats": ("loadkit.cli.formats", "List load formats and the distributions they come from."),
    "models": ("loadkit.cli.models", "List the model architectures that are installed."),
    "plugins": ("loadkit.cli.plugins", "List what is plugged in, the broken too."),
}
BROKEN_PIPE = 3


class CommandTable(click.Group):
    """Commands by name: the table above, then, on a miss, what the plugins' hooks add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return import_command(cmd_name, COMMANDS[cmd_name][0])
        target = plugin_commands().get(cmd_name)
        return None if target is None else import_command(cmd_name, target)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            near = nearest(args[0], [*COMMANDS, *plugin_commands()])
            message = f"no command '{printable(args[0])}'"
            message += f"; did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(message, ctx) from None
        if isinstance(ctx.obj, Output) and name is not None:
            ctx.obj.command = name
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def import_command(name: str, target: str) -> click.Command:
    """The click command at ``module:attribute``, or the one called ``command`` of a module.

    Raises:
        PluginError: it cannot be imported, or is no click command.
    """
    module, _, attribute = target.partition(":")
    what = f"command '{printable(name)}' ({printable(target)})"
    try:
        found = getattr(import_module(module), attribute or "command")
    except (Exception, SystemExit) as error:  # whatever a plugin's import may raise
        raise PluginError(f"{what} cannot be imported") from error
    if not isinstance(found, click.Command):
        raise PluginError(f"{what} is no click command but {type(found).__name__}")
    return found


def plugin_commands() -> dict[str, str]:
    """What the plugins' hooks add, name -> ``module:attribute``. This imports the hook plugins.

    Raises:
        ConflictError: two plugins add a command of one name.
    """
    from loadkit import plugins

    found: dict[str, str] = {}
    for commands in plugins.call("register_commands"):
        for name, target in commands.items():
            if found.setdefault(name, target) != target:
                raise ConflictError(
                    f"command '{printable(name)}' is added by two plugins: "
                    f"{printable(found[name])} and {printable(target)}",
                    hint="name the distribution of one in LOADKIT_DISABLE_PLUGINS",
                )
    return found


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"loadkit {version('loadkit-core')}")
        ctx.exit()


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 good, 1 the checkpoint or model is at fault, 2 usage, "
    "3 I/O or network, 130 interrupted.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Turn a checkpoint, in any format, from any place, into a ready, sharded torch module.

    Say before a weight is read whether that will work, and what it will take. Plugins may add
    commands to those below.
    """


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and lets no exception out."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    out = Output(as_json="--json" in args, debug="--debug" in args)
    prepare_streams()
    try:
        code = _run(args, out)
        sys.stdout.flush()
        return code
    except OSError as error:  # stdout's reader left, or its disk is full
        drop_stdout()
        return BROKEN_PIPE if isinstance(error, BrokenPipeError) else fail(out, error)


def _run(args: list[str], out: Output) -> int:
    with logs_to_stderr(debug=out.debug):
        try:
            with cli.make_context("loadkit", args, obj=out) as context:
                code = cli.invoke(context)
            return code if isinstance(code, int) else 0
        except click.exceptions.Exit as done:
            return done.exit_code
        except (KeyboardInterrupt, click.Abort):
            return interrupted(out)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - the last stop: lines and an exit code
            return fail(out, error)

"""The commands and their help."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from overspill import __version__
from overspill.cli.bench import bench
from overspill.cli.errors import MEANINGS, carried_out
from overspill.cli.inspect import inspect
from overspill.cli.output import Output
from overspill.cli.plan import plan
from overspill.cli.run import run
from overspill.cli.save import save

_EXIT_CODES = "  \n".join(f"[bold]{code.value:>3}[/bold]  {meaning}" for code, meaning in MEANINGS.items())
_HELP = """
Run PyTorch models that are larger than the GPU: weights rest in GPU memory, in CPU memory or on disk, within a budget.

Look at a checkpoint, see what a budget means for it, and run it:

  overspill inspect ./model
  overspill plan ./model --max-memory 0=10GiB,cpu=30GiB
  overspill run ./model --max-memory 0=10GiB,cpu=30GiB --prompt "Hello"

A budget is DEVICE=SIZE, … with devices 0, 1, … and cpu. What does not fit is read from disk while the model runs.
Results go to stdout, as JSON with --json; everything else goes to stderr.
"""


class Commands(TyperGroup):
    """The commands, all ending in the same way."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:
        """Run one of them, and exit."""
        output = Output()
        # A guess, for a command line that cannot be understood; else the command's own option has the last word.
        output.as_json = "--json" in (sys.argv[1:] if args is None else args)
        kwargs.update(standalone_mode=False, obj=output)
        run_command = super().main
        sys.exit(carried_out(lambda: run_command(args, *others, **kwargs), output))


app = typer.Typer(
    cls=Commands,
    help=_HELP,
    epilog=f"Exit codes:\n\n{_EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overspill {__version__}")
        raise typer.Exit


@app.callback()
def _everything(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_version),
) -> None:
    pass


for _command in (plan, run, inspect, save, bench):
    app.command()(_command)

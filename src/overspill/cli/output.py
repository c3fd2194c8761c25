"""What a command says: its result on stdout, as text or as JSON, and everything else on stderr."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_FILE = 200  # columns where no terminal says how many there are


class Output:
    """One command's, with the options that all commands share."""

    def __init__(self) -> None:
        self.as_json = False
        self.debug = False

    def result(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """The answer: `document` for machines, or `shown` for people."""
        if self.as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console.width = _WIDTH_OF_A_FILE
        for part in shown:
            with console.capture() as printed:
                console.print(part, soft_wrap=isinstance(part, str))
            # Rich fills lines up with spaces, which would be in everybody's files.
            typer.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))

    def note(self, text: str) -> None:
        """Something beside the answer."""
        typer.echo(text, err=True)

    def failure(self, error: BaseException, message: str) -> None:
        """Why there is no answer."""
        if self.as_json:
            typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}, indent=2))
        typer.echo(f"overspill: {message}", err=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """Columns without lines, those named in `right` aligned there."""
    columns = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        columns.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for row in rows:
        columns.add_row(*(Text(cell) for cell in row))
    return columns


def printable(name: str) -> str:
    """`name` with whatever a terminal would obey instead of show escaped: a checkpoint's names are anybody's."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()

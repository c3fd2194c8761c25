"""What a command says: its result on stdout, as text or as JSON, and everything else on stderr."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text


class Output:
    """One command's, with the options that all commands share."""

    def __init__(self) -> None:
        self.as_json = False
        self.debug = False

    def result(self, document: dict[str, Any], *shown: str | Text) -> None:
        """The answer: `document` for machines, or `shown` for people."""
        if self.as_json:
            typer.echo(json.dumps(document, indent=2))
            return
        console = Console(highlight=False, markup=False, emoji=False)
        for part in shown:
            console.print(part, soft_wrap=True)  # a line is a line, for whoever cuts or greps it

    def note(self, text: str) -> None:
        """Something beside the answer."""
        typer.echo(text, err=True)

    def failure(self, error: BaseException, message: str) -> None:
        """Why there is no answer."""
        if self.as_json:
            typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}, indent=2))
        typer.echo(f"overspill: {message}", err=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Text:
    """Columns without lines, those named in `right` aligned there. Rich's own tables take seconds for 5,000 rows."""
    cells = [list(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ).rstrip()
        for line in cells
    ]
    return Text.assemble((lines[0], "bold"), *(f"\n{line}" for line in lines[1:]))


def printable(name: str) -> str:
    """`name` with whatever a terminal would obey instead of show escaped: a checkpoint's names are anybody's."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()

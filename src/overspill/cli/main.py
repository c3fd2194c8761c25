"""The way in: says what to install where the command line's own libraries are missing."""

import sys


def main() -> None:
    """Run the command line with the arguments of this process, and exit."""
    try:
        from overspill.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"overspill: the command line needs {missing}. Install it: pip install 'overspill[cli]'")
    for stream in (sys.stdout, sys.stderr):
        # A file name that is no text, or a terminal without Unicode, is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # both are text streams here
    app(prog_name="overspill")

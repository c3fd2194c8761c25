"""The command line: one file a command. Typer and rich are imported below main.py only."""

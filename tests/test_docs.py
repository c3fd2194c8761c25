"""README and docs are run: every block of Python and of the shell, in order; what they show is what was printed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overspill import devices
from overspill.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
KINDS = {"python", "sh", "text", "diff"}
ANYTHING = "…"  # a line of this in a block of text stands for any lines
HOME = "/home/you"  # what pages call the folder that their commands are typed in
SHOW_SECONDS = ("run", "bench")  # of what these commands print, the first line is compared

NOT_RUN = {
    "make demo": "builds an environment and fetches a model; tests/test_demo.py runs the program",
    "make test": "runs this",
    "make bench": "takes minutes, and gigabytes of disk; tests/test_benchmarks.py runs its parts",
    "PYTHONPATH=src python3 benchmarks/inference.py --gpu": "needs a GPU, and minutes",
    "PYTHONPATH=src python3 benchmarks/inference.py --cpu": "takes gigabytes and minutes",
}
"""How lines of shell blocks begin that no test runs, and why. All others are run."""

_FENCE = re.compile(r"^(?P<fence>```+)(?P<kind>\S*)[^\n]*\n(?P<content>.*?)^(?P=fence)\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)(?P<target>[^)#]+)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of its first line, from 1."""
    kind: str
    content: str

    def run(self, namespace: dict[str, Any]) -> None:
        # Empty lines before it, so that a traceback names the line of the page.
        source = "\n" * (self.line - 1) + self.content
        exec(compile(source, str(self.page), "exec", dont_inherit=True), namespace)

    def typed(self) -> str:
        """What a shell prints for the block, up to the first line that fails."""
        if self.content.startswith(HEREDOC):
            exec(self.content.removeprefix(HEREDOC).removesuffix("END\n"), {})
            return ""
        return "".join(printed_by(line) for line in self.lines if not is_exempt(line))

    @property
    def lines(self) -> list[str]:
        return self.content.splitlines()

    @property
    def shows_seconds(self) -> bool:
        return self.content.startswith(tuple(f"overspill {name} " for name in SHOW_SECONDS))

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


HEREDOC = "python - <<'END'\n"


def is_exempt(line: str) -> bool:
    return line.startswith(tuple(NOT_RUN))


def printed_by(line: str) -> str:
    """What a line of a shell block prints. Our own commands run in this process: importing torch takes seconds."""
    words = shlex.split(line)
    if words[0] != "overspill":
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        run = ["bash", "-c", line]
        return subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    end = next((at for at, word in enumerate(words) if word in ("||", "|", ">")), len(words))
    result = CliRunner().invoke(app, words[1:end])
    match words[end:]:
        case []:
            assert result.exit_code == 0, result.output
            return result.output
        case [">", file]:
            assert result.exit_code == 0, result.output
            Path(file).write_text(result.stdout)
            return ""
        case ["|", "tail", "-n", "1"]:
            return result.stdout.splitlines()[-1] + "\n"
        case ["||", "echo", "exit code $?"]:
            assert result.exit_code != 0, result.output
            return f"{result.output}exit code {result.exit_code}\n"
    raise AssertionError(f"teach this function how a shell would run {line!r}")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("content")) + 1
        yield Block(page, line, match["kind"], match["content"])


def shows(printed: str, block: str) -> bool:
    """Whether the lines of `block` were printed, one after the other."""
    parts = [re.escape(part.strip("\n")) for part in re.split(rf"^{ANYTHING}$", block, flags=re.MULTILINE)]
    return re.search(r"\n(.*\n)*?".join(part for part in parts if part), printed) is not None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_blocks_of_a_page_run_as_they_stand_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "accelerators", list)  # what is printed is the same wherever the tests run
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    stand_alone = page.name == "README.md"  # where people copy one block and leave the others
    command: Block | None = None  # the one that a block of text comes from; None: from the Python before it
    for block in blocks(page):
        if block.kind == "python":
            block.run({"__name__": "page"} if stand_alone else namespace)
            printed, command = printed + capsys.readouterr().out, None
        elif block.kind == "sh":
            typed, command = block.typed().replace(str(tmp_path), HOME), block
        elif block.kind == "text" and command is None:
            assert shows(printed, block.content), f"{block} was not printed by the blocks before it:\n{printed}"
        elif block.kind == "text":
            lines = 1 if command.shows_seconds else None
            assert typed.splitlines()[:lines] == block.lines[:lines], f"{block} is not what is printed"


def shell_lines() -> list[str]:
    return [line for page in PAGES for block in blocks(page) if block.kind == "sh" for line in block.lines]


def test_what_is_not_run_is_on_a_page_and_no_command_of_ours() -> None:
    lines = shell_lines()
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []
    assert [line for line in lines if "overspill " in line and is_exempt(line)] == []


def test_every_command_is_shown_on_a_page() -> None:
    shown = {line.split()[1] for line in shell_lines() if line.startswith("overspill ")}
    assert shown == {command.callback.__name__ for command in app.registered_commands if command.callback}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_says_what_its_blocks_are_and_names_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks(page):
        assert block.kind in KINDS, f"{block} is a block of {block.kind!r}, not of {sorted(KINDS)}"
        if block.kind == "sh":
            assert set(re.findall(r"\bmake ([a-z][a-z-]*)", block.content)) <= targets, f"{block} names no target"
            for script in re.findall(r"\bpython3? (\S+\.py)", block.content):
                assert (ROOT / script).is_file(), f"{block} names {script}"
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / target).resolve() for target in _LINK.findall(index.read_text())}
    assert {page for page in PAGES if page.parent == index.parent and page != index} <= listed


def test_output_is_compared_line_by_line() -> None:
    assert shows("a\nb\nc\nd\n", "b\nc\n")
    assert shows("a\nb\nc\nd\n", f"a\n{ANYTHING}\nd\n")
    assert shows("a\nb\n", f"a\n{ANYTHING}\nb\n")
    assert not shows("a\nb\nc\n", "a\nc\n")
    assert not shows("a\nb\nc\n", f"b\n{ANYTHING}\na\n")

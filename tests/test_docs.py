"""README and docs are run: every block of Python, in order; what they show as output is what was printed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)]
KINDS = {"python", "sh", "text", "diff"}
ANYTHING = "…"  # a line of this in a block of text stands for any lines

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

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


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
def test_the_python_of_a_page_runs_as_it_stands_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    printed, before = "", ""
    for block in blocks(page):
        if block.kind == "python":
            block.run(namespace)
            printed += capsys.readouterr().out
        elif block.kind == "text" and before != "sh":  # what commands print is compared in test_cli.py
            assert shows(printed, block.content), f"{block} was not printed by the blocks before it:\n{printed}"
        before = block.kind


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

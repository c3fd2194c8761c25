"""Which figures in README are older than the code that they measure, and how a new measurement is recorded.

    make stamp                                      # README marks the figures whose code has changed since
    make stamp STAMP_ARGS="--measured inference"    # those in README now were measured at the commit checked out

claims.toml has, for each measurement, the benchmark, the commit, a stamp of each file that it measures as it was then,
and the figures of README's table that come from it. Comments and docstrings do not count: a stamp is taken of the code
without them. A figure whose code has changed is marked in README; tests/test_claims.py sees to it.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CLAIMS: Final = "benchmarks/claims.toml"
SOURCES: Final = "src/overspill"
MARK: Final = " †"
FOOTNOTE: Final = "† measured before the last change to the code that it measures"
_HEADING: Final = "## How fast\n"
_HEADER: Final = """\
# Which benchmark README's figures come from, and what the code was like. Written by `make stamp`; only the names of
# measurements, benchmarks, files and works are edited by hand. CONTRIBUTING.md says how figures are renewed.
"""


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark, and the figures that README has from it."""

    name: str
    benchmark: str
    commit: str
    files: Mapping[str, str]
    """The stamp of each file as it was measured, by its path in the package."""
    figures: Mapping[str, list[str]]
    """The cells of README's table, by the work in their first column."""

    def changed(self, root: Path) -> list[str]:
        """The files that are not what was measured."""
        folder = root / SOURCES
        return [file for file, stamp in self.files.items() if stamp_of((folder / file).read_text()) != stamp]


def read(root: Path) -> list[Measurement]:
    """All of claims.toml."""
    claims = tomllib.loads((root / CLAIMS).read_text())
    return [Measurement(name, **fields) for name, fields in claims.items()]


def write(measurements: Sequence[Measurement], root: Path) -> None:
    """Claims.toml anew. A string of JSON is one of TOML, too."""

    def quoted(value: str | list[str]) -> str:
        return json.dumps(value, ensure_ascii=False)

    lines = [_HEADER]
    for each in measurements:
        lines += [f"[{each.name}]", f"benchmark = {quoted(each.benchmark)}", f"commit = {quoted(each.commit)}", ""]
        lines += [f"[{each.name}.files]", *(f"{quoted(file)} = {quoted(stamp)}" for file, stamp in each.files.items())]
        lines += ["", f"[{each.name}.figures]"]
        lines += [*(f"{quoted(work)} = {quoted(cells)}" for work, cells in each.figures.items()), ""]
    (root / CLAIMS).write_text("\n".join(lines))


# Stamps.


def stamp_of(source: str) -> str:
    """What tells this code from other code: not comments, docstrings or layout, nor the Python that reads it."""
    return hashlib.sha256(repr(_essence(ast.parse(source))).encode()).hexdigest()[:16]


def _essence(node: object) -> object:
    """A syntax tree as tuples. What is empty is left out, since newer Pythons have more fields that are."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return (type(node).__name__, *((name, _essence(value)) for name, value in fields))
    if isinstance(node, list):
        return tuple(_essence(each) for each in node if not _is_docstring(each))
    return node


def _is_docstring(node: object) -> bool:
    """A string as a statement: of a module, class or function, or below an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# README.


def rows(readme: str) -> Iterator[tuple[str, list[str], bool]]:
    """The works of the measured table, the figures of each, and whether it is marked as older than the code."""
    for line in _table(readme).splitlines()[2:]:
        work, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
        yield work.removesuffix(MARK), cells, work.endswith(MARK)


def _table(readme: str) -> str:
    """The first table below the heading."""
    _, _, section = readme.partition(_HEADING)
    found = re.search(r"^\|.*?(?=^[^|])", section, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"README.md has no table below {_HEADING.strip()!r}")
    return found[0]


def marked(readme: str, older: Sequence[str]) -> str:
    """README with a mark at the works in `older`, at no others, and a footnote if there is any."""
    table = _table(readme)
    lines = [line.replace(f"{MARK} |", " |", 1) for line in table.splitlines()]
    for number, line in enumerate(lines):
        work = line.split("|")[1].strip() if number > 1 else None
        if work in older:
            lines[number] = line.replace(f"| {work} |", f"| {work}{MARK} |", 1)
    without = readme.replace(f"{FOOTNOTE}.\n\n", "")
    footnote = f"\n{FOOTNOTE}.\n" if older else ""
    return without.replace(table, "\n".join(lines) + "\n" + footnote, 1)


# What is done.


def renewed(measurement: Measurement, figures: Mapping[str, list[str]], commit: str, root: Path) -> Measurement:
    """The same, measured at `commit`, with the figures that README has now."""
    at = _git(root, "rev-parse", "--short=7", commit).strip()
    files = {file: stamp_of(_git(root, "show", f"{at}:{SOURCES}/{file}")) for file in measurement.files}
    if missing := measurement.figures.keys() - figures.keys():
        raise SystemExit(f"README.md has no row {', '.join(sorted(missing))}: {CLAIMS} and it must name works alike")
    return replace(measurement, commit=at, files=files, figures={work: figures[work] for work in measurement.figures})


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main(root: Path = ROOT, say: Callable[[str], None] = print) -> int:
    """Renew what was measured, mark the rest, and say how each stands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="+", default=[], metavar="NAME", help="measurements that README now has")
    parser.add_argument("--commit", default="HEAD", help="what was measured; what is checked out if left out")
    arguments = parser.parse_args()
    measurements = read(root)
    if unknown := set(arguments.measured) - {each.name for each in measurements}:
        raise SystemExit(f"{CLAIMS} has no {', '.join(sorted(unknown))}, but {', '.join(m.name for m in measurements)}")
    readme = (root / "README.md").read_text()
    figures = {work: cells for work, cells, _ in rows(readme)}
    measurements = [
        renewed(each, figures, arguments.commit, root) if each.name in arguments.measured else each
        for each in measurements
    ]
    write(measurements, root)
    older = [work for each in measurements if each.changed(root) for work in each.figures]
    (root / "README.md").write_text(marked(readme, older))
    for each in measurements:
        changed = each.changed(root)
        state = "as it was measured" if not changed else f"changed since: {', '.join(changed)}"
        say(f"{each.name} ({each.benchmark} at {each.commit}): {state}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

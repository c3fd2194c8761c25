"""README's figures are the measured ones, and say so when the code that they measure has changed since."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RENEW = "see 'Figures' in CONTRIBUTING.md"


def load_stamp() -> Any:
    spec = importlib.util.spec_from_file_location("overspill_stamp", ROOT / "benchmarks" / "stamp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


stamp = load_stamp()
README = (ROOT / "README.md").read_text()


def test_the_figures_in_readme_are_those_that_were_measured() -> None:
    shown = {work: cells for work, cells, _ in stamp.rows(README)}
    claimed = {work: cells for each in stamp.read(ROOT) for work, cells in each.figures.items()}
    assert shown == claimed, f"README.md and {stamp.CLAIMS} differ: {RENEW}"
    assert len(shown) > 5


def test_readme_marks_the_figures_whose_code_has_changed_since_and_no_others() -> None:
    changed = {each.name: each.changed(ROOT) for each in stamp.read(ROOT)}
    older = {work for each in stamp.read(ROOT) if changed[each.name] for work in each.figures}
    marked = {work for work, _, is_marked in stamp.rows(README) if is_marked}
    assert marked == older, f"changed since they were measured: {changed}. `make stamp` marks them; {RENEW}"
    assert (stamp.FOOTNOTE in README) == bool(older)


CODE = '''
"""A module."""
LIMIT = 3
"""What it is."""
class Fetch:
    """A class."""
    def run(self, size: int) -> int:
        """A function."""
        return size + 1  # one more
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# one more", "# another"),
        ("A module", "Module"),
        ("What it is", "More"),
        ("A class", "C"),
        ("size + 1", "(size+1)"),
    ],
    ids=["comment", "module", "attribute", "class", "layout"],
)
def test_prose_and_layout_leave_a_stamp_as_it_is(old: str, new: str) -> None:
    assert old in CODE
    assert stamp.stamp_of(CODE.replace(old, new)) == stamp.stamp_of(CODE)


@pytest.mark.parametrize(("old", "new"), [("size + 1", "size + 2"), ("run", "go"), ("LIMIT = 3", "LIMIT = '3'")])
def test_code_changes_a_stamp(old: str, new: str) -> None:
    assert stamp.stamp_of(CODE.replace(old, new)) != stamp.stamp_of(CODE)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One measured file, one figure, all of it committed and stamped."""
    (tmp_path / "src" / "overspill").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "src" / "overspill" / "fetch.py").write_text(CODE)
    (tmp_path / "README.md").write_text(
        "# It\n\n## How fast\n\nSo:\n\n| work | it |\n| --- | --- |\n| one token | 1 s |\n\nThe end.\n"
    )
    measured = stamp.Measurement("inference", "inference.py", "0", {"fetch.py": ""}, {"one token": ["0 s"]})
    stamp.write([measured], tmp_path)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "All of it")
    return tmp_path


def run(project: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(sys, "argv", ["stamp.py", *arguments])
    assert stamp.main(project, said.append) == 0
    return said


def test_a_new_measurement_takes_the_figures_of_readme_and_the_code_of_its_commit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (project / "README.md").read_text()
    run(project, monkeypatch, "--measured", "inference")
    (measured,) = stamp.read(project)
    assert measured.figures == {"one token": ["1 s"]}
    assert measured.files == {"fetch.py": stamp.stamp_of(CODE)}
    assert (project / "README.md").read_text() == readme


def test_code_that_changes_marks_its_figures_until_they_are_measured_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(project, monkeypatch, "--measured", "inference")
    readme = (project / "README.md").read_text()
    (project / "src" / "overspill" / "fetch.py").write_text(CODE.replace("size + 1", "size + 2"))
    assert "fetch.py" in run(project, monkeypatch)[0]
    marked = (project / "README.md").read_text()
    assert (
        "| one token † | 1 s |\n\n† measured before the last change to the code that it measures.\n\nThe end" in marked
    )
    run(project, monkeypatch)
    assert (project / "README.md").read_text() == marked
    git(project, "commit", "-am", "Faster")
    run(project, monkeypatch, "--measured", "inference")
    assert (project / "README.md").read_text() == readme


def test_a_measurement_that_is_not_there_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no training, but inference"):
        run(project, monkeypatch, "--measured", "training")

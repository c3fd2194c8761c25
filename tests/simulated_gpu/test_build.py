"""How the simulated device is compiled, and what is said where it cannot be."""

import sys
from pathlib import Path

import pytest

from simulated_gpu import build

pytestmark = pytest.mark.gpu


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "FOLDER", tmp_path / "built")
    return tmp_path


def test_what_was_built_serves_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.built()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.built() == library
    monkeypatch.setattr(sys, "version", "another one")
    with pytest.raises(build.CannotSimulateError, match="no compiler"):
        build.built()


def test_a_compiler_that_is_missing_is_named_with_the_cure(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotSimulateError, match=r"no compiler here: install g\+\+"):
        build.built()


def test_headers_that_are_missing_are_named_with_the_cure(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(nothing_built))
    with pytest.raises(build.CannotSimulateError, match=r"has none: install them .*python3-dev"):
        build.built()


def test_what_the_compiler_says_is_shown_and_nothing_is_left(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", ["--no-such-option"])
    with pytest.raises(build.CannotSimulateError, match="no-such-option"):
        build.built()
    assert list((nothing_built / "built").iterdir()) == []


def test_a_torch_that_is_built_for_cuda_is_refused(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nothing_built / "torch" / "lib").mkdir(parents=True)
    (nothing_built / "torch" / "lib" / "libtorch_cuda.so").touch()
    (nothing_built / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(nothing_built)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(build.CannotSimulateError, match="make gpu-test"):
        build.built()

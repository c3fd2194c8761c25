"""What runs the benchmarks: all of them, whatever becomes of one; and the straight lines through what they find."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"overspill_benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


everything = load("all")


def check(promise: str, *, met: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": "1 s", "met": met}


def program(path: Path, *, met: bool) -> Path:
    """A benchmark with one row."""
    row = {
        "what": "one token",
        "ours": {"samples": [1.0, 3.0, 2.0]},
        "ours_seconds": 2.0,
        "line": 1.5,
        "of_line": 0.75,
        "peer": {"samples": [4.0]},
        "peer_is": "Somebody",
        "peer_seconds": 4.0,
        "others": {"Nobody": "not here: no module"},
        "targets": [check("fast", met=met)],
        "checks": [],
    }
    found = {"environment": {"torch": "2"}, "rows": [row]}
    path.write_text(
        "import sys, pathlib\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text({json.dumps(found)!r})\n"
        f"raise SystemExit({int(not met)})\n"
    )
    return path


def run(monkeypatch: pytest.MonkeyPatch, out: Path, programs: list[Path], *arguments: str) -> tuple[int, Any, str]:
    benchmarks = [everything.Benchmark(path.stem, path.stem.title(), [str(path)], []) for path in programs]
    benchmarks.append(everything.Benchmark("training", "Training", ["training.py"], [], gpu=True))
    monkeypatch.setattr(everything, "BENCHMARKS", benchmarks)
    monkeypatch.setattr(everything, "sees_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["all.py", "--out", str(out), *arguments])
    status = everything.main()
    return status, json.loads((out / "results.json").read_text()), (out / "table.md").read_text()


def test_what_was_found_is_in_json_in_a_table_and_in_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, results, table = run(monkeypatch, tmp_path / "out", [program(tmp_path / "fetch.py", met=True)])
    assert status == 0
    assert results["fetch"]["found"]["rows"][0]["what"] == "one token"
    assert "| one token | 2.000 (1.000–3.000) | 1.5, 75% | Somebody 4.000 (4.000–4.000); Nobody not here" in table
    assert "1 promises, all kept" in table
    assert (tmp_path / "out" / "fetch.svg").read_text().count("<svg") == 1


def test_what_this_machine_cannot_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, results, table = run(monkeypatch, tmp_path / "out", [program(tmp_path / "fetch.py", met=True)])
    assert results["training"]["status"] is None
    assert "- training: torch sees no CUDA device here" in table


def test_a_benchmark_that_breaks_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no disk')")
    programs = [broken, program(tmp_path / "fetch.py", met=True)]
    status, results, table = run(monkeypatch, tmp_path / "out", programs)
    assert status == 1
    assert results["fetch"]["found"] is not None
    assert "ended with status 1 before it had a figure" in table
    assert "broken: NOT ALL KEPT" in capfd.readouterr().out


def test_a_promise_that_is_not_kept_ends_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, table = run(monkeypatch, tmp_path / "out", [program(tmp_path / "slow.py", met=False)])
    assert status == 1
    assert "**not kept**: one token: fast: 1 s" in table


def test_only_those_asked_for_run_and_an_unknown_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [program(tmp_path / "slow.py", met=False), program(tmp_path / "fetch.py", met=True)]
    status, results, _ = run(monkeypatch, tmp_path / "out", programs, "--only", "fetch")
    assert status == 0
    assert results["slow"]["why"] == "not asked for"
    with pytest.raises(SystemExit, match="no benchmark is called nothing"):
        run(monkeypatch, tmp_path / "out", programs, "--only", "nothing")


def test_the_benchmarks_that_are_run_are_there() -> None:
    for benchmark in load("all").BENCHMARKS:
        assert (BENCHMARKS / benchmark.arguments[0]).is_file()


def test_a_straight_line_is_found_and_so_is_what_lies_off_it() -> None:
    straight = load("straight")
    line = straight.Fit.of([1, 2, 4, 8], [5, 7, 11, 19])
    assert (line.start, line.slope) == (pytest.approx(3), pytest.approx(2))
    assert line.at(16) == pytest.approx(35)
    assert line.deviation == pytest.approx(0)
    assert straight.Fit.of([1, 2, 4, 8], [1, 4, 16, 64]).deviation > 0.3


def test_growth_that_is_more_than_proportional_is_told() -> None:
    steepest = load("straight").steepest
    assert steepest([1, 2, 4, 8], [3, 6, 12, 24]) == 1
    assert steepest([1, 2, 4, 8], [3, 4, 5, 6]) < 1
    assert steepest([1, 2, 4, 8], [3, 3, 3, 12]) == 2


def test_a_model_that_is_scaled_streams_all_of_its_weights_and_keeps_its_bits(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, scaling\n"
        "point = scaling.measure(scaling.QUICK_CPU, 40_000, 5, pathlib.Path(sys.argv[1]))\n"
        "print(point.same_bits, point.units)"
    )  # in a process of its own, since what benchmarks share sets Transformers' logging for all
    paths = [str(BENCHMARKS), str(BENCHMARKS.with_name("src"))]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True 5\n", done.stderr
    assert not list(tmp_path.iterdir())

"""All benchmarks that this machine can run, one after the other, and what they found in one folder.

    make bench
    PYTHONPATH=src python3 benchmarks/all.py --quick --only overhead,scaling

Writes results.json (all figures), table.md and pictures (svg). A benchmark that fails does not take the others with it;
what was not run is said, with the reason. Ends with status 1 when one failed or a promise was not kept. With --quick
the models are small: that shows whether the benchmarks run, and not how fast the library is.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
ENDS: Final = 1800
"""Seconds after which a benchmark is taken to hang, and ended."""


@dataclass(frozen=True)
class Benchmark:
    """One program, and how it is called."""

    name: str
    title: str
    arguments: Sequence[str]
    quick: Sequence[str]
    """What is added for small models."""
    gpu: bool | None = None
    """Whether it needs a CUDA device, or is in the way where there is one. None: it runs anywhere."""
    plots: bool = False
    """Whether it draws a picture itself."""


BENCHMARKS: Final = (
    Benchmark("overhead", "What costs where nothing moves", ["overhead.py"], ["--quick"]),
    Benchmark(
        "inference-gpu",
        "Inference and loading",
        ["inference.py", "--gpu", "--limit", "1200"],
        ["--layers", "8"],
        gpu=True,
    ),
    Benchmark(
        "inference-cpu",
        "Inference and loading on the CPU",
        ["inference.py", "--cpu", "--limit", "1200"],
        ["--layers", "4"],
        gpu=False,
    ),
    Benchmark("scaling", "Size and number of units", ["scaling.py"], ["--quick"], plots=True),
    Benchmark("save", "Saving a mixture of experts", ["save.py"], ["--layers", "4", "--turns", "1"]),
    Benchmark("training", "Training", ["training.py", "--limit", "1200"], ["--layers", "2"], gpu=True, plots=True),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a benchmark."""

    benchmark: Benchmark
    seconds: float = 0.0
    status: int | None = None
    """None: it was not run."""
    why: str = ""
    """The reason why it was not run, or failed."""
    found: Mapping[str, Any] | None = None

    def checks(self) -> list[dict[str, Any]]:
        """All promises of it."""
        found = self.found or {}
        of_rows = [
            check | {"promise": f"{row['what']}: {check['promise']}"}
            for row in found.get("rows", [])
            for check in [*row["targets"], *row["checks"]]
        ]
        return of_rows + found.get("checks", [])

    def broken(self) -> list[str]:
        """What is wrong with it: promises that were not kept, parts that failed, or all of it."""
        found = self.found or {}
        failed = {part: why for part, why in found.get("failed", {}).items() if not why.startswith("not here")}
        lines = [f"{part}: {why.splitlines()[-1]}" for part, why in failed.items()]
        lines += [f"{check['promise']}: {check['measured']}" for check in self.checks() if not check["met"]]
        if self.status and not lines:
            lines.append(self.why or f"ended with status {self.status}")
        return lines


def run(benchmark: Benchmark, folder: Path, *, quick: bool, pictures: bool) -> Outcome:
    """In a process of its own, which prints as it goes."""
    out = folder / f"{benchmark.name}.json"
    out.unlink(missing_ok=True)
    program, *arguments = benchmark.arguments
    command = [sys.executable, str(HERE / program), *arguments, "--out", str(out), *(benchmark.quick if quick else [])]
    if benchmark.plots and pictures:
        command += ["--plot", str(folder / f"{benchmark.name}.svg")]
    start = time.perf_counter()
    try:
        status, why = subprocess.run(command, env=_environment(), timeout=ENDS, check=False).returncode, ""
    except subprocess.TimeoutExpired:
        status, why = 1, f"took longer than {ENDS} s"
    found = json.loads(out.read_text()) if out.exists() else None
    if status and found is None:
        why = why or f"ended with status {status} before it had a figure"
    return Outcome(benchmark, time.perf_counter() - start, status, why, found)


def _environment() -> dict[str, str]:
    """This one's, where `import overspill` finds the code beside the benchmarks."""
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def chosen(only: Sequence[str], *, on_gpu: bool) -> list[Outcome | Benchmark]:
    """What is run here, and of the others why not."""
    if unknown := set(only) - {benchmark.name for benchmark in BENCHMARKS}:
        raise SystemExit(f"no benchmark is called {', '.join(sorted(unknown))}: see --help")
    result: list[Outcome | Benchmark] = []
    for benchmark in BENCHMARKS:
        if only and benchmark.name not in only:
            result.append(Outcome(benchmark, why="not asked for"))
        elif benchmark.gpu and not on_gpu:
            result.append(Outcome(benchmark, why="torch sees no CUDA device here"))
        elif benchmark.gpu is False and on_gpu and benchmark.name not in only:
            result.append(Outcome(benchmark, why="for machines without a CUDA device; --only runs it"))
        else:
            result.append(benchmark)
    return result


def sees_gpu() -> bool:
    """Whether torch does, asked in another process: this one must hold no device memory while others measure."""
    program = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{sys.executable} has no torch: `make install` builds a .venv with all that is needed")
    return done.stdout.strip() == "True"


# Tables.


def markdown(outcomes: Sequence[Outcome]) -> str:
    """All tables, then what was not kept and what was not run."""
    first = next((outcome.found for outcome in outcomes if outcome.found), None)
    lines = ["# Benchmarks", ""]
    if first is not None:
        lines += [", ".join(f"{name} {value}" for name, value in first["environment"].items() if value is not None), ""]
    for outcome in outcomes:
        if outcome.status is not None:
            lines += [f"## {outcome.benchmark.title}", "", *_tables(outcome.found or {}), ""]
            broken = outcome.broken()
            kept = f"{len(outcome.checks())} promises, {'all kept' if not broken else 'not all kept:'}"
            lines += [kept, "", *(f"- **not kept**: {line}" for line in broken), *([""] if broken else [])]
    missing = [f"- {outcome.benchmark.name}: {outcome.why}" for outcome in outcomes if outcome.status is None]
    if missing:
        lines += ["## Not run here", "", *missing, ""]
    return "\n".join(lines)


def _tables(found: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if "table" in found:
        lines += found["table"].splitlines()
    if rows := found.get("rows"):
        lines += ["| work | ours, s (min–max) | line, s | peers, s (min–max) |", "| --- | --- | --- | --- |"]
        for row in rows:
            line = "–" if row["line"] is None else f"{row['line']:.3g}, {row['of_line']:.0%}"
            lines.append(f"| {row['what']} | {_spread(row['ours'])} | {line} | {_peers(row)} |")
    if points := found.get("points"):
        lines += [
            "| case | method | step, s (min–max) | peak allocated, GB | bits |",
            "| --- | --- | --- | --- | --- |",
        ]
        for point in points:
            bits = {True: "same", False: "OTHER", None: ""}[point["same_bits"]]
            cells = [point["case"], point["method"], _spread(point), f"{point['allocated'] / 1e9:.2f}", bits]
            lines.append(f"| {' | '.join(cells)} |")
    missing = {part: why for part, why in found.get("failed", {}).items() if why.startswith("not here")}
    return lines + ([""] if missing else []) + [f"- {part}: {why}" for part, why in missing.items()]


def _peers(row: Mapping[str, Any]) -> str:
    peers = ({} if row["peer"] is None else {row["peer_is"]: row["peer"]}) | row["others"]
    return "; ".join(f"{who} {peer if isinstance(peer, str) else _spread(peer)}" for who, peer in peers.items()) or "–"


def _spread(timing: Mapping[str, Any]) -> str:
    samples = sorted(timing["samples"])
    digits = 3 if median(samples) >= 0.01 else 5
    return f"{median(samples):.{digits}f} ({samples[0]:.{digits}f}–{samples[-1]:.{digits}f})"


def median(samples: Sequence[float]) -> float:
    """Of samples in order."""
    middle = len(samples) // 2
    return samples[middle] if len(samples) % 2 else (samples[middle - 1] + samples[middle]) / 2


# Pictures.


def draw(outcome: Outcome, path: Path) -> None:
    """Each row's time, its line and its peers."""
    rows = (outcome.found or {}).get("rows")
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dots = [dot for row in reversed(rows) for dot in reversed(_dots(row))]
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.27 * len(dots)))
    colours = {"ours": "C0", "line": "0.6", "peer": "C1"}
    for place, (label, kind, seconds) in enumerate(dots):
        axis.plot(seconds, place, "o", color=colours[kind])
        axis.text(seconds, place, f"   {seconds:.3g}", va="center", fontsize=7)
        axis.axhline(place, color="0.93", zorder=0)
        axis.text(0, place, label, va="center", ha="right", fontsize=7, transform=axis.get_yaxis_transform())
    axis.set(yticks=[], xscale="log", xlabel="seconds", title=outcome.benchmark.title)
    axis.margins(x=0.1)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def _dots(row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    dots = [(f"{row['what']}  ", "ours", row["ours_seconds"])]
    if row["line"] is not None:
        dots.append(("the line  ", "line", row["line"]))
    if row["peer"] is not None:
        dots.append((f"{row['peer_is']}  ", "peer", row["peer_seconds"]))
    others = {who: other for who, other in row["others"].items() if not isinstance(other, str)}
    return dots + [(f"{who}  ", "peer", median(sorted(other["samples"]))) for who, other in others.items()]


# All of it.


def main() -> int:
    """Run what can be run here."""
    names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench-results", help="the folder for what they find")
    parser.add_argument("--quick", action="store_true", help="small models and few repetitions")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"some of {names}")
    arguments = parser.parse_args()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    with_pictures = find_spec("matplotlib") is not None
    if not with_pictures:
        print("no pictures: matplotlib is not here")
    outcomes: list[Outcome] = []
    for each in chosen(arguments.only, on_gpu=sees_gpu()):
        if isinstance(each, Benchmark):
            print(f"\n=== {each.name}: {each.title}", flush=True)
            outcomes.append(run(each, folder, quick=arguments.quick, pictures=with_pictures))
        else:
            outcomes.append(each)
        write(outcomes, folder)
    if with_pictures:
        for outcome in outcomes:
            draw(outcome, folder / f"{outcome.benchmark.name}.svg")
    return tell(outcomes, folder)


def write(outcomes: Sequence[Outcome], folder: Path) -> None:
    """What is known so far."""
    results = {
        outcome.benchmark.name: {
            "status": outcome.status,
            "seconds": outcome.seconds,
            "why": outcome.why,
            "found": outcome.found,
        }
        for outcome in outcomes
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2))
    (folder / "table.md").write_text(markdown(outcomes))


def tell(outcomes: Sequence[Outcome], folder: Path) -> int:
    """What came of each, in a line, and the status to end with."""
    print()
    for outcome in outcomes:
        broken = outcome.broken()
        if outcome.status is None:
            said = f"not run: {outcome.why}"
        else:
            said = f"{'all kept' if not broken else 'NOT ALL KEPT'}, {outcome.seconds:.0f} s"
        print("\n    ".join([f"{outcome.benchmark.name}: {said}", *broken]))
    print(
        f"\n{folder / 'table.md'} has the tables, {folder / 'results.json'} all figures; the pictures are beside them"
    )
    return int(any(outcome.status for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())

"""How the time of a pass grows with the size of the model, and with the number of units that it is cut into.

    PYTHONPATH=src python3 benchmarks/scaling.py --out results.json --plot scaling.svg

With a CUDA device all weights rest in host memory: 1 to 16 GB, and 4 GB in 8 to 512 units. Without one they rest on
disk, the page cache warm: 0.25 to 2 GB, and 0.5 GB in 4 to 512 units, computing on half of the cores. Everything is
streamed: the window holds three units and keeps none. A straight line is fitted to each series. Ends with status 1 when
a promise was not kept.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from common import GB, Check, Timing, environment, repeat
from lines import Link, Rate, cached_rate, filesystem, on_disk
from straight import Fit, steepest
from torch import nn

import overspill

TOKENS: Final = 4
WINDOW: Final = 3
"""Units: one that computes, one that has arrived, one on its way."""
WIDER: Final = 4
"""The inner width of a block, by its outer one."""
DEVIATION: Final = 0.1
"""How far a time may be from the straight line, in parts of what the line says."""


@dataclass(frozen=True)
class Sweep:
    """Models of one machine: by size, with units of one size, and by number of units, at one size."""

    device: torch.device
    dtype: torch.dtype
    unit: float
    """Bytes of a unit, where the model grows."""
    sizes: Sequence[float]
    fixed: float
    """Bytes of the model, where the number of units grows."""
    counts: Sequence[int]
    times: int


GPU: Final = Sweep(
    torch.device("cuda", 0), torch.bfloat16, 128e6, (1e9, 2e9, 4e9, 8e9, 16e9), 4e9, (8, 16, 32, 64, 128, 256, 512), 7
)
CPU: Final = Sweep(
    torch.device("cpu"),
    torch.float32,
    16e6,
    (0.25e9, 0.5e9, 1e9, 1.5e9, 2e9),
    0.5e9,
    (4, 8, 16, 32, 64, 128, 256, 512),
    7,
)
QUICK_GPU: Final = Sweep(torch.device("cuda", 0), torch.bfloat16, 64e6, (0.5e9, 1e9, 2e9), 1e9, (8, 32, 128), 5)
QUICK_CPU: Final = Sweep(torch.device("cpu"), torch.float32, 8e6, (0.1e9, 0.2e9, 0.4e9), 0.1e9, (4, 16, 64), 5)


class Block(nn.Module):
    """Two matrices that move as one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, WIDER * width, bias=False)
        self.down = nn.Linear(WIDER * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def build(sweep: Sweep, unit: float, units: int) -> tuple[nn.Module, int]:
    """A model of so many units with about `unit` bytes each, on its device, and its width."""
    width = max(16, round((unit / (2 * WIDER * sweep.dtype.itemsize)) ** 0.5 / 16) * 16)
    random = torch.Generator(sweep.device).manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(units))).to(sweep.dtype)
    model.to_empty(device=sweep.device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.uniform_(-0.02, 0.02, generator=random)
    return model.eval(), width


@dataclass(frozen=True)
class Point:
    """One model's passes."""

    units: int
    nbytes: int
    timing: Timing
    same_bits: bool

    def __str__(self) -> str:
        rate = self.nbytes / self.timing.median / GB
        bits = "same bits" if self.same_bits else "OTHER BITS"
        return f"    {self.nbytes / GB:7.3f} GB in {self.units:4} units: {self.timing} s, {rate:6.2f} GB/s, {bits}"


def measure(sweep: Sweep, unit: float, units: int, parent: Path) -> Point:
    """Time a model of which nothing is resident, and give back what it held."""
    with torch.no_grad(), tempfile.TemporaryDirectory(prefix="overspill-", dir=parent) as folder:
        point = _measure(sweep, unit, units, Path(folder))
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return point


def _measure(sweep: Sweep, unit: float, units: int, folder: Path) -> Point:
    model, width = build(sweep, unit, units)
    held = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(TOKENS, width, dtype=sweep.dtype, generator=torch.Generator().manual_seed(1)).to(sweep.device)
    expected = model(x)
    _offload(sweep, model, held, units, folder)
    same = torch.equal(model(x), expected)
    timing = repeat(lambda: model(x), sweep.times)
    same &= torch.equal(model(x), expected)
    return Point(units, held, timing, same)


def _offload(sweep: Sweep, model: nn.Module, held: int, units: int, folder: Path) -> None:
    """All of it to host memory, or where the CPU computes to disk, with a window that keeps nothing."""
    on_gpu = sweep.device.type != "cpu"
    budget: dict[int | str, int] = {"cpu": 2 * held} if on_gpu else {}
    unit = held // units + units  # a little more, since slabs are aligned
    plan = overspill.plan(model, budget, device=sweep.device, window=WINDOW * (unit + 4096))
    assert plan.streamed_bytes >= held, "something is resident, or kept in the window"
    overspill.offload(model, plan, folder=None if on_gpu else folder)
    if not on_gpu:
        os.sync()  # its writing must not disturb what is measured
        cached_rate([file for file in folder.rglob("*") if file.is_file()])


# Straight lines.


@dataclass(frozen=True)
class Series:
    """Points along one axis, and the line through them."""

    name: str
    axis: str
    xs: list[float]
    points: list[Point]
    fit: Fit

    @classmethod
    def of(cls, name: str, axis: str, xs: list[float], points: list[Point]) -> "Series":
        return cls(name, axis, xs, points, Fit.of(xs, [point.timing.median for point in points]))


def checks(by_size: Series, by_units: Series) -> list[Check]:
    """What is promised: the time is linear in the size, and no worse than linear in the number of units."""
    growth = steepest(by_units.xs, [point.timing.median for point in by_units.points])
    same = all(point.same_bits for point in [*by_size.points, *by_units.points])
    promise = f"within {DEVIATION:.0%} of a straight line by size"
    return [
        Check.at_most(promise, by_size.fit.deviation, DEVIATION, "%"),
        Check.at_most("time grows by no more than the number of units does", growth, 1.0),
        Check("same bits as the resident model", "yes" if same else "no", same),
    ]


def plot(series: Sequence[Series], path: str) -> None:
    """Each series with its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(series), figsize=(5 * len(series), 3.6), squeeze=False)
    for axis, each in zip(axes.flat, series, strict=True):
        medians = [point.timing.median for point in each.points]
        below = [point.timing.median - min(point.timing.samples) for point in each.points]
        above = [max(point.timing.samples) - point.timing.median for point in each.points]
        axis.errorbar(each.xs, medians, yerr=[below, above], fmt="o", capsize=3, label="median, fastest, slowest")
        ends = [min(each.xs), max(each.xs)]
        axis.plot(ends, [each.fit.at(x) for x in ends], label=f"straight line, off by {each.fit.deviation:.1%} at most")
        axis.set(title=each.name, xlabel=each.axis, ylabel="seconds a pass")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def table(by_size: Series, by_units: Series) -> str:
    """Both series, in the syntax of Markdown."""
    lines = ["| model | units | a pass, s (min–max) | GB/s | straight line, s |", "| --- | --- | --- | --- | --- |"]
    for series in (by_size, by_units):
        for x, point in zip(series.xs, series.points, strict=True):
            cells = [f"{point.nbytes / GB:.2f} GB", str(point.units), str(point.timing)]
            cells += [f"{point.nbytes / point.timing.median / GB:.2f}", f"{series.fit.at(x):.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(sweep: Sweep, parent: Path) -> tuple[Series, Series]:
    """Both series, each model once."""
    grown, cut = list[Point](), list[Point]()
    for nbytes in sweep.sizes:
        grown.append(measure(sweep, sweep.unit, round(nbytes / sweep.unit), parent))
        print(grown[-1], flush=True)
    for units in sweep.counts:
        cut.append(measure(sweep, sweep.fixed / units, units, parent))
        print(cut[-1], flush=True)
    sizes = [point.nbytes / GB for point in grown]
    by_size = Series.of(f"units of {sweep.unit / 1e6:.0f} MB", "size of the model, GB", sizes, grown)
    counts = [float(point.units) for point in cut]
    return by_size, Series.of(f"a model of {sweep.fixed / GB:.2g} GB", "units", counts, cut)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models")
    parser.add_argument("--folder", help="where the CPU's models go; it must be a disk, not memory")
    parser.add_argument("--out", help="a JSON file for all figures")
    parser.add_argument("--plot", help="a picture of both series")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    sweep = (QUICK_GPU if on_gpu else QUICK_CPU) if arguments.quick else (GPU if on_gpu else CPU)
    candidates = [Path(arguments.folder)] if arguments.folder else [Path(tempfile.gettempdir()), Path.cwd()]
    parent = on_disk(candidates, 0 if on_gpu else 4 << 30)
    link: Rate | None = Link(sweep.device).rate() if on_gpu else None
    facts = environment() | {
        "file system": f"{filesystem(parent)} at {parent}",
        "link": None if not link else str(link),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    if not on_gpu:  # the other cores are for reading: threads that compute spin when they wait, and would take them
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    start = time.perf_counter()
    series = run(sweep, parent)
    by_size, by_units = series
    print(f"\n{table(*series)}\n")
    print(f"by size: {by_size.fit.start:.4f} s + {by_size.fit.slope:.4f} s a GB, off by {by_size.fit.deviation:.1%}")
    a_unit = by_units.fit.slope * 1e3
    print(f"by units: {by_units.fit.start:.4f} s + {a_unit:.3f} ms a unit, off by {by_units.fit.deviation:.1%}")
    promises = checks(*series)
    print("\n".join(f"{'yes' if check.met else 'NO '}  {check.promise}: {check.measured}" for check in promises))
    print(f"all of it took {time.perf_counter() - start:.0f} s")
    if arguments.out:
        results = {
            "environment": facts,
            "series": [asdict(each) for each in series],
            "checks": [asdict(check) for check in promises],
            "table": table(*series),
        }
        Path(arguments.out).write_text(json.dumps(results, indent=2))
    if arguments.plot:
        plot(series, arguments.plot)
    return int(any(not check.met for check in promises))


if __name__ == "__main__":
    raise SystemExit(main())

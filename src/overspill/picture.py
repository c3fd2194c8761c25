"""A plan as a picture: the units along a pass, coloured by tier, and what each device holds of its budget."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from overspill.config import GIB, MIB, format_size
from overspill.devices import CPU
from overspill.plan import Placement, Plan, Tier
from overspill.table import pattern

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLOURS = {"resident": "#2a6f97", "window": "#a9d6e5", "stays": "#012a4a", "cpu": "#f4a259", "disk": "#8e7dbe"}
_MEANINGS = {
    "resident": "resident",
    "window": "window",
    "stays": "small tensors",
    "cpu": "streamed from host memory",
    "disk": "streamed from disk",
}
_BUDGET = "#c1121f"
_ELSEWHERE = "//"  # hatches what computes on another device than most
_LETTER = 0.007  # of the pass: about the width of a letter


@dataclass(frozen=True)
class _Bar:
    """What one place holds, part by part, and what it may hold."""

    label: str
    parts: tuple[tuple[str, int], ...]
    budget: int = 0
    hatch: str = ""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.parts)


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw `plan` to `path`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a picture of a plan needs matplotlib: pip install 'overspill[plot]'") from error
    bars = list(_bars(plan))
    scale, unit = (GIB, "GiB") if max(bar.nbytes for bar in bars) >= GIB else (MIB, "MiB")
    figure = Figure(figsize=(11, 3.2 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    along, memory = figure.subplots(2, 1, height_ratios=[1, 0.3 + 0.5 * len(bars)])
    figure.suptitle(_title(plan), fontsize=13)
    _draw_pass(along, plan, scale)
    along.set_xlabel(f"a pass, unit after unit ({unit})")
    _draw_memory(memory, bars, scale)
    memory.set_xlabel(f"held at a time ({unit})")
    shown = [part for part in _COLOURS if any(part == kind for bar in bars for kind, _ in bar.parts)]
    handles: list[Artist] = [Patch(color=_COLOURS[part], label=_MEANINGS[part]) for part in shown]
    if any(bar.budget for bar in bars):
        handles.append(Line2D([], [], color=_BUDGET, linewidth=2, label="budget"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _title(plan: Plan) -> str:
    total = plan.resident_bytes + plan.cpu_bytes + plan.disk_bytes + plan.stays_nbytes
    title = f"{format_size(total)} on {plan.device}"
    if not plan.streamed_bytes:
        return f"{title}: a pass moves nothing"
    return f"{title}: a pass moves {format_size(plan.streamed_bytes)}, at least {plan.predicted_seconds:.3g} s"


def _kind(placement: Placement) -> str:
    return "resident" if placement.tier is Tier.DEVICE else placement.tier.value


def _draw_pass(axes: "Axes", plan: Plan, scale: int) -> None:
    """Units side by side, as wide as they are large. Above a stretch of alike ones is their name, if there is room."""
    total = sum(placement.unit.nbytes for placement in plan.placements) / scale or 1.0
    left = 0.0
    for name, stretch in groupby(plan.placements, key=lambda placement: pattern(placement.unit.name)):
        start, placements = left, list(stretch)
        for placement in placements:
            hatch = "" if placement.device == plan.device else _ELSEWHERE
            left = _draw_piece(axes, 0, left, placement.unit.nbytes / scale, _kind(placement), hatch)
        label = _label(name or "the model", len(placements), letters=(left - start) / (_LETTER * total))
        axes.text((start + left) / 2, 0.5, label, ha="center", va="bottom", fontsize=9)
    axes.set_xlim(0, total)
    axes.set_ylim(-0.45, 0.75)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_piece(axes: "Axes", row: int, left: float, width: float, kind: str, hatch: str) -> float:
    """Returns where the piece ends."""
    axes.barh(row, width, 0.7, left=left, color=_COLOURS[kind], edgecolor="white", linewidth=0.7, hatch=hatch)
    return left + width


def _label(name: str, count: int, *, letters: float) -> str:
    """As much of a stretch's name as there is room for."""
    several = f" ({count})" if count > 1 else ""
    for label in (name + several, name.rpartition(".")[2] + several):
        if len(label) <= letters * 1.3:  # a little may stick out, above its neighbours
            return label
    return ""


def _bars(plan: Plan) -> Iterator[_Bar]:
    for device in dict.fromkeys([plan.device, *(placement.device for placement in plan.placements)]):
        at_home = (p for p in plan.placements if p.tier is Tier.DEVICE and p.device == device)
        parts = [("resident", sum(placement.unit.nbytes for placement in at_home))]
        if device == plan.device:
            parts = [("stays", plan.stays_nbytes), *parts, ("window", plan.window)]
        hatch = "" if device == plan.device else _ELSEWHERE
        yield _Bar(str(device), _held(parts), plan.budgets.get(device, 0), hatch)
    if plan.cpu_bytes:
        # Where the CPU computes as well, its bar above is the one that has the budget.
        budget = plan.budgets.get(CPU, 0) if plan.device != CPU else 0
        yield _Bar("host memory", _held([("cpu", plan.cpu_bytes)]), budget)
    if plan.disk_bytes:
        yield _Bar("disk", _held([("disk", plan.disk_bytes)]))


def _held(parts: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((kind, nbytes) for kind, nbytes in parts if nbytes)


def _draw_memory(axes: "Axes", bars: list[_Bar], scale: int) -> None:
    """A bar for each place, its budget as a red line where it has one."""
    widest = max(max(bar.nbytes, bar.budget) for bar in bars) / scale or 1.0
    for row, bar in enumerate(bars):
        left = 0.0
        for kind, nbytes in bar.parts:
            left = _draw_piece(axes, row, left, nbytes / scale, kind, bar.hatch)
        said = format_size(bar.nbytes)
        if bar.budget:
            limit = bar.budget / scale
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color=_BUDGET, linewidth=2)
            left, said = max(left, limit), f"{said} of {format_size(bar.budget)}"
        axes.text(left + 0.008 * widest, row, said, ha="left", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.2)
    axes.spines[["right", "top"]].set_visible(False)

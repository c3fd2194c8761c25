"""What is where, what was moved, and how well that was hidden: as text, and as a page that needs nothing else."""

import html
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from overspill.config import format_size
from overspill.devices import synchronize
from overspill.errors import StateError
from overspill.managed import Managed, managed, managers_of
from overspill.plan import Plan, Tier
from overspill.recording import COMPUTE, COPY, READ, WAIT, Span
from overspill.table import alike
from overspill.tracing import overlap


@dataclass(frozen=True, kw_only=True)
class Report:
    """A managed model at one moment. `print` shows it, `save` writes it as a page."""

    name: str
    """The class of the model."""
    plan: Plan
    """What is where."""
    passes: int
    """Calls of the model so far."""
    moved: dict[str, int]
    """Bytes, by the tier that they came from."""
    needed: int
    """How often a unit was called for."""
    ready: int
    """… and was there already."""
    under_way: int
    """… and was on its way."""
    waited: float
    """Seconds that calling threads stood still for bytes."""
    mapped: int
    """Bytes on disk that are computed with where they lie in the page cache: nothing is moved."""
    actual_seconds: float | None
    """The median of the last passes; None before the second one."""
    spans: Sequence[Span] = ()
    """What the last trace has seen."""

    @property
    def hit_rate(self) -> float | None:
        """Of the units that were called for, those that had been fetched, or begun to be, ahead of need."""
        return (self.ready + self.under_way) / self.needed if self.needed else None

    def __str__(self) -> str:
        return "\n".join([f"{self.name}", "", str(self.plan), "", *self._facts()])

    def _facts(self) -> Iterator[str]:
        moved = " and ".join(f"{format_size(nbytes)} from {tier}" for tier, nbytes in sorted(self.moved.items()))
        yield f"passes so far: {self.passes}, which moved {moved or 'nothing'}"
        if self.mapped:
            yield f"{format_size(self.mapped)} on disk are computed with in the page cache, without a copy"
        if self.hit_rate is not None:
            late = self.needed - self.ready - self.under_way
            yield (
                f"prefetch: {self.hit_rate:.1%} of {self.needed} needs were foreseen; {self.ready} units were there, "
                f"{self.under_way} on their way, {late} fetched when they were needed"
            )
        yield f"calling threads waited {self.waited:.4g} s for bytes"
        if self.actual_seconds is not None:
            predicted = self.plan.predicted_seconds
            yield f"a pass takes {self.actual_seconds:.4g} s; moving its bytes was predicted to take {predicted:.4g} s"
        if self.spans:
            computing, moving, both = overlap(self.spans)
            hidden = f"{both / moving:.1%} of it hidden behind computing" if moving else "nothing to hide"
            yield f"traced: {computing:.4g} s of computing, {moving:.4g} s of moving bytes, {hidden}"

    def html(self) -> str:
        """The page, which needs nothing else. Notebooks show it by themselves."""
        return _page(self)

    def _repr_html_(self) -> str:
        return self.html()  # what notebooks show

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page.

        Args:
            path: The file, `report.html`.
        """
        Path(path).write_text(self.html(), encoding="utf-8")


def report_of(model: nn.Module) -> Report:
    """The report of a managed model."""
    manager = managed(model) or next(iter(managers_of(model)), None)
    if manager is None:
        raise StateError("this model is not managed by overspill, so there is nothing to report. Load or offload it")
    counts = manager.counts
    seconds = _pass_seconds(manager)
    return Report(
        name=type(model).__name__,
        plan=manager.plan,
        passes=counts.passes,
        moved=dict(counts.moved),
        needed=counts.needed,
        ready=counts.ready,
        under_way=counts.under_way,
        waited=counts.waited,
        mapped=sum(unit.nbytes for unit in manager.units.values() if unit.mapped is not None),
        actual_seconds=statistics.median(seconds) if seconds else None,
        spans=manager.traced,
    )


def _pass_seconds(manager: Managed) -> list[float]:
    if manager.counts.passes > 1:
        synchronize(manager.plan.device)
        return manager.counts.pass_seconds()
    return []


# ---------------------------------------------------------------- the page

_COLOURS = {COMPUTE: "#3b7dd8", COPY: "#e08a2e", READ: "#7aa65a", WAIT: "#c8453c"}
_TIERS = {Tier.DEVICE: "#3b7dd8", Tier.CPU: "#e08a2e", Tier.DISK: "#7aa65a"}
_WIDTH = 960
_LANE = 22
_MOST_SPANS = 4000  # drawn: a page of hundreds of thousands of boxes opens in no browser

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1020px; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { text-align: left; padding: .2rem 1rem .2rem 0 }
td.number { text-align: right; font-variant-numeric: tabular-nums } h1 { font-size: 1.5rem } h2 { font-size: 1.1rem }
svg { max-width: 100%; height: auto; background: #fafafa; border: 1px solid #e4e4e4 }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } svg { background: #222; border-color: #444 }
}
"""


def _page(report: Report) -> str:
    name = html.escape(report.name)
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in report._facts())
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>overspill: {name}</title><style>{_STYLE}</style>",
        f"<h1>{name}</h1><ul>{facts}</ul>",
        f"<h2>What is where</h2>{_memory(report.plan)}{_table(report.plan)}",
        f"<h2>What happened when</h2>{_timeline(report.spans)}",
    ]
    return "\n".join(parts) + "</html>\n"


def _memory(plan: Plan) -> str:
    """A bar of the model's bytes, in the order of the pass, coloured by where they rest."""
    total = sum(placement.unit.nbytes for placement in plan.placements) or 1
    boxes, x = [], 0.0
    for placement in plan.placements:
        unit, tier = placement.unit, placement.tier
        width = _WIDTH * unit.nbytes / total
        label = f"{unit.name or '(the model)'}: {format_size(unit.nbytes)} on {tier.value}"
        boxes.append(_box(x, 10, width, 40, _TIERS[tier], label))
        x += width
    kept = plan.window
    note = f"the window: {format_size(kept)}" if kept else "no window: everything is resident"
    window = _box(0, 58, min(_WIDTH, _WIDTH * kept / total), 12, "#888", note) if kept else ""
    key = _key({tier.value: colour for tier, colour in _TIERS.items()} | ({"window": "#888"} if kept else {}))
    return f'<svg viewBox="0 0 {_WIDTH} 80" role=img aria-label="memory">{"".join(boxes)}{window}</svg>{key}'


def _table(plan: Plan) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(row.label)}<td class=number>{format_size(row.nbytes)}"
        f"<td>{row.device if row.tier is Tier.DEVICE else row.tier.value}<td>{row.device}</tr>"
        for row in alike(plan.placements)
    )
    return f"<table><tr><th>units<th>size<th>rests on<th>runs on</tr>{rows}</table>"


def _timeline(spans: Sequence[Span]) -> str:
    if not spans:
        return "<p>Nothing was traced yet: <code>with overspill.trace(model, 'trace.json'): …</code> shows it here.</p>"
    end = max(span.start + span.seconds for span in spans) or 1.0
    lanes = list(dict.fromkeys(span.lane for span in sorted(spans, key=lambda span: (span.kind != COMPUTE, span.lane))))
    shown = sorted(spans, key=lambda span: -span.seconds)[:_MOST_SPANS]
    boxes = []
    for span in shown:
        y = 14 + lanes.index(span.lane) * (_LANE + 14)
        label = f"{span.kind} {span.what}: {span.seconds * 1e3:.3f} ms" + (
            f", {format_size(span.nbytes)}" if span.nbytes else ""
        )
        x, width = _WIDTH * span.start / end, max(_WIDTH * span.seconds / end, 0.4)
        boxes.append(_box(x, y, width, _LANE, _COLOURS[span.kind], label))
    names = "".join(
        f'<text x="2" y="{11 + index * (_LANE + 14)}" font-size="10" fill="currentColor">{html.escape(lane)}</text>'
        for index, lane in enumerate(lanes)
    )
    height = 14 + len(lanes) * (_LANE + 14)
    left_out = f"<p>The {_MOST_SPANS} longest of {len(spans)} are drawn.</p>" if len(spans) > len(shown) else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="timeline of {end * 1e3:.1f} ms">'
        f"{names}{''.join(boxes)}</svg>{_key(_COLOURS)}{left_out}"
    )


def _box(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{height:.0f}" fill="{colour}" '
        f'stroke="#fff" stroke-width=".3"><title>{html.escape(label)}</title></rect>'
    )


def _key(colours: dict[str, str]) -> str:
    items = "".join(f'<span style="background:{colour}"></span>{name}' for name, colour in colours.items())
    return f"<p class=key>{items}</p>"

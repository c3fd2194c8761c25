"""A plan as text: what goes where, what a pass moves and how long that takes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from overspill.config import format_size
from overspill.devices import CPU
from overspill.plan import Placement, Plan, Tier

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
_WIDEST = 40  # characters of a list of numbers
_NAMED = 4  # units that a line names before it only counts them


@dataclass
class Row:
    """Alike units on one tier: blocks that differ in their number only."""

    name: str
    tier: Tier
    device: torch.device
    nbytes: int = 0
    numbers: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        if len(self.numbers) < 2:
            return self.name.replace("*", str(self.numbers[0])) if self.numbers else self.name or "(the model)"
        return f"{self.name.replace('*', _ranges(self.numbers))} ({len(self.numbers)})"


def render(plan: Plan) -> str:
    """The table of `plan`."""
    dtype = str(plan.dtype).removeprefix("torch.") if plan.dtype else "each tensor's own dtype"
    total = plan.resident_bytes + plan.cpu_bytes + plan.disk_bytes + plan.stays_nbytes
    heading = f"Plan for {plan.device}: {format_size(total)} in {len(plan.placements)} units, {dtype}"
    rows = [("units", "size", "rests on", "runs on")]
    for row in alike(plan.placements):
        resting = str(row.device) if row.tier is Tier.DEVICE else row.tier.value
        rows.append((row.label, format_size(row.nbytes), resting, str(row.device)))
    if plan.stays:
        rows.append((f"small tensors ({len(plan.stays)})", format_size(plan.stays_nbytes), "stay", str(plan.device)))
    return "\n".join([heading, "", *_columns(rows), "", *_memory(plan), *_movement(plan)])


def alike(placements: Iterable[Placement]) -> list[Row]:
    """Placements folded into rows, in the order in which each row begins."""
    rows: dict[tuple[str, int, Tier, torch.device], Row] = {}
    for placement in placements:
        unit, number = placement.unit, _NUMBER.search(placement.unit.name)
        name = pattern(unit.name)
        key = (name, unit.nbytes, placement.tier, placement.device)
        row = rows.setdefault(key, Row(name, placement.tier, placement.device))
        row.nbytes += unit.nbytes
        if number is not None:
            row.numbers.append(int(number[0]))
    return list(rows.values())


def pattern(name: str) -> str:
    """What alike blocks have in common: the name with its first number left out."""
    return _NUMBER.sub("*", name, count=1)


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3,8,10": the middle is left out where it is long."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    written = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(",".join(written)) <= _WIDEST:
        return ",".join(written)
    head = written[:1]
    while len(",".join([*head, written[len(head)], "…", written[-1]])) <= _WIDEST:
        head.append(written[len(head)])
    return ",".join([*head, "…", written[-1]])


def _columns(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, size, tier, device in rows:
        yield f"  {name:<{widths[0]}}  {size:>{widths[1]}}  {tier:<{widths[2]}}  {device}".rstrip()


def _memory(plan: Plan) -> Iterator[str]:
    """What each device holds, beside what it may hold."""
    used: dict[torch.device, list[str]] = defaultdict(list)
    for device in dict.fromkeys([plan.device, *(placement.device for placement in plan.placements)]):
        resident = [p.unit for p in plan.placements if p.tier is Tier.DEVICE and p.device == device]
        if resident:
            used[device].append(f"{format_size(sum(unit.nbytes for unit in resident))} resident")
    if plan.stays:
        used[plan.device].append(f"{format_size(plan.stays_nbytes)} that stay")
    for device, window in plan.windows.items():
        used[device].append(f"a window of {format_size(window)}{_keeps(plan)}")
    if plan.cpu_bytes:
        used[CPU].append(f"{format_size(plan.cpu_bytes)} in host memory")
    for device, parts in used.items():
        yield f"{device}: {' + '.join(parts)}{_against_budget(plan, device)}"
    if plan.disk_bytes:
        yield f"disk: {format_size(plan.disk_bytes)}"


def _keeps(plan: Plan) -> str:
    if not plan.kept:
        return ""
    names = ", ".join(sorted(plan.kept)) if len(plan.kept) <= _NAMED else f"{len(plan.kept)} units"
    return f" (keeps {names})"


def _against_budget(plan: Plan, device: torch.device) -> str:
    if device not in plan.budgets:
        return ""
    taken, budget = plan.bytes_on(device), plan.budgets[device]
    if not budget:
        return f" = {format_size(taken)}, beyond max_memory, which gives {device} nothing"
    headroom = plan.headroom.get(device, 0)
    kept = f" ({format_size(headroom)} of headroom kept free)" if headroom else ""
    return f" = {format_size(taken)} of {format_size(budget)}{kept}"


def _movement(plan: Plan) -> Iterator[str]:
    if not plan.streamed_bytes:
        yield "a pass moves nothing: everything is where it computes"
        return
    rates = []
    if plan.rates.link:
        rates.append(_rate("link", plan.rates.link, plan.rates.link_measured))
    if plan.disk_bytes:
        rates.append(_rate("disk", plan.rates.disk, plan.rates.disk_measured))
    at = f": at least {plan.predicted_seconds:.3g} s ({', '.join(rates)})" if rates else ""
    yield f"a pass moves {format_size(plan.streamed_bytes)}{at}"


def _rate(name: str, rate: float, measured: bool) -> str:
    return f"{name} {rate / 1e9:.3g} GB/s {'measured' if measured else 'assumed'}"

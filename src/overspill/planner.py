"""From a model's sizes and a budget to a plan: nothing here needs a weight or a device.

Note: why more memory never offloads more.
  What is resident is chosen in two steps. First, units so large that they would make the window large are resident:
  the more of them, the smaller the window, so of all `_Step`s whose window fits the last is taken, and what it makes
  resident is at least what the steps before it could with their larger windows. Then `_fill` takes units in an order
  that does not depend on the budget, skipping those that do not fit. The first unit that a larger budget takes and a
  smaller one skipped is larger than all that the smaller one took after it. This decides how many units of each size
  are resident. Which ones of a size does not change the sum: those that leave the streamed ones evenly in the pass.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill import devices
from overspill.config import DEVICE_ALIGNMENT, GIB, format_size, parse_size
from overspill.errors import BudgetError, PlanError
from overspill.plan import Placement, Plan, Rates, Tier, as_device, as_place
from overspill.tensors import TensorGroup
from overspill.units import Cut, Cutter, Unit, root_needs
from overspill.windows import USUAL_DEPTH, ample_window, in_a_row, least_window, neediest, usual_window

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many are taken
_ALIKE = 0.7  # units whose sizes differ by less are not told apart when large ones are made resident


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that weights may take on each device, and where the model computes."""

    device: torch.device
    capacity: Mapping[torch.device, int]
    """By device, the compute device first. 0: nothing rests there; a window is taken beyond the budget."""
    headroom: Mapping[torch.device, int] = field(default_factory=dict)


def make_plan(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    no_split_modules: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    window: int | str | None = None,
    headroom: int | str | None = None,
    cache: int = 0,
    device: torch.device | str | int | None = None,
) -> Plan:
    """Plan `model` within `max_memory`: see `overspill.plan`. `cache` is kept free beside the headroom."""
    budget = read_budget(max_memory, headroom=headroom, cache=cache, device=device)
    cut_within = Cutter(model, no_split_modules=no_split_modules, dtype=dtype)
    size = None if window is None else parse_size(window, what="window") // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT
    plan = plan_within(budget, cut_within, window=size, rates=Rates.assumed(budget.device), dtype=dtype)
    _refuse_wrappers(cut_within.groups, plan)
    return replace(plan, rates=Rates.of(budget.device)) if plan.streamed_bytes else plan


def _refuse_wrappers(groups: Mapping[str, TensorGroup], plan: Plan) -> None:
    """Quantized weights are often tensors around tensors, whose bytes are not where a tensor's bytes are."""
    for placement in plan.placements:
        if placement.tier is Tier.DEVICE:
            continue
        for name in placement.unit.tensors:
            if is_traceable_wrapper_subclass(groups[name].tensor):
                raise PlanError(
                    f"{name} is a {type(groups[name].tensor).__name__}, a tensor around others, which can only be "
                    "resident. Give the compute device more memory, or quantize into plain tensors"
                )


def plan_within(
    budget: Budget,
    cut_within: Callable[[int | None], Cut],
    *,
    rates: Rates,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """The plan itself. `cut_within(limit)` gives the model in units of at most `limit` bytes, where they can be cut."""
    found = cut_within(None)
    layout = _lay_out(found, budget, window)
    while layout is None:
        room = _room(found, budget) if window is None else window
        finer = cut_within(max(room, 0))
        if finer == found:
            raise _too_small(found, budget, window)
        found, layout = finer, _lay_out(finer, budget, window, tight=True)
    if window is not None and layout.window == 0:
        raise PlanError(f"window={window} has no effect: everything fits where it computes. Leave it out")
    return Plan(
        placements=tuple(_place(found.units, layout.resident, budget)),
        stays=found.stays,
        stays_nbytes=found.stays_nbytes,
        device=budget.device,
        windows={budget.device: layout.window} if layout.window else {},
        budgets=budget.capacity,
        headroom=budget.headroom,
        rates=rates,
        dtype=dtype,
    )


def read_budget(
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    headroom: int | str | None = None,
    cache: int = 0,
    device: torch.device | str | int | None = None,
) -> Budget:
    """`max_memory` as bytes a device. Hardware is asked only for what is left out: free memory, or the device."""
    kept = None if headroom is None else parse_size(headroom, what="headroom")
    if max_memory is None:
        return _free_budget(devices.compute_device(device), kept, cache, alone=device is not None)
    named = _named(max_memory)
    main = _main_device(named, device)
    _check_present(named, main, planned_for_elsewhere=device is not None and main not in devices.accelerators())
    others = sorted((d for d in named if d not in (main, devices.CPU)), key=lambda d: d.index)
    capacity = {d: named.get(d, 0) for d in dict.fromkeys([main, *others, devices.CPU])}
    kept = (kept or 0) + cache
    if not kept:
        return Budget(device=main, capacity=capacity)
    what = f"headroom={headroom!r}" if not cache else f"headroom of {format_size(kept)}, with that for the cache,"
    computing = [d for d in (main, *others) if capacity[d]]
    if not computing:
        raise BudgetError(f"{what} has no effect: max_memory gives {main} nothing. Leave it out")
    for d in computing:
        if capacity[d] <= kept:
            raise BudgetError(f"{what} leaves nothing of the {format_size(capacity[d])} for {d}. Give it more")
        capacity[d] -= kept
    return Budget(device=main, capacity=capacity, headroom=dict.fromkeys(computing, kept))


def _free_budget(main: torch.device, kept: int | None, cache: int, *, alone: bool) -> Budget:
    others = [] if alone or main.type == "cpu" else [d for d in devices.accelerators() if d != main]
    capacity, headroom = {}, {}
    for d in dict.fromkeys([main, *others, devices.CPU]):
        computes = d == main or d in others
        headroom[d] = kept if kept is not None and computes else max(GIB, devices.total_memory(d) // 10)
        headroom[d] += cache if computes else 0
        capacity[d] = max(0, devices.free_memory(d) - headroom[d])
    if not capacity[main]:
        raise BudgetError(
            f"{main} has {format_size(devices.free_memory(main))} free, and {format_size(headroom[main])} of headroom "
            "is kept: nothing is left for weights. Free some of it, or pass a smaller headroom"
        )
    return Budget(device=main, capacity=capacity, headroom=headroom)


def _named(max_memory: Mapping[int | str, int | str]) -> dict[torch.device, int]:
    if not isinstance(max_memory, Mapping):  # a size alone is what people try first
        raise BudgetError(f"max_memory={max_memory!r} does not say of which device. Write {{0: '10GiB'}}")
    named: dict[torch.device, int] = {}
    for key, value in max_memory.items():
        what = f"max_memory[{key!r}]"
        place = as_place(key, what=what)
        if place is None:
            if value not in (None, float("inf")):
                raise BudgetError(f"{what} is {value!r}, but disk has no limit: it takes what is left. Leave it out")
        elif place in named:
            raise BudgetError(f"{what} names {place} a second time. Give one size for it")
        else:
            named[place] = parse_size(value, what=what)
    return named


def _main_device(named: Mapping[torch.device, int], device: torch.device | str | int | None) -> torch.device:
    """`device`, else the first accelerator that the budget names, else the first there is, else the CPU."""
    if device is not None:
        return as_device(device)
    return min((d for d in named if d.type != "cpu"), key=lambda d: d.index, default=devices.compute_device(None))


def _check_present(named: Mapping[torch.device, int], main: torch.device, *, planned_for_elsewhere: bool) -> None:
    for d in named:
        if d.type == "cpu" or (planned_for_elsewhere and main.type != "cpu"):
            continue
        if main.type == "cpu":
            raise BudgetError(f"max_memory gives {d} {named[d]} bytes, but the model computes on the CPU. Leave it out")
        if d not in devices.accelerators():
            here = ", ".join(map(str, [*devices.accelerators(), "cpu", "disk"]))
            raise BudgetError(
                f"max_memory names {d}, and there is none: here are {here}. "
                f"To plan for another machine, pass device={str(d)!r} too"
            )


@dataclass(frozen=True)
class _Layout:
    """What is resident where, by index of the unit, and the window for the rest."""

    resident: Mapping[int, torch.device]
    window: int


def _lay_out(found: Cut, budget: Budget, window: int | None, *, tight: bool = False) -> _Layout | None:
    """None: some unit is larger than the window can be."""
    whole = _all_resident(found, budget)
    if whole is not None:
        return _Layout(whole, 0)
    tail = _tail(found, budget)
    head = [index for index in range(len(found.units)) if index not in tail]
    units = [found.units[index] for index in head]
    room = _room(found, budget) if budget.capacity[budget.device] else None
    chosen = _choose(units, room, window, tight=tight)
    if chosen is None:
        return None
    return _Layout(tail | {head[position]: budget.device for position in chosen[0]}, chosen[1])


def _room(found: Cut, budget: Budget) -> int:
    """For units on the compute device. A device that is given nothing holds what stays beyond its budget."""
    capacity = budget.capacity[budget.device]
    return capacity - found.stays_nbytes if capacity else 0


def _other_rooms(found: Cut, budget: Budget) -> list[tuple[torch.device, int]]:
    """The further accelerators. Small tensors within their units live there too: room for all of them is left."""
    others = (d for d in budget.capacity if d.type != "cpu" and d != budget.device)
    return [(d, budget.capacity[d] - found.stays_nbytes) for d in others]


def _can_leave(units: Sequence[Unit]) -> list[bool]:
    """Whether a unit may compute elsewhere than the rest: not if a module needs it together with another unit."""
    needed = Counter(root for unit in units for root in unit.roots)
    return [bool(unit.roots) and all(needed[root] == 1 for root in unit.roots) for unit in units]


def _all_resident(found: Cut, budget: Budget) -> dict[int, torch.device] | None:
    """Everything on the accelerators, each taking the next range of units, if there is room."""
    units, free = found.units, _can_leave(found.units)
    rooms = [(budget.device, _room(found, budget)), *_other_rooms(found, budget)]
    left = rooms[0][1] - sum(unit.nbytes for unit, leaves in zip(units, free, strict=True) if not leaves)
    if left < 0:
        return None
    resident, at = {}, 0
    for index, unit in enumerate(units):
        while free[index] and unit.nbytes > left:
            at += 1
            if at == len(rooms):
                return None
            left = rooms[at][1]
        resident[index] = rooms[at if free[index] else 0][0]
        left -= unit.nbytes if free[index] else 0
    return resident


def _tail(found: Cut, budget: Budget) -> dict[int, torch.device]:
    """The last units, as far as the further accelerators can hold them: activations cross to each of them once."""
    rooms, free = _other_rooms(found, budget), _can_leave(found.units)
    tail: dict[int, torch.device] = {}
    device, left = rooms.pop() if rooms else (budget.device, 0)
    for index in reversed(range(len(found.units))):
        size = found.units[index].nbytes
        while free[index] and size > left:
            if not rooms:
                return tail
            device, left = rooms.pop()
        if free[index]:
            tail[index] = device
            left -= size
    return tail


@dataclass(frozen=True)
class _Step:
    """The largest units resident, and what that leaves to stream."""

    resident: frozenset[int]
    nbytes: int
    least: int  # the smallest window for the rest
    short: int  # a window two units deep, which is worth more than the last large unit in it; for all later steps too
    usual: int  # three units deep, which is worth more than another resident unit; for all later steps too


def _choose(
    units: Sequence[Unit], room: int | None, window: int | None, *, tight: bool
) -> tuple[frozenset[int], int] | None:
    """Which units are resident in `room` bytes, and the window for the others. `room` None: a window of any size.

    They do not all fit: `_all_resident` finds a way to place them if `_tail` leaves so few that they would.
    """
    if room is None:
        size = ample_window(units) if window is None else window
        return (frozenset(), size) if least_window(units) <= size else None
    if room < 0:
        return None
    if window is not None:
        return _choose_beside(units, room, window)
    if tight:  # there is less room than one block takes: all of it goes to the window
        return (frozenset(), room // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT) if least_window(units) <= room else None
    steps = _steps(units)
    possible = [step for step in steps if step.nbytes + step.short <= room]
    if not possible:  # the window comes first: nothing more is resident than in the cheapest step
        cheapest = min(step.nbytes + step.short for step in steps)
        last = max(at for at, step in enumerate(steps) if step.nbytes + step.short == cheapest)
        possible = [step for step in steps[: last + 1] if step.nbytes + step.least <= room]
    if not possible:
        return None
    step = possible[-1]
    resident = _fill_beside(units, step.resident, room - step.nbytes - step.usual)
    left = room - sum(units[index].nbytes for index in resident)
    streamed = [unit for index, unit in enumerate(units) if index not in resident]
    return resident, min(left // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT, usual_window(streamed))


def _choose_beside(units: Sequence[Unit], room: int, window: int) -> tuple[frozenset[int], int] | None:
    """What is resident beside a window of a given size: whatever is too large for it, and as much more as fits."""
    needs = root_needs(units)
    large = frozenset(
        index for index, unit in enumerate(units) if any(needs[root] > window for root in unit.roots or (unit.name,))
    )
    left = room - window - sum(units[index].nbytes for index in large)
    return (_fill_beside(units, large, left), window) if left >= 0 else None


def _steps(units: Sequence[Unit]) -> list[_Step]:
    """Which units to make resident first: those that are read in place, then those that need a larger window."""
    order = sorted(range(len(units)), key=lambda index: (bool(units[index].roots), -units[index].nbytes))
    resident: set[int] = set()
    steps: list[_Step] = []
    leader: tuple[bool, float] = (False, float("inf"))
    for index in order:
        unit = units[index]
        if not steps or bool(unit.roots) != leader[0] or unit.nbytes < _ALIKE * leader[1]:
            leader = (bool(unit.roots), unit.nbytes)
            rest = [unit for index, unit in enumerate(units) if index not in resident]
            nbytes = sum(units[index].nbytes for index in resident)
            least = least_window(rest)
            short, usual = (max(least, in_a_row(rest, depth)) for depth in (2, USUAL_DEPTH))
            steps.append(_Step(frozenset(resident), nbytes, least, short, usual))
        resident.add(index)
    for at in range(len(steps) - 2, -1, -1):  # a window that would have to grow again with a later step starts larger
        later = steps[at + 1]
        steps[at] = replace(steps[at], short=max(steps[at].short, later.short), usual=max(steps[at].usual, later.usual))
    return steps


def _fill_beside(units: Sequence[Unit], resident: frozenset[int], room: int) -> frozenset[int]:
    rest = [index for index in range(len(units)) if index not in resident]
    return resident | {rest[position] for position in _fill([units[index] for index in rest], room)}


def _fill(units: Sequence[Unit], room: int) -> set[int]:
    """Positions of units to keep in `room` bytes. Those left out lie evenly in the pass, and none of them would fit."""
    kept: Counter[tuple[int, bool]] = Counter()
    for index in sorted(range(len(units)), key=lambda index: (bool(units[index].roots), index * _GOLDEN % 1)):
        if units[index].nbytes <= room:
            room -= units[index].nbytes
            kept[_class(units[index])] += 1
    members: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        members[_class(unit)].append(index)
    left_out = {
        index
        for of_a_size, indices in members.items()
        for index in _evenly(units, indices, len(indices) - kept[of_a_size])
    }
    return set(range(len(units))) - left_out


def _class(unit: Unit) -> tuple[int, bool]:
    return unit.nbytes, bool(unit.roots)


def _evenly(units: Sequence[Unit], indices: Sequence[int], count: int) -> Iterator[int]:
    """`count` of `indices`, after equal shares of compute (error diffusion); of bytes where nothing is computed."""
    weights = [units[index].compute or units[index].nbytes for index in indices]
    share = count / sum(weights) if count else 0.0
    owed, skipped = 0.0, []
    for index, weight in zip(indices, weights, strict=True):
        owed += weight * share
        if owed >= 0.5 and count:
            owed -= 1
            count -= 1
            yield index
        else:
            skipped.append(index)
    yield from skipped[len(skipped) - count :]  # shares that came too late, after a last unit of much compute


def _place(units: Sequence[Unit], resident: Mapping[int, torch.device], budget: Budget) -> Iterator[Placement]:
    streamed = [index for index in range(len(units)) if index not in resident]
    room = 0 if budget.device.type == "cpu" else budget.capacity.get(devices.CPU, 0)
    on_cpu = {streamed[position] for position in _fill([units[index] for index in streamed], room)}
    for index, unit in enumerate(units):
        tier = Tier.DEVICE if index in resident else Tier.CPU if index in on_cpu else Tier.DISK
        yield Placement(unit=unit, tier=tier, device=resident.get(index, budget.device))


def _too_small(found: Cut, budget: Budget, window: int | None) -> BudgetError:
    tail = _tail(found, budget)
    units = [unit for index, unit in enumerate(found.units) if index not in tail]
    name, least, device = neediest(units), least_window(units), budget.device
    if window is not None and least > window:
        return BudgetError(
            f"window={window} is {least - window} bytes too small: {name} takes {format_size(least)} at once, and can "
            f"neither be cut nor kept on {device}. Give a window of {least} bytes or more"
        )
    needed, held = found.stays_nbytes, [f"small tensors ({format_size(found.stays_nbytes)})"]
    if window is not None:
        needed, held = needed + window, [f"a window of {format_size(window)}", *held]
    elif units:
        needed, held = needed + least, [f"{name} ({format_size(least)})", *held]
    capacity = budget.capacity[device]
    return BudgetError(
        f"{format_size(capacity)} on {device} is {needed - capacity} bytes too little: it must hold "
        f"{' and '.join(held)}. Give {device} {needed} bytes ({format_size(needed)}) or more"
    )

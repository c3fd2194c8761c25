"""Memory that there is and how to share it out; from there to device maps, and from device maps to plans."""

import difflib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from overspill.compat.accelerate.dtypes import as_dtype, stand_in
from overspill.config import parse_size
from overspill.devices import CPU, accelerators, free_memory
from overspill.errors import BudgetError, PlanError
from overspill.plan import Plan, Rates, Tier, as_device, as_place
from overspill.planner import Budget, plan_within, read_budget
from overspill.tensors import tensor_groups
from overspill.units import Cutter
from overspill.windows import least_window, usual_window

logger = logging.getLogger(__name__)

MaxMemory = Mapping[int | str, int | str] | Mapping[int, int | str] | Mapping[str, int | str]
Memory = dict[int | str, int]
"""Bytes by an accelerator's index, "cpu" or "disk", in the order in which they are filled."""

DeviceMap = Mapping[str, int | str | torch.device]
Names = str | Collection[str] | None

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


# Memory.


def get_max_memory(max_memory: MaxMemory | None = None) -> Memory:
    """Memory in bytes by device, accelerators first. What is passed in stays as it is.

    Args:
        max_memory: Sizes such as "10GiB" by index, "cpu" or "disk". None: what is free, less headroom.

    Raises:
        BudgetError: A size that cannot be read.
    """
    if max_memory is None:
        return {**{device.index: free_memory(device) for device in accelerators()}, "cpu": free_memory(CPU)}
    memory: Memory = {}
    for key, size in max_memory.items():
        place = as_place(key, what=f"max_memory[{key!r}]")
        name = "disk" if place is None else "cpu" if place == CPU else place.index
        memory[name] = _bytes(size, f"max_memory[{key!r}]")
    gpus = sorted(key for key in memory if isinstance(key, int))
    if absent := [gpu for gpu in gpus if gpu >= len(accelerators())]:
        logger.warning("max_memory names accelerators %s, and this machine has %d", absent, len(accelerators()))
    return {key: memory[key] for key in (*gpus, "cpu", "disk") if key in memory}


def _bytes(size: object, what: str) -> int:
    if isinstance(size, float) and math.isfinite(size):
        size = int(size)  # a share of what is free
    return parse_size(size, what=what)  # type: ignore[arg-type]  # it says what it takes


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Names = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> Memory:
    """A `max_memory` with which a model is spread evenly over the accelerators, if all of it fits on them.

    Args:
        model: Any module; a skeleton will do.
        max_memory: At most this on each device. None: what is free.
        no_split_module_classes: Class names of blocks that stay whole. None: found by themselves.
        dtype: Count weights as if they were cast to this.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: The first accelerator gets what does not fit on the others, and no more.

    Raises:
        BudgetError: A size that cannot be read.
    """
    memory = _free() if max_memory is None else get_max_memory(max_memory)
    return _Sizes(model, no_split_module_classes, dtype, special_dtypes).balanced(memory, low_zero)


def _free() -> Memory:
    """What is free, less the headroom that a plan keeps for activations and caches."""
    return {"cpu" if device == CPU else device.index: size for device, size in read_budget().capacity.items()}


class _Sizes:
    """A model's sizes, measured once, to be planned within any memory. Looks at no hardware."""

    def __init__(
        self,
        model: nn.Module,
        no_split: Names,
        dtype: str | torch.dtype | None,
        special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    ) -> None:
        cast = as_dtype(dtype)
        special = {name: as_dtype(each) for name, each in (special_dtypes or {}).items()}
        blocks = blocks_of(model, no_split)
        if special or (cast is not None and not cast.is_floating_point):
            model, cast = stand_in(model, cast, special), None
        self._dtype = cast
        self._cut_within = Cutter(model, no_split_modules=blocks, dtype=cast)

    def plan(self, memory: Memory) -> Plan:
        """What rests where. An accelerator that is given nothing has no part in it; disk has no limit."""
        places = {as_place(key, what="max_memory"): size for key, size in memory.items() if key != "disk"}
        sizes = {place: size for place, size in places.items() if place is not None}
        gpus = [place for place, size in sizes.items() if place != CPU and size]
        main = gpus[0] if gpus else CPU
        capacity = {place: sizes.get(place, 0) for place in dict.fromkeys([main, *gpus, CPU])}
        budget = Budget(device=main, capacity=capacity)
        return plan_within(budget, self._cut_within, rates=Rates.assumed(main), dtype=self._dtype)

    def balanced(self, memory: Memory, low_zero: bool) -> Memory:
        """`memory` with as little on each accelerator as suffices: the last one may take what it needs."""
        gpus = [key for key, size in memory.items() if isinstance(key, int) and size]
        if len(gpus) < 2 or not self._fits(memory):
            return memory
        if low_zero:
            first, *gpus = gpus
            least = _least(memory[first], lambda size: self._fits({**memory, first: size}))
            memory = {**memory, first: least}
        most = max(memory[gpu] for gpu in gpus)
        even = _least(most, lambda size: self._fits(_at_most(memory, gpus, size)))
        return _at_most(memory, gpus[:-1], even)

    def _fits(self, memory: Memory) -> bool:
        try:
            return all(placement.tier is Tier.DEVICE for placement in self.plan({**memory, "cpu": 0}).placements)
        except BudgetError:
            return False


def _at_most(memory: Memory, gpus: Iterable[int | str], size: int) -> Memory:
    return {**memory, **{gpu: min(size, memory[gpu]) for gpu in gpus}}


def _least(enough: int, fits: Callable[[int], bool]) -> int:
    """The least size that fits, to one part in a thousand of `enough`, which does."""
    if fits(0):
        return 0
    too_little, grain = 0, enough // 1000 + 1
    while enough - too_little > grain:
        middle = (too_little + enough) // 2
        if fits(middle):
            enough = middle
        else:
            too_little = middle
    return enough


# Device maps.


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Names = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Where each module of a model goes: accelerators first, then host memory, then disk.

    Args:
        model: Any module; a skeleton will do.
        max_memory: Sizes such as "10GiB" by index, "cpu" or "disk". None: what is free, less headroom.
        no_split_module_classes: Class names of blocks that stay whole. None: found by themselves.
        dtype: Count weights as if they were cast to this.
        special_dtypes: Dtypes of single tensors, by name.
        verbose: Print the plan, too.
        clean_result: Give one entry for modules that go to the same place together.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        fallback_allocation: Changes nothing: an accelerator is never left empty while something fits on it.

    Returns:
        Dotted paths to an index, "cpu" or "disk", for `dispatch_model` and `load_checkpoint_and_dispatch`.

    Raises:
        BudgetError: A size that cannot be read, or a budget that not even one block fits in.
    """
    memory = _free() if max_memory is None else get_max_memory(max_memory)
    plan = _Sizes(model, no_split_module_classes, dtype, special_dtypes).plan(memory)
    if verbose:
        print(plan)  # noqa: T201  # what `verbose` is there for
    if clean_result:
        return map_of(model, plan)
    by_unit = _by_unit(model, plan)
    if set(by_unit) != {""}:
        return _planned(by_unit, plan)
    tensors = [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]
    return {name: by_unit[""] for name, _ in (*tensors, *model.named_children())}


class PlannedMap(dict[str, int | str]):
    """A device map that knows the window it was planned with, so that who dispatches by it keeps within the budget."""

    window: int = 0


def map_of(model: nn.Module, plan: Plan) -> PlannedMap:
    """The plan as a device map with as few entries as can be; accelerators first, in order, and disk last.

    Pipelines send their inputs to the device of the first entry.
    """
    by_unit = _by_unit(model, plan)
    below: dict[str, set[int | str]] = {}
    for path, value in by_unit.items():
        for prefix in _prefixes(path):
            below.setdefault(prefix, set()).add(value)
    grouped: dict[str, int | str] = {}
    for path, value in by_unit.items():
        shortest = next((prefix for prefix in _prefixes(path) if len(below[prefix]) == 1), path)
        grouped[shortest] = value
    return _planned(dict(sorted(grouped.items(), key=lambda entry: _rank(entry[1]))), plan)


def _planned(entries: Mapping[str, int | str], plan: Plan) -> PlannedMap:
    planned = PlannedMap(entries)
    planned.window = plan.window
    return planned


def _rank(value: int | str) -> tuple[bool, bool, int]:
    return value == "disk", value == "cpu", value if isinstance(value, int) else 0


def _by_unit(model: nn.Module, plan: Plan) -> dict[str, int | str]:
    """The plan's own map as Accelerate writes one: all names of a tie are in it, and buffers go with their modules.

    A small buffer of a module that is elsewhere is where the module computes, whatever the map says. Where all that an
    accelerator computes is streamed to it, the model itself is its, and each part of it is said to be elsewhere.
    """
    mapped = plan.device_map
    groups = tensor_groups(model)
    buffers = {name for name in plan.stays if groups[name].kind == "buffer"}
    covered = {name for name in buffers if any(prefix in mapped for prefix in _prefixes(name)[:-1])}
    result = {path: value for path, value in mapped.items() if path not in covered}
    if plan.device != CPU and plan.device.index not in result.values():
        result = {"": plan.device.index, **result}
    for name, group in groups.items():
        for tied in group.names[1:]:
            if not any(prefix in result for prefix in _prefixes(tied)):
                result[tied] = next(mapped[prefix] for prefix in reversed(_prefixes(name)) if prefix in mapped)
    return result


def _prefixes(path: str) -> list[str]:
    """All that contains what is at `path`, from the model itself down to it."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def plan_by_strategy(
    model: nn.Module,
    strategy: str,
    max_memory: MaxMemory | None,
    blocks: list[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """The plan that one of Accelerate's words for a device map stands for."""
    if strategy not in _STRATEGIES:
        raise PlanError(f"device_map={strategy!r} is none of {', '.join(map(repr, _STRATEGIES))}, nor a dict")
    sizes = _Sizes(model, blocks, dtype)
    memory = _free() if max_memory is None else get_max_memory(max_memory)
    if strategy != "sequential":
        memory = sizes.balanced(memory, low_zero=strategy == "balanced_low_0")
    plan = sizes.plan(memory)
    return replace(plan, rates=Rates.of(plan.device)) if plan.streamed_bytes else plan


def plan_by_map(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: torch.device | str | int | None = None,
    blocks: list[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """The plan that a device map describes, with a window that the compute device has room for."""
    if not isinstance(device_map, Mapping):
        raise PlanError(f"device_map={device_map!r} is no dict. infer_auto_device_map makes one")
    known = _known(model, device_map)
    main = None if main_device is None else as_device(main_device)

    def plan(window: int | None = None) -> Plan:
        return Plan.from_device_map(model, known, window=window, no_split_modules=blocks, dtype=dtype, device=main)

    ample = plan()
    streamed = [placement.unit for placement in ample.placements if placement.tier is not Tier.DEVICE]
    if isinstance(device_map, PlannedMap) and device_map.window and streamed:
        return plan(max(least_window(streamed), device_map.window))
    if not streamed or (ample.device != CPU and ample.device not in accelerators()):
        return ample
    to_come = sum(p.unit.nbytes for p in ample.placements if p.tier is Tier.DEVICE and p.device == ample.device)
    # Whoever made the map left room for the largest layer, as Accelerate does, and not for a window of many.
    room = max(0, free_memory(ample.device) - to_come) // 2
    if ample.window <= room:
        return ample
    return plan(max(least_window(streamed), min(room, usual_window(streamed))))


def _known(model: nn.Module, device_map: DeviceMap) -> DeviceMap:
    """`device_map` without what the model does not have: maps are made for models with other heads too."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    known.update(name for group in tensor_groups(model).values() for name in group.names)
    for path in (path for path in device_map if path not in known):
        near = ", ".join(map(repr, difflib.get_close_matches(path, known, n=3))) or "nothing like it"
        warnings.warn(f"device_map names {path!r}, which the model does not have. It has: {near}", stacklevel=4)
    return {path: value for path, value in device_map.items() if path in known}


def blocks_of(model: nn.Module, no_split: Names, preload: Names = None) -> list[str] | None:
    """The class names of blocks that callers give, as far as the model has them. None: blocks are found by themselves.

    Callers pass one list for many models, so a class that this one does not have is no error. A class to preload is a
    block beside those that the model, as in Transformers, names itself.
    """
    given = [*_listed(no_split), *_listed(preload)]
    classes = {type(module).__name__ for module in model.modules()}
    if unknown := [name for name in given if name not in classes]:
        logger.warning("%s has no module of class %s", type(model).__name__, ", ".join(unknown))
    if given and not no_split:
        given += [name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()]
    return [name for name in dict.fromkeys(given) if name in classes] or None


def _listed(names: Names) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)

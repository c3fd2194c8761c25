"""Plan: which unit rests on which tier, where it computes, and what a pass of the model will move."""

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

import torch
from torch import nn

from overspill import devices
from overspill.config import DEVICE_ALIGNMENT, SMALL_TENSOR, format_size, parse_size
from overspill.errors import BudgetError, PlanError
from overspill.tensors import TensorGroup, tensor_groups
from overspill.units import Unit, cut_by, slab_size
from overspill.windows import ample_window, kept_in_window, least_window, neediest

ASSUMED_LINK: Final = 25e9
"""Bytes a second from pinned host memory, where no device is there to be measured: PCIe 4, 16 lanes."""

ASSUMED_DISK: Final = 3e9
"""Bytes a second from disk: an NVMe drive of today. Nobody knows yet which drive the checkpoint will be on."""

_LISTED = 10  # names that an error lists before it says how many more there are


class Tier(StrEnum):
    """Where a unit's bytes rest between two uses."""

    DEVICE = "device"
    CPU = "cpu"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a unit rests, and the device that it computes on."""

    unit: Unit
    tier: Tier
    device: torch.device
    """Where it computes. On the tier "device" it rests there, too."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes a second that predictions are made with."""

    link: float | None
    """From pinned host memory to the compute device. None: the CPU computes, nothing crosses a link."""
    disk: float = ASSUMED_DISK
    """From the disk that the checkpoint is on."""
    link_measured: bool = False
    """On this machine; else it is what is usual."""
    disk_measured: bool = False

    @classmethod
    def assumed(cls, device: torch.device) -> "Rates":
        """What is usual for a device such as this."""
        return cls(link=None if device.type == "cpu" else ASSUMED_LINK)

    @classmethod
    def of(cls, device: torch.device) -> "Rates":
        """What is measured for `device` if this machine has it, else what is usual."""
        measured = devices.link_rate(device) if device in devices.accelerators() else None
        return cls.assumed(device) if measured is None else cls(link=measured, link_measured=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every unit's tier and device. `print` shows it as a table, `plot` as a picture.

    Made by `overspill.plan`, or from a device map by `Plan.from_device_map`; taken by `load`, `offload` and `adopt`.
    """

    placements: tuple[Placement, ...]
    """In definition order."""
    stays: tuple[str, ...]
    """Names of the tensors that are too small to move: always on the device that computes with them."""
    stays_nbytes: int
    """Bytes of these."""
    device: torch.device
    """The compute device. All that is streamed computes here."""
    windows: Mapping[torch.device, int]
    """Bytes set aside for streaming. Empty when nothing streams."""
    budgets: Mapping[torch.device, int]
    """Bytes for weights on each device, headroom already taken off. Empty for a plan that was given, not made."""
    headroom: Mapping[torch.device, int]
    """Bytes kept free beside the budgets: for activations, the KV cache, the device's own needs."""
    rates: Rates
    """What `predicted_seconds` is made with."""
    dtype: torch.dtype | None
    """What floating-point weights are cast to. None: each keeps its own."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of the units that live on the devices they compute on, without what stays anyway."""
        return self._bytes(Tier.DEVICE)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the units that rest in host memory and are streamed from there."""
        return self._bytes(Tier.CPU)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the units that rest on disk and are streamed from there."""
        return self._bytes(Tier.DISK)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one pass brings to the compute device: what is offloaded, but for what the window keeps."""
        return sum(self._streamed(tier) for tier in (Tier.CPU, Tier.DISK))

    @cached_property
    def kept(self) -> frozenset[str]:
        """Names of the units that are offloaded, and stay in the window once they are there: it has room for them.

        Those on disk first, since they take longest to come back; then the large ones, which are hardest to hide.
        """
        offloaded = [p for p in self.placements if p.tier is not Tier.DEVICE and p.unit.roots]
        offloaded.sort(key=lambda p: (p.tier is not Tier.DISK, -p.unit.nbytes))
        return frozenset(unit.name for unit in kept_in_window([p.unit for p in offloaded], self.window))

    @property
    def devices(self) -> frozenset[torch.device]:
        """All devices that something computes on."""
        return frozenset({self.device, *(placement.device for placement in self.placements)})

    @property
    def window(self) -> int:
        """The compute device's window."""
        return self.windows.get(self.device, 0)

    @property
    def predicted_seconds(self) -> float:
        """The least time that a pass spends moving. It computes meanwhile, so it takes the longer of the two."""
        link = self.streamed_bytes / self.rates.link if self.rates.link else 0.0
        return max(link, self._streamed(Tier.DISK) / self.rates.disk)

    def bytes_on(self, device: torch.device) -> int:
        """Bytes that the plan takes on a device: resident units, window, what stays, and what rests in host memory.

        Args:
            device: `torch.device("cuda", 0)`, or `torch.device("cpu")` for host memory.
        """
        held = sum(p.unit.nbytes for p in self.placements if p.tier is Tier.DEVICE and p.device == device)
        if device == self.device:
            held += self.stays_nbytes + self.window
        return held + (self.cpu_bytes if device == devices.CPU else 0)

    def device_of(self, path: str) -> torch.device:
        """Where a module or tensor computes: with the unit around it, else on the compute device.

        Args:
            path: Its dotted path in the model.
        """
        for prefix in _prefixes(path):
            if prefix in self._roots:
                return self._roots[prefix]
        return self.device

    @property
    def device_map(self) -> dict[str, int | str]:
        """The plan in Accelerate's form: the longest prefix of a tensor's name says where the tensor is."""
        if all(p.tier is Tier.DEVICE and p.device == self.device for p in self.placements):
            return {"": _as_value(Tier.DEVICE, self.device)}
        mapped: dict[str, int | str] = {}
        for placement in self.placements:
            unit, value = placement.unit, _as_value(placement.tier, placement.device)
            # A unit named after a tensor shares its root with the unit that has the root's name.
            for path in unit.roots if unit.name in unit.roots else unit.tensors:
                mapped[path] = value
        home = _as_value(Tier.DEVICE, self.device)
        for name in self.stays:
            if next((mapped[prefix] for prefix in _prefixes(name) if prefix in mapped), None) != home:
                mapped[name] = home
        return mapped

    @classmethod
    def from_device_map(
        cls,
        model: nn.Module,
        device_map: Mapping[str, int | str | torch.device],
        *,
        window: int | str | None = None,
        no_split_modules: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> "Plan":
        """The plan that a device map describes. A tied tensor goes where its first name says.

        Args:
            model: What it is for; a skeleton will do.
            device_map: In Accelerate's form: dotted paths to an index, a device, "cpu" or "disk". "" is all the rest.
            window: As in `overspill.plan`.
            no_split_modules: As in `overspill.plan`.
            dtype: As in `overspill.plan`.
            device: Where what rests on "cpu" and "disk" computes. None: on the first accelerator in the map, else on
                the CPU.

        Raises:
            PlanError: The map names what the model does not have, leaves something out, or splits what computes as one.
            BudgetError: Something that is no device, or a window that is too small.

        Example:
            plan = overspill.Plan.from_device_map(build(), {"0": "disk", "1": "disk", "": "cpu"})
        """
        places = {path: as_place(value, what=f"device_map[{path!r}]") for path, value in device_map.items()}
        main = _main_device(places, device)
        groups = tensor_groups(model)
        _check_paths(model, groups, places)
        where = _look_up(groups, places, main)
        return cls.of_places(model, where, main, window=window, no_split_modules=no_split_modules, dtype=dtype)

    @classmethod
    def of_places(
        cls,
        model: nn.Module,
        where: Mapping[str, tuple[Tier, torch.device]],
        main: torch.device,
        *,
        window: int | str | None = None,
        no_split_modules: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Plan":
        """The plan that puts each tensor, by its first name, where `where` says, to compute on `main` if it streams."""
        found = cut_by(model, where, home=(Tier.DEVICE, main), no_split_modules=no_split_modules, dtype=dtype)
        placements = tuple(
            Placement(unit=unit, tier=where[unit.tensors[0]][0], device=where[unit.tensors[0]][1])
            for unit in found.units
        )
        _check_devices(placements)
        windows = _given_windows(placements, main, window)
        return cls(
            placements=placements,
            stays=found.stays,
            stays_nbytes=found.stays_nbytes,
            device=main,
            windows=windows,
            budgets={},
            headroom={},
            rates=Rates.of(main) if windows else Rates.assumed(main),
            dtype=dtype,
        )

    def check(self, groups: Mapping[str, TensorGroup]) -> None:
        """Raise if this is not a plan for the model that has these tensors."""
        placed = {name for placement in self.placements for name in placement.unit.tensors} | set(self.stays)
        if left_out := [name for name in groups if name not in placed]:
            raise PlanError(f"the plan says nothing about {_listed(left_out)}. Make a new plan for this model")
        if unknown := sorted(placed - groups.keys()):
            raise PlanError(
                f"the plan places {_listed(unknown)}, which the model has not. Make a new plan for this model"
            )
        for unit in (placement.unit for placement in self.placements):
            if sum(slab_size(groups[name], self.dtype) for name in unit.tensors) != unit.nbytes:
                raise PlanError(f"the plan was made for another size or dtype of {unit.name!r}. Make a new plan")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan as a picture. Needs matplotlib: `pip install 'overspill[plot]'`.

        Args:
            path: The file to write. Its ending names the format: `plan.png`, `plan.svg`, `plan.pdf`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from overspill.picture import draw  # knows the plan, and not the other way round

        draw(self, path)

    def __str__(self) -> str:
        from overspill.table import render  # knows the plan, and not the other way round

        return render(self)

    @cached_property
    def _roots(self) -> dict[str, torch.device]:
        return {root: placement.device for placement in self.placements for root in placement.unit.roots}

    def _streamed(self, tier: Tier) -> int:
        return sum(p.unit.nbytes for p in self.placements if p.tier is tier and p.unit.name not in self.kept)

    def _bytes(self, tier: Tier) -> int:
        return sum(placement.unit.nbytes for placement in self.placements if placement.tier is tier)


def as_place(value: object, *, what: str) -> torch.device | None:
    """The device that `value` names (0, "cuda:0", "cpu"), or None for "disk". Looks at no hardware beyond its kind."""
    if value == "disk":
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)  # a key that went through JSON
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        present = devices.accelerators()
        return torch.device(present[0].type if present else "cuda", value)
    try:
        device = torch.device(value) if isinstance(value, str | torch.device) else None
    except RuntimeError:
        device = None
    if device is None or device.type == "meta":
        here = ", ".join(map(repr, map(str, [*devices.accelerators(), "cpu", "disk"])))
        raise BudgetError(f"{what}: {value!r} is no device. Write an index such as 0, or a name. Here there are {here}")
    return devices.CPU if device.type == "cpu" else torch.device(device.type, device.index or 0)


def as_device(device: torch.device | str | int) -> torch.device:
    """The device to compute on that a user names, be it here or not."""
    place = as_place(device, what="device")
    if place is None:
        raise BudgetError("device='disk': nothing computes on a disk. Write an index such as 0, or 'cpu'")
    return place


def _as_value(tier: Tier, device: torch.device) -> int | str:
    if tier is not Tier.DEVICE:
        return tier.value
    return "cpu" if device.type == "cpu" else device.index


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _prefixes(path: str) -> list[str]:
    """`path` and all that contains it, longest first, down to the model itself, ""."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _main_device(places: Mapping[str, torch.device | None], device: torch.device | str | int | None) -> torch.device:
    if device is not None:
        return as_device(device)
    return next((place for place in places.values() if place is not None and place.type != "cpu"), devices.CPU)


def _check_paths(model: nn.Module, groups: Mapping[str, TensorGroup], places: Mapping[str, object]) -> None:
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    known.update(name for group in groups.values() for name in group.names)
    for path in places:
        if path not in known:
            near = ", ".join(difflib.get_close_matches(path, known, n=3)) or "nothing like it"
            raise PlanError(f"device_map names {path!r}, which the model does not have. It has: {near}")


def _look_up(
    groups: Mapping[str, TensorGroup], places: Mapping[str, torch.device | None], main: torch.device
) -> dict[str, tuple[Tier, torch.device]]:
    """Each tensor's tier and device, by the longest prefix of its first name."""
    where: dict[str, tuple[Tier, torch.device]] = {}
    missing = []
    for name, group in groups.items():
        prefix = next((prefix for prefix in _prefixes(name) if prefix in places), None)
        if prefix is not None:
            where[name] = _tier(places[prefix], main)
        else:
            where[name] = (Tier.DEVICE, main)
            # Accelerate's own maps leave out small buffers that no checkpoint holds; those stay wherever they are.
            if group.persistent or group.spec.nbytes >= SMALL_TENSOR:
                missing.append(name)
    if missing:
        raise PlanError(f"device_map says nothing about {_listed(missing)}. Add them, or '' for all the rest")
    return where


def _tier(place: torch.device | None, main: torch.device) -> tuple[Tier, torch.device]:
    if place is None:
        return Tier.DISK, main
    if place.type == "cpu" and main.type != "cpu":
        return Tier.CPU, main
    return Tier.DEVICE, place


def _check_devices(placements: Sequence[Placement]) -> None:
    """A module computes in one place: all that it needs must be there."""
    device_of: dict[str, torch.device] = {}
    for placement in placements:
        for root in placement.unit.roots:
            device = device_of.setdefault(root, placement.device)
            if device != placement.device:
                raise PlanError(
                    f"device_map has {root!r} compute on both {device} and {placement.device}: "
                    f"it needs {_listed(placement.unit.tensors)} too. Map all of it to one device"
                )


def _given_windows(
    placements: Sequence[Placement], main: torch.device, window: int | str | None
) -> dict[torch.device, int]:
    streamed = [placement.unit for placement in placements if placement.tier is not Tier.DEVICE]
    if not streamed:
        if window is not None:
            raise PlanError(f"window={window!r} has no effect: device_map keeps everything on its device. Leave it out")
        return {}
    if window is None:
        return {main: ample_window(streamed)}
    given, needed = parse_size(window, what="window"), least_window(streamed)
    if given < needed:
        raise BudgetError(
            f"window={window!r} is {format_size(needed - given)} too small: {neediest(streamed)} takes "
            f"{format_size(needed)}. Give {needed} bytes or more"
        )
    return {main: given // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT}

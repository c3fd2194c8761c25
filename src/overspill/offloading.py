"""Offload and restore: parts of a model in memory, gone to another tier and back."""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from overspill.config import format_size
from overspill.devices import CPU, compute_device
from overspill.errors import PlanError, StateError
from overspill.gate import Gate, gate_of
from overspill.managed import Managed, Training, managers_of
from overspill.moving import Mover, refuse, tier_of
from overspill.plan import Placement, Plan, Tier
from overspill.selecting import find_modules, holds
from overspill.tensors import Place, TensorGroup
from overspill.units import cut_out, is_below, owner_path

_verbs = threading.RLock()
"""One change at a time in this process. Taken behind the gates, so that nobody who holds it waits for a call."""


class TrainingOffload(Training, Protocol):
    """A training that streams weights."""

    edits_files: bool
    """Whether weights that are to be on disk are trained there."""

    def moves(self, group: TensorGroup) -> bool:
        """Whether a tensor of the modules that were named is to be streamed."""

    def windows(self, placements: Sequence[Placement]) -> Mapping[torch.device, int]:
        """Device memory to hold for streaming."""


class NothingToOffloadError(StateError):
    """All that was named is too small to move, or not stored."""


@dataclass(frozen=True)
class Offloaded:
    """What an offload did."""

    modules: tuple[str, ...]
    """Paths of the units that moved."""
    nbytes: int
    """Bytes of these."""
    files: tuple[Path, ...]
    """What was written. Empty for host memory."""
    stayed: tuple[str, ...]
    """Names of the tensors that stayed where they compute: in leaves too small to move, or buffers not stored."""

    def __str__(self) -> str:
        text = f"{len(self.modules)} modules offloaded, {format_size(self.nbytes)}"
        if self.files:
            text += f", to {len(self.files)} files in {os.path.commonpath(self.files)}"
        return f"{text}; {len(self.stayed)} tensors stayed" if self.stayed else text


@contextmanager
def changing(model: nn.Module, what: str) -> Iterator[None]:
    """No call of `model`, nor of anything managed in it or around it, is under way meanwhile. `what` is for errors."""
    _refuse_inside_forward(model, what)
    with ExitStack() as stack:
        while True:
            gates = _gates(model)
            for gate in gates:
                stack.enter_context(gate.changing(what))
            stack.enter_context(_verbs)
            if _gates(model) == gates:
                break
            stack.pop_all().close()  # someone else began to manage a part of it meanwhile
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _gates(model: nn.Module) -> list[Gate]:
    """In an order that all threads keep, so that no two wait for each other."""
    return sorted({gate_of(model), *(manager.gate for manager in managers_of(model))}, key=id)


def _refuse_inside_forward(model: nn.Module, what: str) -> None:
    """Also where nothing of the model is managed yet, and no gate knows of its calls."""
    modules = set(model.modules())
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") in modules:
            raise StateError(f"cannot {what} while a forward of it is running. Do that before or after the call")


@contextmanager
def _all_or_nothing(mover: Mover) -> Iterator[None]:
    try:
        yield
    except BaseException:
        mover.abandon()
        raise


def offload_parts(
    model: nn.Module,
    *,
    to: str,
    modules: str | Collection[str] | None,
    folder: str | os.PathLike[str] | None,
    device: torch.device | str | int | None,
    min_bytes: int,
    training: TrainingOffload | None = None,
) -> Offloaded:
    """Offload `modules` of `model` to host memory or disk; for `training`, what that wants of them."""
    tier = _tier(to)
    if folder is not None and tier is not Tier.DISK:
        raise PlanError(f"folder={os.fspath(folder)!r} has no effect with to={to!r}. Leave it out, or offload to disk")
    if min_bytes < 0:
        raise PlanError(f"min_bytes={min_bytes} is negative. Give a number of bytes of 0 or more")
    paths = find_modules(model, modules)
    with changing(model, "offload a model"):
        model, paths = _within_manager(model, paths)
        refuse_in_training(managers_of(model), "offloaded")
        inside = [manager for manager in managers_of(model) if manager.model in set(model.modules())]
        mover = Mover(model, inside)
        moving, stayed = _to_move(mover, paths, tier, min_bytes)
        if training is not None:
            stayed += [name for name in moving if not training.moves(mover.groups[name])]
            moving = [name for name in moving if name not in stayed]
        placements = [
            Placement(unit=unit, tier=tier, device=_device(mover, unit.tensors, device))
            for unit in cut_out(model, paths, moving).units
        ]
        if training is None:
            _refuse_no_op(mover, placements)
        with _all_or_nothing(mover):
            mover.stage(placements, folder, edited=training is not None and training.edits_files)
            where = _left_behind(mover, placements, paths, moving)
            mover.stage_plain(where, lambda name: (where[name], None))
            files = mover.written()
            if training is None:
                mover.commit()
            else:
                mover.commit(windows=training.windows(placements), training=training)
        return _report(mover, placements, files, stayed)


def offload_by_plan(model: nn.Module, plan: Plan, folder: str | os.PathLike[str] | None) -> Offloaded:
    """Rearrange all of `model`, which is in memory, as `plan` says."""
    with changing(model, "offload a model"):
        refuse_managed(model)
        if plan.dtype is not None:
            raise PlanError(
                f"the plan casts to {plan.dtype}, and a model in memory keeps its dtypes. Plan without dtype="
            )
        return arrange(Mover(model, []), plan, folder)


def manage_training(model: nn.Module, training: Training) -> None:
    """Have `training` lead the calls of a model that stays where it is."""
    with changing(model, "offload a model"):
        refuse_managed(model)
        Mover(model, []).commit(training=training)


def refuse_managed(model: nn.Module) -> None:
    """Raise if anything of `model` is managed already."""
    managers = managers_of(model)
    refuse_in_training(managers, "offloaded")
    if managers:
        raise StateError("parts of this model are offloaded already. Restore them first: overspill.restore(model)")


def refuse_in_training(managers: Collection[Managed], what: str) -> None:
    """Raise if a model is set up for training: that ends as a whole."""
    if any(manager.training is not None for manager in managers):
        raise StateError(
            f"this model is set up by offload_training, so parts of it cannot be {what} by themselves. "
            "End that first: overspill.restore(model)"
        )


def arrange(mover: Mover, plan: Plan, folder: str | os.PathLike[str] | None) -> Offloaded:
    """Let each tensor of the mover's model, wherever it is, be where `plan` wants it."""
    plan.check(mover.groups)
    for used in plan.devices:
        compute_device(used)
    streamed = [placement for placement in plan.placements if placement.tier is not Tier.DEVICE]
    if folder is not None and not any(placement.tier is Tier.DISK for placement in streamed):
        raise PlanError(f"folder={os.fspath(folder)!r} has no effect: the plan puts nothing on disk. Leave it out")
    where = {name: p.device for p in plan.placements if p.tier is Tier.DEVICE for name in p.unit.tensors}
    where |= {name: plan.device_of(name) for name in plan.stays}
    elsewhere = [name for name, device in where.items() if not mover.is_resident(name, device)]
    if not streamed and not elsewhere and mover.remembers:
        raise StateError("this plan changes nothing: all of the model is where the plan wants it")
    with _all_or_nothing(mover):
        mover.stage(streamed, folder)
        mover.stage_plain(elsewhere, lambda name: (where[name], None))
        files = mover.written()
        mover.commit(windows=plan.windows)
    return _report(mover, streamed, files, plan.stays)


def restore_parts(
    model: nn.Module,
    *,
    modules: str | Collection[str] | None,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
    delete: bool,
    buffers: bool = True,
    adopt: Callable[[nn.Module], object] | None = None,
) -> None:
    """Make `modules` of `model` ordinary again.

    `buffers`: `device` and `dtype` are for them too. `adopt` takes a dispatched model over from another library first.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise PlanError(f"weights cannot be cast to {dtype}. Give a floating-point dtype, or None to keep each one's")
    target = None if device is None else compute_device(device)
    paths = find_modules(model, modules)
    if adopt is not None:
        adopt(model)
    with changing(model, "restore a model"):
        parts = [model.get_submodule(path) for path in paths]
        managers = list(dict.fromkeys(manager for part in parts for manager in managers_of(part)))
        if not all(any(part is manager.model for part in parts) for manager in managers):
            refuse_in_training(managers, "restored")
        for path, part in zip(paths, parts, strict=True):
            # Of one that is managed, the user may have put other modules in the place of all that it streams.
            if adopt is None and not managers_of(part) and not _is_offloaded(part):
                named = repr(path) if path else "this model"
                raise StateError(f"nothing of {named} is offloaded, so there is nothing to restore")
        wish = _Wish(target, dtype, buffers)
        for manager in managers:
            _restore(Mover(manager.model, [manager]), parts, wish, delete)
        if not managers:
            _restore(Mover(model, []), parts, wish, delete)


def _is_offloaded(module: nn.Module) -> bool:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return any(tier_of(tensor) is not Tier.DEVICE for tensor in tensors)


@dataclass(frozen=True)
class _Wish:
    """Where, and in which dtype, restored tensors shall be."""

    device: torch.device | None
    dtype: torch.dtype | None
    buffers: bool

    def of(self, mover: Mover, name: str) -> tuple[torch.device, torch.dtype | None]:
        before = mover.origin_of(name).device
        if mover.groups[name].kind == "buffer" and not self.buffers:
            return before, None
        return self.device or before, self.dtype

    def changes(self, mover: Mover, name: str) -> bool:
        """Whether restoring touches a tensor at all."""
        tensor = mover.groups[name].tensor
        if tensor.is_meta:
            return False
        if tier_of(tensor) is not Tier.DEVICE:
            return True
        device, dtype = self.of(mover, name)
        return device != tensor.device or (tensor.is_floating_point() and dtype not in (None, tensor.dtype))


def _restore(mover: Mover, parts: Sequence[nn.Module], wish: _Wish, delete: bool) -> None:
    chosen = {id(tensor) for part in parts for tensor in itertools.chain(part.parameters(), part.buffers())}
    names = [
        name
        for name, group in mover.groups.items()
        if id(group.tensor) in chosen and not mover.is_others(name) and wish.changes(mover, name)
    ]
    with _all_or_nothing(mover):
        mover.stage_plain(names, lambda name: wish.of(mover, name))
        mover.commit(delete=delete)


def _tier(to: str) -> Tier:
    if to not in (Tier.CPU.value, Tier.DISK.value):
        raise PlanError(f"to={to!r} is no place to offload to. Write to='cpu' or to='disk'")
    return Tier(to)


def _within_manager(model: nn.Module, paths: list[str]) -> tuple[nn.Module, list[str]]:
    """`paths` in the larger model that `model` is a part of, if that is managed already: it has one manager."""
    for manager in managers_of(model):
        for path, module in manager.model.named_modules():
            if module is model:
                return manager.model, [".".join(filter(None, (path, below))) for below in paths]
    return model, paths


def _to_move(mover: Mover, paths: list[str], tier: Tier, min_bytes: int) -> tuple[list[str], list[str]]:
    """The names of the tensors that move, and of those below `paths` that stay."""
    moving: list[str] = []
    stayed: list[str] = []
    already: list[str] = []
    for name, group in mover.groups.items():
        if not holds(paths, group):
            continue
        if group.tensor.is_meta:
            refuse([name], "on the meta device, without values. Load the model first: overspill.load")
        if mover.is_others(name):
            refuse([name], "offloaded with another module that it is tied to. Name it in the model that holds both")
        if tier_of(group.tensor) is tier:
            already.append(name)
        elif _is_worth_it(group, paths, min_bytes):
            moving.append(name)
        else:
            stayed.append(name)
    if already:
        place = "on disk" if tier is Tier.DISK else "in host memory"
        refuse(already, f"already offloaded, {place}. Restore it first, or name other modules")
    if not moving:
        raise NothingToOffloadError(
            f"nothing to offload: no leaf below {', '.join(map(repr, paths))} holds {min_bytes} bytes or more. "
            "Lower min_bytes, or name other modules"
        )
    return moving, stayed


def _is_worth_it(group: TensorGroup, paths: Sequence[str], min_bytes: int) -> bool:
    if not group.persistent:
        return False
    selected = [place for place in group.places if any(is_below(owner_path(place), path) for path in paths)]
    return any(_leaf_bytes(place) >= max(min_bytes, 1) or min_bytes == 0 for place in selected)


def _leaf_bytes(place: Place) -> int:
    """Bytes of all that a module holds itself and would store."""
    module = place.module
    own: list[torch.Tensor | None] = [*module._parameters.values()]
    own += [buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set]
    # Not `nbytes`, which sparse tensors refuse to tell: whoever stages one is told its name.
    return sum(tensor.numel() * tensor.element_size() for tensor in own if tensor is not None)


def _device(mover: Mover, names: Sequence[str], given: torch.device | str | int | None) -> torch.device:
    """Where a unit computes: where it is told to, else where its tensors are now."""
    if given is not None:
        return compute_device(given)
    devices = list(dict.fromkeys(mover.device_of(name) for name in names))
    if len(devices) > 1:
        where = ", ".join(map(str, devices))
        raise PlanError(f"{names[0]} and others of its module are on different devices ({where}). Pass device=")
    return devices[0]


def _refuse_no_op(mover: Mover, placements: Sequence[Placement]) -> None:
    for placement in placements:
        for name in placement.unit.tensors:
            tensor = mover.groups[name].tensor
            if placement.tier is not Tier.CPU or placement.device != CPU or tier_of(tensor) is not Tier.DEVICE:
                continue
            if tensor.device == CPU:
                raise StateError(
                    f"{name} is in host memory and computes there, so to='cpu' would change nothing. "
                    "Pass device=0 to compute on a GPU, or to='disk'"
                )
            raise StateError(
                f"{name} is on {tensor.device}: to='cpu' and device='cpu' would bring it to host memory to stay, and "
                f"nothing would be streamed. Call model.to('cpu') for that, or leave out device to compute on "
                f"{tensor.device}"
            )


def _left_behind(
    mover: Mover, placements: Sequence[Placement], paths: Sequence[str], moving: Collection[str]
) -> dict[str, torch.device]:
    """Tensors that stay in the modules that were named or moved, and are not where those compute; and where that is."""
    where = {}
    for name, group in mover.groups.items():
        if name in moving or group.tensor.is_meta or tier_of(group.tensor) is not Tier.DEVICE:
            continue
        near = next((placement for placement in placements if holds(placement.unit.roots, group)), None)
        if near is None and holds(paths, group):
            near = placements[0]
        if near is not None and group.tensor.device != near.device:
            where[name] = near.device
    return where


def _report(mover: Mover, placements: Sequence[Placement], files: Sequence[Path], stayed: Sequence[str]) -> Offloaded:
    names = [name for placement in placements for name in placement.unit.tensors]
    return Offloaded(
        modules=tuple(dict.fromkeys(placement.unit.name for placement in placements)),
        nbytes=sum(mover.groups[name].spec.nbytes for name in names),
        files=tuple(files),
        stayed=tuple(stayed),
    )

"""Adopt a model that Accelerate has dispatched: its weights stay where they are, and stream from there.

First the model is shown as it really is: ordinary tensors over the memory that Accelerate keeps aside, disk homes over
its files, ties as they were. From there on it is a model in memory like any other, to be arranged by a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from overspill.bundles import BundleTensor
from overspill.checkpoint.index import FileSpan
from overspill.devices import CPU, free_memory
from overspill.errors import PlanError, StateError
from overspill.files import Files
from overspill.homes import DiskValues, disk_home, plain_parameter
from overspill.integrations.accelerate import Dispatch, Dispatched, is_dispatched, read_dispatch, remove_dispatch
from overspill.managed import managers_of
from overspill.moving import Mover
from overspill.offloading import arrange, changing
from overspill.plan import Plan, Tier
from overspill.streamed import refresh_flat_weights, table_of
from overspill.tensors import TensorGroup, TensorSpec, tensor_groups
from overspill.units import Unit, slab_size
from overspill.windows import least_window, usual_window


def adopt_model(model: nn.Module, plan: Plan | None) -> None:
    """Take over from Accelerate, where it put things, or where `plan` wants them."""
    with changing(model, "adopt a model"):
        if managers_of(model):
            raise StateError("this model is managed by overspill already, in whole or in part")
        if not is_dispatched(model):
            raise StateError(
                "this model carries no hooks of Accelerate's, so there is nothing to adopt. "
                "To offload a model that is in memory, use overspill.offload"
            )
        if plan is not None and plan.dtype is not None:
            raise PlanError(f"the plan casts to {plan.dtype}, and adopted weights keep their dtypes. Leave dtype= out")
        dispatch = read_dispatch(model)
        put_back = remove_dispatch(model)
        shown = _Shown(model, dispatch)
        try:
            shown.show_all()
            mover = Mover(model, [], files=shown.files, remember=False)
            plan = _as_dispatched(model, shown.where) if plan is None else _with_ties(plan, mover.groups)
            arrange(mover, plan, folder=None)
        except BaseException:
            shown.undo()
            put_back()
            raise


class _Shown:
    """The model's own tensors in place of Accelerate's placeholders."""

    def __init__(self, model: nn.Module, dispatch: Dispatch) -> None:
        self.files = Files()
        self.where: dict[str, tuple[Tier, torch.device]] = {}
        """By the first name of each tensor: where Accelerate has it."""
        self._model, self._dispatch = model, dispatch
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def show_all(self) -> None:
        """Put everything in place, each tie as one tensor."""
        groups = tensor_groups(self._model)
        tied = {path: paths[0] for paths in self._dispatch.ties for path in paths}
        together: dict[str, list[TensorGroup]] = {}
        for name, group in groups.items():
            together.setdefault(tied.get(name, name), []).append(group)
        first = [parts[0] for parts in together.values()]
        converted = self._convert([group for group in first if _needs_cast(self._dispatch[group.name])])
        for parts in together.values():
            values, like = self._dispatch[parts[0].name], parts[0].tensor
            tensor = self._tensor(values, like, converted)
            self.where[parts[0].name] = _place(values)
            if tensor is not like or len(parts) > 1:
                self._show(parts, tensor)

    def undo(self) -> None:
        """Show what was shown before."""
        while self._before:
            table, name, tensor = self._before.pop()
            table[name] = tensor
        for module in self._model.modules():
            refresh_flat_weights(module)

    def _show(self, parts: list[TensorGroup], tensor: torch.Tensor) -> None:
        for place in (place for part in parts for place in part.places):
            table = table_of(place)
            self._before.append((table, place.name, table[place.name]))
            table[place.name] = tensor
            refresh_flat_weights(place.module)

    def _tensor(self, values: Dispatched, like: torch.Tensor, converted: Mapping[str, FileSpan]) -> torch.Tensor:
        if values.tensor is like:
            return like
        if values.tensor is not None:
            tensor = plain_parameter(values.tensor.detach().to(values.dtype), like)
            tensor.__dict__.update(like.__dict__)
            return tensor
        spec = TensorSpec(tuple(like.shape), values.dtype)
        spans = [converted[values.name]] if values.name in converted else values.spans
        return disk_home(DiskValues(values.name, spec, spans, self.files.reader), like)

    def _convert(self, groups: Sequence[TensorGroup]) -> dict[str, FileSpan]:
        """What is on disk in another dtype than the model computes with, written to a file of our own, once."""
        if not groups:
            return {}
        written = [self._cast(group) for group in groups]
        bundle = self.files.write({"converted": written}, None, fingerprint="adopted")[0]
        return {
            tensor.name: FileSpan(bundle.file, bundle.offsets[tensor.name], tensor.spec.nbytes) for tensor in written
        }

    def _cast(self, group: TensorGroup) -> BundleTensor:
        values, shape = self._dispatch[group.name], group.spec.shape
        stored = DiskValues(group.name, TensorSpec(shape, values.stored_dtype), values.spans, self.files.reader)

        def read() -> torch.Tensor:
            return stored.read().to(values.dtype).view(-1).view(torch.uint8)

        return BundleTensor(group.name, TensorSpec(shape, values.dtype), None, read)


def _needs_cast(values: Dispatched) -> bool:
    return values.where == "disk" and values.stored_dtype != values.dtype


def _place(values: Dispatched) -> tuple[Tier, torch.device]:
    device = values.execution_device
    if values.where == "disk":
        return Tier.DISK, device
    if values.where == "cpu" and device != CPU:
        return Tier.CPU, device
    assert values.tensor is not None
    return Tier.DEVICE, values.tensor.device


def _as_dispatched(model: nn.Module, where: Mapping[str, tuple[Tier, torch.device]]) -> Plan:
    """The plan that leaves everything where Accelerate has it."""
    main = next((device for _, device in where.values() if device != CPU), CPU)
    plan = Plan.of_places(model, where, main)
    streamed = [placement.unit for placement in plan.placements if placement.tier is not Tier.DEVICE]
    # Nobody has budgeted for a window: an ample one only where it leaves as much again to compute with.
    room = free_memory(main) // 2
    if plan.window <= room:
        return plan
    return Plan.of_places(model, where, main, window=max(least_window(streamed), min(room, usual_window(streamed))))


def _with_ties(plan: Plan, groups: Mapping[str, TensorGroup]) -> Plan:
    """`plan`, made for the model with its ties broken, for the same model with its ties."""
    first = {name: group.name for group in groups.values() for name in group.names if name != group.name}
    needed_by: dict[str, list[str]] = {}
    for unit in (placement.unit for placement in plan.placements):
        for name in unit.tensors:
            needed_by.setdefault(first.get(name, name), []).extend(unit.roots)
    placements = [replace(p, unit=_whole(p.unit, first, needed_by, groups)) for p in plan.placements]
    stays = tuple(name for name in plan.stays if name not in first)
    return replace(
        plan,
        placements=tuple(placement for placement in placements if placement.unit.tensors),
        stays=stays,
        stays_nbytes=sum(slab_size(groups[name], None) for name in stays if name in groups),
    )


def _whole(
    unit: Unit, first: Mapping[str, str], needed_by: Mapping[str, Sequence[str]], groups: Mapping[str, TensorGroup]
) -> Unit:
    """A unit without what another one has, for all modules that need what it has itself."""
    tensors = tuple(name for name in unit.tensors if name not in first)
    roots = tuple(dict.fromkeys(root for name in tensors for root in needed_by[name]))
    if tensors == unit.tensors and roots == unit.roots:
        return unit
    return replace(unit, tensors=tensors, roots=roots, nbytes=sum(slab_size(groups[name], None) for name in tensors))

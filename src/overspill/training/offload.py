"""offload_training: a model that trains with its blocks' activations and weights elsewhere."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from overspill.attach import Arguments, Scope
from overspill.config import format_size, parse_size
from overspill.devices import CPU, compute_device, free_memory, running_backward
from overspill.errors import BudgetError, PlanError, StateError
from overspill.host_link import ONE_BY_ONE
from overspill.managed import managers_of
from overspill.offloading import manage_training, offload_parts, refuse_managed
from overspill.plan import Placement
from overspill.tensors import TensorGroup, tensor_groups
from overspill.training.activations import Activations, Limits
from overspill.training.blocks import Block, choose_blocks, find_blocks, set_modes
from overspill.training.host_room import HostRoom
from overspill.training.inputs import EditedInputs
from overspill.training.measuring import Measurement
from overspill.training.modes import Mode
from overspill.training.optimizers import OptimizerWatch
from overspill.units import Unit, is_below, owner_path
from overspill.windows import in_a_row, least_window, usual_window


class StepScope:
    """Around one call of the whole model."""

    def __init__(self, training: "OffloadedTraining", refresh: Callable[[], None]) -> None:
        refresh()
        training.begin_step()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return args, kwargs

    def leave(self, output: Any) -> Any:
        return output


class OffloadedTraining:
    """What leads the calls of a model's blocks while it trains. Lives in the model's manager."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], *, double_buffering: bool) -> None:
        self.model, self.blocks = model, list(blocks)
        self._double_buffering = double_buffering
        self.frozen_only = False
        """Whether trained weights stay where they are."""
        self.edits_files = False
        self.optimizers: OptimizerWatch | None = None
        """Of the model, where its parameters move."""
        self.measurement: Measurement | None = None
        """Of the first step, where the modes of the blocks are to be chosen."""

    def scopes(self, refresh: Callable[[], None]) -> Mapping[nn.Module, Callable[[], Scope]]:
        scopes: dict[nn.Module, Callable[[], Scope]] = {block.module: block.scope for block in self.blocks}
        return {self.model: partial(StepScope, self, refresh), **scopes}

    def begin_step(self) -> None:
        """A call of the whole model begins."""
        trains = torch.is_grad_enabled() and running_backward() is None
        if self.measurement is not None and trains and self.measurement.begin_step():
            self.measurement = None

    def end(self) -> None:
        """What graphs still hold of it goes with them; all else is undone here."""
        if self.optimizers is not None:
            self.optimizers.end()

    # What `offload_parts` asks for the weights.

    def moves(self, group: TensorGroup) -> bool:
        return not (self.frozen_only and group.tensor.requires_grad)

    def windows(self, placements: Sequence[Placement]) -> Mapping[torch.device, int]:
        units: dict[torch.device, list[Unit]] = {}
        for placement in placements:
            units.setdefault(placement.device, []).append(placement.unit)
        size = usual_window if self._double_buffering else _two_deep
        return {device: size(mine) for device, mine in units.items()}


def _two_deep(units: Sequence[Unit]) -> int:
    """Room for a unit that computes and one that arrives."""
    return max(least_window(units), in_a_row(units, 2))


def offload_for_training(
    model: nn.Module,
    *,
    layers: int | Collection[str] | None,
    activations: bool | Literal["disk"],
    weights: bool | Literal["disk"],
    recompute: bool,
    double_buffering: bool,
    memory: int | str | None,
) -> None:
    """Set `model` up: see `overspill.offload_training`."""
    if torch.is_inference_mode_enabled():
        raise StateError("inference_mode is on, where nothing can be trained. Call offload_training outside of it")
    _check_what_leaves(activations, weights)
    if memory is not None and (layers is not None or recompute):
        given = "layers" if layers is not None else "recompute"
        raise PlanError(f"{given} has no effect beside memory=, which chooses for each block. Pass one of the two")
    refuse_managed(model)
    paths = choose_blocks(model, layers)
    if memory is not None and weights:
        paths = find_blocks(model)  # the last one's weights would, with their gradients, take the room of two others
    device = _device_of(model)
    limits = Limits.usual(device, double_buffering=double_buffering)
    saved = Activations(device, limits, to_disk=activations == "disk")
    mode = _MODES[bool(activations), recompute or memory is not None]
    watched = paths if memory is None else find_blocks(model)
    modules = {path: model.get_submodule(path) for path in watched}
    room = HostRoom(saved, modules)
    edited = {type(module): EditedInputs() for module in modules.values()}
    blocks = [Block(path, module, saved, room, edited[type(module)]) for path, module in modules.items()]
    set_modes(blocks, [mode] * len(blocks))
    training = OffloadedTraining(model, blocks, double_buffering=double_buffering)
    if memory is not None:
        allowed = list(Mode) if activations else [Mode.KEEP, Mode.RECOMPUTE]
        training.measurement = Measurement(blocks, parse_size(memory, what="memory"), allowed)
    if not weights or not paths:
        manage_training(model, training)
        return
    groups = _weights_of(model, paths)
    if weights == "disk":
        # Adapters beside frozen weights are small, and stay where they compute.
        training.frozen_only = any(not group.tensor.requires_grad for group in groups if group.kind == "parameter")
        training.edits_files = not training.frozen_only
    to = "disk" if weights == "disk" else "cpu"
    if not training.frozen_only:
        _check_host_memory(groups, len(paths), device, of_weights=to == "cpu")
    training.optimizers = OptimizerWatch(model)
    offload_parts(model, to=to, modules=paths, folder=None, device=None, min_bytes=0, training=training)
    if not double_buffering:
        _send_one_by_one(model)


def _check_what_leaves(activations: bool | str, weights: bool | str) -> None:
    for name, value in (("activations", activations), ("weights", weights)):
        if value not in (True, False, "disk"):
            raise PlanError(f"{name}={value!r} cannot be meant. Write True for host memory, 'disk', or False")
    if not activations and not weights:
        raise PlanError("activations and weights are both off, so nothing would be offloaded. Turn one of them on")


_MODES = {
    (False, False): Mode.KEEP,
    (True, False): Mode.OFFLOAD,
    (False, True): Mode.RECOMPUTE,
    (True, True): Mode.RECOMPUTE_OFFLOAD,
}
"""By whether activations leave, and whether blocks are recomputed."""


def _device_of(model: nn.Module) -> torch.device:
    """Where a model computes: where most of it is."""
    sizes: dict[torch.device, int] = {}  # in elements: sparse tensors do not tell their bytes
    for group in tensor_groups(model).values():
        if group.tensor.is_meta:
            raise StateError(
                f"{group.name} is on the meta device, without values. Load the model first: overspill.load"
            )
        sizes[group.tensor.device] = sizes.get(group.tensor.device, 0) + group.tensor.numel()
    return max(sizes, key=lambda device: sizes[device], default=CPU)


def _weights_of(model: nn.Module, paths: Sequence[str]) -> list[TensorGroup]:
    """The tensors of the blocks at `paths`."""
    return [
        group
        for group in tensor_groups(model).values()
        if any(is_below(owner_path(place), path) for place in group.places for path in paths)
    ]


def _check_host_memory(groups: Sequence[TensorGroup], blocks: int, device: torch.device, *, of_weights: bool) -> None:
    """Whether there is room for what the blocks will leave in host memory, before anything is moved."""
    gradients = sum(group.spec.nbytes for group in groups if group.tensor.requires_grad)
    weights = sum(group.spec.nbytes for group in groups) if of_weights else 0
    if device != CPU and gradients + weights > (free := free_memory(CPU)):
        what = "weights and gradients" if of_weights else "gradients"
        raise BudgetError(
            f"the {what} of these {blocks} blocks need {format_size(gradients + weights)} of host memory, where "
            f"{format_size(free)} are free. Give fewer layers"
        )


def _send_one_by_one(model: nn.Module) -> None:
    """Have the gradients of one block at most be on their way while those of another are computed."""
    for manager in managers_of(model):
        for transfer in manager.transfers.values():
            transfer.host_link.pace = ONE_BY_ONE


@contextmanager
def activations_offloaded(*, to: str, min_bytes: int | str | None, double_buffering: bool) -> Iterator[None]:
    """Within, saved tensors leave: see `overspill.offload_activations`."""
    if torch.is_inference_mode_enabled():
        raise StateError("inference_mode is on, where nothing is saved for a backward. Leave offload_activations out")
    device = compute_device()
    limits = Limits.usual(device, double_buffering=double_buffering)
    if min_bytes is not None:
        limits = replace(limits, small=parse_size(min_bytes, what="min_bytes"))
    if to not in ("cpu", "disk"):
        raise PlanError(f"to={to!r} is no place for saved tensors. Write to='cpu' or to='disk'")
    with Activations(device, limits, to_disk=to == "disk").saving():
        yield

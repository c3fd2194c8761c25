"""Load, dispatch, offload and undo, as Accelerate's callers ask for it.

Note: arguments that change nothing here, since what they are for is always so or never needed. `offload_buffers`: large
buffers go with their modules, small ones are where they compute. `offload_state_dict`: a load holds no state dict.
`offload_folder` where nothing is converted: disk weights are read from the checkpoint itself. Arguments that would give
another result than they promise raise instead.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from overspill.api import adopt, load, offload, restore
from overspill.attach import ModelScope
from overspill.compat.accelerate.dtypes import as_cast, loading_in
from overspill.compat.accelerate.planning import (
    DeviceMap,
    MaxMemory,
    Names,
    blocks_of,
    map_of,
    plan_by_map,
    plan_by_strategy,
)
from overspill.compat.accelerate.whole import refuse_meta, remove_hooks
from overspill.devices import CPU, compute_device
from overspill.errors import CheckpointMismatchError, PlanError, StateError
from overspill.files import Files
from overspill.homes import plain_parameter
from overspill.integrations.accelerate import is_dispatched
from overspill.managed import Managed, managed, managers_of
from overspill.moving import Mover, tier_of
from overspill.offloading import arrange, changing
from overspill.plan import Plan, Tier
from overspill.rehoming import let_go, turn_into_plain
from overspill.streamed import refresh_flat_weights, table_of
from overspill.tensors import TensorGroup, TensorSpec, tensor_groups

logger = logging.getLogger(__name__)

_SKIPPED = "_skip_keys_device_placement"  # where models, as Transformers' do, name arguments that are not to be moved
_MAP = "hf_device_map"  # what generation, pipelines, Trainer and PEFT look at

Path = str | os.PathLike[str]
StateDict = Mapping[str, torch.Tensor]


# Load.


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path,
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Fill a model from a checkpoint, each tensor where the map says, from where it runs without further ado.

    Args:
        model: Any module, mostly a skeleton.
        checkpoint: A safetensors file, a folder, an index.json, or a `.bin` file (no code in it is run).
        device_map: Dotted paths to an index, a device, "cpu" or "disk". None: tensors are loaded where the model has
            them, or in host memory if it has none; parameters that it has stay the objects that they are.
        offload_folder: For what must be converted, and nothing else. None: a temporary folder.
        dtype: Cast floating-point weights to this.
        offload_state_dict: Changes nothing: a load never holds a state dict.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        keep_in_fp32_modules: Names of modules that keep float32 whatever `dtype` says.
        offload_8bit_bnb: Refused: load a checkpoint that is quantized.
        strict: Every key of the checkpoint must be in the model. The other way round it must be in any case.
        full_state_dict: Must be True: each process reads a whole checkpoint.
        broadcast_from_rank0: Must be False, for the same reason.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, unsafe or another model's.
        PlanError: A map that leaves something out, or an argument that is refused.
    """
    _refuse_distributed(full_state_dict, broadcast_from_rank0)
    if offload_8bit_bnb:
        raise PlanError("offload_8bit_bnb: weights are not quantized here. Load a checkpoint that is, or leave it out")
    cast = as_cast(dtype)
    with loading_in(model, cast, keep_in_fp32_modules or ()):
        if device_map is None:
            _load_in_place(model, checkpoint, strict)
        else:
            plan = plan_by_map(model, device_map)
            load(model, checkpoint, plan, strict=strict, offload_folder=offload_folder)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Path,
    device_map: str | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Names = None,
    offload_folder: Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Names = None,
    preload_module_classes: Names = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Fill a model from a checkpoint and make it run from wherever its weights are. Returns `model`.

    Args:
        model: Any module, mostly a skeleton.
        checkpoint: A safetensors file, a folder, an index.json, or a `.bin` file (no code in it is run).
        device_map: "auto" and its like, or dotted paths to an index, a device, "cpu" or "disk". None: load only.
        max_memory: Within which a map is found. It changes nothing beside one that is given.
        no_split_module_classes: Class names of blocks that stay whole. None: found by themselves.
        offload_folder: For what must be converted, and nothing else. None: a temporary folder.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        dtype: Cast floating-point weights to this.
        offload_state_dict: Changes nothing: a load never holds a state dict.
        skip_keys: Arguments of the model's call that are not moved to where it computes.
        preload_module_classes: One unit each.
        force_hooks: With all of the model on one device too, inputs are brought there and outputs back.
        strict: Every key of the checkpoint must be in the model. The other way round it must be in any case.
        full_state_dict: Must be True: each process reads a whole checkpoint.
        broadcast_from_rank0: Must be False, for the same reason.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, unsafe or another model's.
        PlanError: A map that leaves something out, or an argument that is refused.
        BudgetError: A size that cannot be read, or a budget that not even one block fits in.
    """
    _refuse_distributed(full_state_dict, broadcast_from_rank0)
    cast = as_cast(dtype)
    if device_map is None:
        load_checkpoint_in_model(model, checkpoint, dtype=cast, strict=strict)
        return model
    blocks = blocks_of(model, no_split_module_classes, preload_module_classes)
    if isinstance(device_map, str):
        plan = plan_by_strategy(model, device_map, max_memory, blocks, cast)
        shown: DeviceMap = map_of(model, plan)
    else:
        plan, shown = plan_by_map(model, device_map, blocks=blocks, dtype=cast), dict(device_map)
    with _skipping(model, skip_keys):
        load(model, checkpoint, plan, strict=strict, offload_folder=offload_folder)
    _lead_calls(model, plan, force_hooks)
    model.__dict__[_MAP] = shown
    return model


def _refuse_distributed(full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if not full_state_dict:
        raise PlanError("full_state_dict=False: parts of tensors are not loaded here. Pass a whole checkpoint")
    if broadcast_from_rank0:
        raise PlanError("broadcast_from_rank0: each process reads the checkpoint itself here. Leave it out")


def _load_in_place(model: nn.Module, checkpoint: Path, strict: bool) -> None:
    """As `load_state_dict` does it: the model is an ordinary one before and after."""
    groups = tensor_groups(model)
    where = {name: (Tier.DEVICE, CPU if g.tensor.is_meta else g.tensor.device) for name, g in groups.items()}
    main = next((device for _, device in where.values() if device != CPU), CPU)
    load(model, checkpoint, Plan.of_places(model, where, main), strict=strict)
    restore(model)
    held = {name: group.tensor for name, group in groups.items() if not group.tensor.is_meta}
    for name, loaded in tensor_groups(model).items():
        if name in held:
            turn_into_plain(held[name], loaded.tensor.detach(), type(held[name]))
            _show(loaded, held[name])
    let_go()


def _show(group: TensorGroup, tensor: torch.Tensor) -> None:
    for place in group.places:
        table_of(place)[place.name] = tensor
        refresh_flat_weights(place.module)


# Dispatch.


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: torch.device | str | int | None = None,
    state_dict: StateDict | None = None,
    offload_dir: Path | None = None,
    offload_index: Mapping[str, object] | None = None,
    offload_buffers: bool = False,
    skip_keys: Names = None,
    preload_module_classes: Names = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put each part of a model where the map says, and make it run from there. Returns `model`.

    A model that is dispatched already, here or by Accelerate, is rearranged.

    Args:
        model: In memory, or dispatched.
        device_map: Dotted paths to an index, a device, "cpu" or "disk". "" is all the rest.
        main_device: Where what rests on "cpu" and "disk" computes. None: on the first accelerator in the map.
        state_dict: Values to take in place of those in the model.
        offload_dir: For what goes to disk. None: a temporary folder that ends with the model.
        offload_index: Refused: load the checkpoint itself, which is read where it lies.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        skip_keys: Arguments of the model's call that are not moved to where it computes.
        preload_module_classes: One unit each.
        force_hooks: With all of the model on one device too, inputs are brought there and outputs back.

    Raises:
        PlanError: A map that leaves something out, or an argument that is refused.
        StateError: A part of the model has no values.
        OffloadFolderError: The folder is another model's or another user's, or cannot be written.
    """
    if offload_index is not None:
        raise PlanError(
            "offload_index: weights that another program has written are not read from an index. Load the checkpoint "
            "itself with load_checkpoint_and_dispatch, which reads what is on disk where it lies"
        )
    _take(model, state_dict)
    plan = plan_by_map(model, device_map, main_device, blocks_of(model, None, preload_module_classes))
    with _skipping(model, skip_keys):
        _place(model, plan, offload_dir)
    _lead_calls(model, plan, force_hooks)
    model.__dict__[_MAP] = dict(device_map)
    return model


def _place(model: nn.Module, plan: Plan, folder: Path | None) -> None:
    if is_dispatched(model):
        adopt(model, plan)
        return
    if _is_placed(model, plan):
        return
    folder = folder if plan.disk_bytes else None
    managers = managers_of(model)
    if not managers:
        offload(model, plan, folder=folder)
        return
    if any(manager.model not in set(model.modules()) for manager in managers):
        raise StateError("this module is a part of a model that is dispatched already. Dispatch that one")
    with changing(model, "dispatch a model"):
        arrange(Mover(model, managers), plan, folder)


def _is_placed(model: nn.Module, plan: Plan) -> bool:
    """Whether all of it is where `plan` wants it."""
    where = {name: (p.tier, p.device) for p in plan.placements for name in p.unit.tensors}
    where |= {name: (Tier.DEVICE, plan.device_of(name)) for name in plan.stays}
    manager = managed(model)
    for name, group in tensor_groups(model).items():
        tier, device = where[name]
        if group.tensor.is_meta or tier_of(group.tensor) is not tier:
            return False
        if (group.tensor.device if tier is Tier.DEVICE or manager is None else manager.plan.device) != device:
            return False
    return True


def _lead_calls(model: nn.Module, plan: Plan, force: bool) -> None:
    """Bring the inputs of a model in which nothing streams to its parts, where these are on several devices.

    A model on one device is an ordinary one, whose callers bring its inputs there: unless they `force` it.
    """
    manager = managed(model)
    if manager is None and (len(plan.devices) > 1 or force):
        manager = Managed(model, plan, {}, {}, {}, Files())
    if manager is not None and force and len(plan.devices) == 1 and not plan.windows:
        manager.intercept(model, [partial(ModelScope, plan.device, _skipped_keys(model), manager.refresh)])


def _skipped_keys(model: nn.Module) -> list[str]:
    keys = getattr(model, _SKIPPED, None) or ()
    return [keys] if isinstance(keys, str) else list(keys)


@contextmanager
def _skipping(model: nn.Module, skip_keys: Names) -> Iterator[None]:
    """Have the model say that `skip_keys` are not to be moved. If what happens within fails, it does not say so."""
    before = {_SKIPPED: model.__dict__[_SKIPPED]} if _SKIPPED in model.__dict__ else {}
    if skip_keys is not None:
        given = [skip_keys] if isinstance(skip_keys, str) else skip_keys
        model.__dict__[_SKIPPED] = list(dict.fromkeys([*_skipped_keys(model), *given]))
    try:
        yield
    except BaseException:
        model.__dict__.pop(_SKIPPED, None)
        model.__dict__.update(before)
        raise


def _take(model: nn.Module, state_dict: StateDict | None) -> None:
    """Let the model have the values in `state_dict`, ties and parameters as they are."""
    if state_dict is None:
        return
    groups = tensor_groups(model)
    found = {name: key for name, group in groups.items() for key in group.names if key in state_dict}
    for name, key in found.items():
        ours, theirs = groups[name].spec, TensorSpec.of(state_dict[key])
        if ours.shape != theirs.shape:
            raise CheckpointMismatchError(f"state_dict has {key} as {theirs}, and the model as {ours}")
    with torch.no_grad():
        for name, key in found.items():
            tensor, values = groups[name].tensor, state_dict[key].detach()
            if tensor.is_meta:
                taken = plain_parameter(values.to(tensor.dtype), tensor)
                taken.__dict__.update(tensor.__dict__)
                _show(groups[name], taken)
            else:
                tensor.copy_(values)


# Offload all of it.


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    state_dict: StateDict | None = None,
    preload_module_classes: Names = None,
) -> nn.Module:
    """Move a model to host memory, and stream it from there when it runs. Returns `model`.

    Args:
        model: In memory, or dispatched.
        execution_device: Where it computes. None: where it does now.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        state_dict: Values to take in place of those in the model.
        preload_module_classes: Changes nothing: weights that are used without a call of their module are read in place.

    Raises:
        StateError: A part of the model has no values.
    """
    _take(model, state_dict)
    device = _execution_device(model, execution_device)
    if device == CPU and not managers_of(model):
        model.to(CPU)
        logger.info("%s computes on the CPU, so its weights are where they compute", type(model).__name__)
        return model
    offload(model, to="cpu", device=device, min_bytes=0)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: Path,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Names = None,
) -> nn.Module:
    """Move a model to a folder, and stream it from there when it runs. Returns `model`.

    Args:
        model: In memory, or dispatched.
        offload_dir: What lies there already is neither read nor overwritten.
        execution_device: Where it computes. None: where it does now.
        offload_buffers: Changes nothing: large buffers go with their modules, small ones are where they compute.
        preload_module_classes: Changes nothing: weights that are used without a call of their module are read in place.

    Raises:
        OffloadFolderError: The folder is another model's or another user's, or cannot be written.
        StateError: A part of the model has no values.
    """
    device = _execution_device(model, execution_device)
    offload(model, to="disk", folder=offload_dir, device=device, min_bytes=0)
    return model


def _execution_device(model: nn.Module, given: torch.device | str | int | None) -> torch.device:
    """Where the model is to compute: where it is told to, or where it does."""
    if is_dispatched(model):
        adopt(model)
    refuse_meta(model)
    if given is not None:
        return compute_device(given)
    manager = managed(model)
    if manager is not None:
        return manager.plan.device
    return next((parameter.device for parameter in model.parameters()), CPU)


# Undo.


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Make a module an ordinary one, with all of its weights and edits in memory: see `overspill.restore`.

    If there is not enough memory, it raises and the module stays as it is.

    Args:
        module: Offloaded or dispatched, here or by Accelerate. Nothing happens to an ordinary one.
    """
    remove_hooks(module)
    if is_dispatched(module) or managers_of(module):
        restore(module)
    for part in module.modules():
        part.__dict__.pop(_MAP, None)  # it would say that weights are away which are not
        part.__dict__.pop(_SKIPPED, None)

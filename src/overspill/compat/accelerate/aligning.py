"""A module's own parameters on a device for a while: whoever edits them there edits the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.devices import CPU, compute_device
from overspill.errors import StateError
from overspill.homes import plain_parameter
from overspill.integrations.accelerate import is_dispatched
from overspill.managed import managers_of
from overspill.moving import tier_of
from overspill.plan import Tier
from overspill.streamed import LiveParameter, refresh_flat_weights
from overspill.tensors import TensorSpec


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a parameter of a module itself is offloaded. Those of its submodules do not count.

    Args:
        module: In a model that is offloaded, or not.
    """
    hook = module.__dict__.get("_hf_hook")  # of one that Accelerate has dispatched, its hook says so
    own = (parameter for parameter in module._parameters.values() if parameter is not None)
    return bool(getattr(hook, "offload", False)) or any(tier_of(parameter) is not Tier.DEVICE for parameter in own)


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | str | int | None = None) -> Iterator[None]:
    """Within, the parameters of a module itself are ordinary ones on a device. What is written there is kept.

    Args:
        module: Whose own parameters; those of its submodules stay as they are.
        execution_device: Where they are. None: where an offloaded module computes; nothing happens to one that is not.
    """
    if "_hf_hook" in module.__dict__ and is_dispatched(module):
        raise StateError(
            "this module is dispatched by Accelerate, which loses edits. Call overspill.adopt(model) first"
        )
    device = _device_of(module) if execution_device is None else compute_device(execution_device)
    shown = [] if device is None else _show(module, device)
    try:
        yield
    finally:
        for each in shown:
            each.put_back()
        refresh_flat_weights(module)


def _device_of(module: nn.Module) -> torch.device | None:
    own = {id(tensor) for table in _tables(module) for tensor in table.values()}
    for manager in managers_of(module):
        for unit in manager.units.values():
            if any(id(home) in own for home in unit.store.homes):
                return unit.device
    return None


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


@dataclass
class _Shown:
    """One tensor of a module, shown on another device."""

    table: dict[str, Any]
    name: str
    original: torch.Tensor
    tensor: torch.Tensor
    version: int

    def put_back(self) -> None:
        """Show the original again, with what was written, unless somebody has put another tensor there."""
        if self.table.get(self.name) is not self.tensor:
            return
        with torch.inference_mode(False), torch.no_grad():
            values = self.tensor.detach()
            if TensorSpec.of(values) != TensorSpec.of(self.original):
                self.table[self.name] = plain_parameter(values.to(self.original.device), self.original)
                return
            if self._is_edited(values):
                self.original.copy_(values)
        if self.tensor.grad is not None:
            self.original.grad = self.tensor.grad.to(self.original.device)
        self.table[self.name] = self.original

    def _is_edited(self, values: torch.Tensor) -> bool:
        """An edit through `.data` is in no version: where there may have been one, the bytes tell."""
        if self.tensor._version != self.version:
            return True
        if isinstance(self.tensor, LiveParameter) and not self.tensor.data_was_used:
            return False
        before = self.original.detach().clone().contiguous()
        return not torch.equal(_bytes(before), _bytes(values.to(before.device)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _show(module: nn.Module, device: torch.device) -> list[_Shown]:
    """Copies on `device` of what is elsewhere; of what is on disk in any case, so that it is read once."""
    shown = []
    for table in _tables(module):
        for name, tensor in table.items():
            if tensor is None or (tensor.device == device and tier_of(tensor) is not Tier.DISK):
                continue
            if not isinstance(tensor, nn.Parameter) and tier_of(tensor) is Tier.DEVICE:
                continue  # an ordinary buffer, which Accelerate does not move either
            if tensor.is_meta:
                raise StateError(f"{name} is on the meta device, without values. Load the model first")
            shown.append(_show_one(table, name, tensor, device))
    refresh_flat_weights(module)
    return shown


def _show_one(table: dict[str, Any], name: str, tensor: torch.Tensor, device: torch.device) -> _Shown:
    with torch.inference_mode(False), torch.no_grad():
        values = tensor.detach().clone() if device == CPU == tensor.device else tensor.detach().to(device)
        copy = LiveParameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        if tensor.grad is not None:
            copy.grad = tensor.grad.to(device)
    table[name] = copy
    return _Shown(table, name, tensor, copy, copy._version)

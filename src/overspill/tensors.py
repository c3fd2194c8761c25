"""What a tensor is without its values, and which tensors a module holds, each tie counted once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype: all that planning needs to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> "TensorSpec":
        """The same tensor after a cast of floating-point weights to `dtype`; integers and bools keep theirs."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return TensorSpec(self.shape, dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Place:
    """One spot where a tensor hangs in the module tree: `module._parameters[name]` or `module._buffers[name]`."""

    module: nn.Module
    name: str
    path: str


@dataclass
class TensorGroup:
    """One tensor and every place that shows it: ties are one group, so they are counted, moved and stored once."""

    tensor: torch.Tensor
    kind: Literal["parameter", "buffer"]
    persistent: bool
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first path that shows the tensor, in the order of `named_parameters`."""
        return self.places[0].path

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.path for place in self.places)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.of(self.tensor)


def tensor_groups(model: nn.Module) -> dict[str, TensorGroup]:
    """Every parameter and buffer of `model` by its first name, in definition order. Reads no value.

    A module that hangs at two paths shows its tensors at both, so a checkpoint may store either name.
    """
    groups: dict[int, TensorGroup] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for place, tensor, kind, persistent in _own_tensors(module, path):
            group = groups.setdefault(id(tensor), TensorGroup(tensor, kind, persistent))
            group.persistent |= persistent
            group.places.append(place)
    return {group.name: group for group in groups.values()}


def _own_tensors(
    module: nn.Module, path: str
) -> Iterator[tuple[Place, torch.Tensor, Literal["parameter", "buffer"], bool]]:
    prefix = f"{path}." if path else ""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(module, name, prefix + name), parameter, "parameter", True
    for name, buffer in module._buffers.items():
        if buffer is not None:
            persistent = name not in module._non_persistent_buffers_set
            yield Place(module, name, prefix + name), buffer, "buffer", persistent

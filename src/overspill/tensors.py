"""What a tensor is without its values, and which tensors a module holds, each tie counted once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype: all that planning needs to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = field(default=None, compare=False)
    """Where the elements lie, for a tensor that is dense but not in order: channels_last, a transpose. Else None."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def laid_out_as(cls, tensor: torch.Tensor) -> "TensorSpec":
        """With the order of its elements: kernels may compute other bits where that changes."""
        strides = None if tensor.is_contiguous() or not is_dense(tensor) else tuple(tensor.stride())
        return cls(tuple(tensor.shape), tensor.dtype, strides)

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
        return TensorSpec(self.shape, dtype, self.strides)

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Flat `elements` as a tensor of this shape and order."""
        if self.strides is None:
            return elements.view(self.shape)
        return elements.as_strided(self.shape, self.strides, elements.storage_offset())

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor`, which has this shape, one after the other in this order. Views it if it can."""
        if self.strides is None:
            return tensor.contiguous().view(-1)
        if tuple(tensor.stride()) != self.strides:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())

    def empty(self, device: torch.device) -> torch.Tensor:
        """Fresh memory for such a tensor."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """What is equal for tensors that share their memory; 0 for those that have none of the usual sort."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses
        return 0


class Place(NamedTuple):  # there are as many as tensors, and nothing that cannot be changed is made faster
    """One spot where a tensor hangs in the module tree: `module._parameters[name]` or `module._buffers[name]`."""

    module: nn.Module
    name: str
    path: str


@dataclass(slots=True)
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
    waiting = [("", model)]  # a list, since generators in generators are slow where there are many modules
    while waiting:
        prefix, module = waiting.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _note(groups, parameter, "parameter", True, Place(module, name, prefix + name))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                _note(groups, buffer, "buffer", persistent, Place(module, name, prefix + name))
        children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        waiting += reversed(children)
    return {group.places[0].path: group for group in groups.values()}


def _note(
    groups: dict[int, TensorGroup],
    tensor: torch.Tensor,
    kind: Literal["parameter", "buffer"],
    persistent: bool,
    place: Place,
) -> None:
    group = groups.get(id(tensor))
    if group is None:
        groups[id(tensor)] = TensorGroup(tensor, kind, persistent, [place])
    else:
        group.persistent |= persistent
        group.places.append(place)


def view_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Elements of `storage` from byte `start` on, as a tensor that autograd does not know for a view.

    No strides: the elements lie in order.
    """
    with torch.inference_mode(False), torch.no_grad():
        return over(storage, dtype, start, shape, stride)


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """`view_over` where inference mode is off for sure, as in a backward: its contexts are half of its time."""
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, start // dtype.itemsize, tuple(shape), tuple(stride))

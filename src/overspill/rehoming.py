"""A tensor object turned into a home and back: whoever holds the parameter, an optimizer for one, still holds it.

Note: how an object changes. To other host memory, or between devices, by `.data`: the object stays, its memory is
another. To and from a disk home, which has no memory and another dispatch, by exchanging the bodies of two Python
objects, as torch's own `swap_tensors` does; unlike that function we allow weak references, which compilers hold on
parameters and which go on meaning the same object. A body that a graph has saved cannot be exchanged: the gradient
would arrive at the old one.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.errors import StateError
from overspill.homes import DiskTensor, DiskValues, HostParameter, HostTensor, disk_home

_OURS = ("_overspill_slot", "_overspill_values")


@dataclass(frozen=True)
class Origin:
    """What a tensor was before it became a home."""

    kind: type[torch.Tensor]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Origin":
        return cls(type(tensor), tensor.device)


def check_can_turn(name: str, tensor: torch.Tensor) -> None:
    """Raise if `tensor` cannot become a home, or stop being one, at the moment."""
    if tensor.is_meta:
        raise StateError(f"{name} is on the meta device and has no values. Load the model first: overspill.load")
    if is_traceable_wrapper_subclass(tensor):
        raise StateError(f"{name} is a {type(tensor).__name__}, which wraps other tensors: it cannot be offloaded")
    if tensor.layout is not torch.strided:
        raise StateError(f"{name} is a {tensor.layout} tensor: only dense ones can be offloaded")
    if not tensor.is_leaf:
        raise StateError(f"{name} is the result of a computation, not a parameter. Detach it first")
    if tensor.requires_grad and _users(tensor) > 2:
        raise StateError(
            f"{name} is part of a computation whose backward has not run yet. Run it, or drop its result, first"
        )


def turn_into_host_home(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let `tensor` be a host home over `values`, which must have a storage of its own. It needs a slot yet."""
    _give_memory(tensor, values)
    tensor.__class__ = HostParameter if isinstance(tensor, nn.Parameter) else HostTensor


def turn_into_disk_home(tensor: torch.Tensor, values: DiskValues) -> None:
    """Let `tensor` be a disk home of `values`, without memory."""
    if isinstance(tensor, DiskTensor) and tensor._overspill_values is values:
        return
    body = disk_home(values, tensor)
    _exchange(tensor, body, keep=("_overspill_values",))


def turn_into_plain(tensor: torch.Tensor, values: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Let `tensor` be an ordinary tensor of class `kind` over `values` again."""
    _give_memory(tensor, values)
    tensor.__class__ = kind


def plain_kind(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class of an ordinary tensor in the place of `tensor`."""
    return nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor


def _give_memory(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Leave `tensor` an ordinary tensor over `values`."""
    if isinstance(tensor, DiskTensor):
        body = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values.detach()
        body.__dict__.update(tensor.__dict__)
        _exchange(tensor, body)
        return
    with torch._C.DisableTorchFunctionSubclass():
        gradient, tensor.grad = tensor.grad, None
        tensor.data = values
        if gradient is not None:
            tensor.grad = gradient.to(values.device, values.dtype)
    tensor.__class__ = plain_kind(tensor)
    for attribute in _OURS:
        tensor.__dict__.pop(attribute, None)


def _exchange(tensor: torch.Tensor, body: torch.Tensor, keep: tuple[str, ...] = ()) -> None:
    """Give `tensor` the class, attributes and values of `body`; its gradient and hooks stay its own."""
    if tensor.requires_grad:
        _refuse_late_gradients(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.grad is not None:
            body.grad = tensor.grad.to(body.device, body.dtype)
        body._backward_hooks = tensor._backward_hooks
        body._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
        for attribute in _OURS:
            if attribute not in keep:
                body.__dict__.pop(attribute, None)
        torch._C._swap_tensor_impl(tensor, body)
        tensor.__class__, body.__class__ = body.__class__, tensor.__class__
        tensor.__dict__, body.__dict__ = body.__dict__, tensor.__dict__


def _refuse_late_gradients(tensor: torch.Tensor) -> None:
    """A graph that still knows the old body must not send a gradient there, where nobody would find it."""
    if _users(tensor) > 1:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        node.register_prehook(_late_gradient)


def _late_gradient(gradients: Any) -> NoReturn:
    raise StateError(
        "a parameter was offloaded or restored between this forward and its backward, so its gradient has no place to "
        "go. Run backward first"
    )


def _users(tensor: torch.Tensor) -> int:
    """How many hold the tensor's body: Python, its gradient's accumulator if there is one, graphs that saved it."""
    return int(tensor._use_count())  # type: ignore[attr-defined]

"""A tensor object turned into a home and back: whoever holds the parameter, an optimizer for one, still holds it.

Note: how an object changes. To other host memory, or between devices, by `.data`: the object stays, its memory is
another. To and from a disk home, which has no memory and another dispatch, by exchanging the bodies of two Python
objects, as torch's own `swap_tensors` does; unlike that function we allow weak references, which compilers hold on
parameters and which go on meaning the same object. A graph that knows the old body would send its gradient there, where
nobody finds it: its backward raises instead.

Note: other threads. They may read the tensor at any step of a change, so the steps are in an order that keeps each of
them right: what a class needs is there before the class is, and a disk home's class also does for a body with memory.
Inside torch, a thread may use a tensor's body or memory without holding it: what is taken from a tensor lives on until
`let_go`, which waits until every thread that may be in there has come out.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.devices import OUR_THREADS, is_running
from overspill.errors import StateError
from overspill.homes import DiskTensor, DiskValues, HostParameter, HostSlot, HostTensor, disk_home

_OF_HOST_HOMES = "_overspill_slot"
_OF_DISK_HOMES = ("_overspill_values", "_is_param")  # the second is torch's mark on a subclass's parameter


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


def turn_into_host_home(
    tensor: torch.Tensor, memory: Callable[[], torch.Tensor], settle: Callable[[], None]
) -> HostSlot:
    """Let `tensor` be a host home over `memory`, which must have a storage of its own."""
    _give_memory(tensor, memory())
    slot = HostSlot(tensor, settle)  # now that nobody but the tensor holds the memory
    tensor.__dict__["_overspill_slot"] = slot
    tensor.__class__ = HostParameter if isinstance(tensor, nn.Parameter) else HostTensor
    return slot


def turn_into_disk_home(tensor: torch.Tensor, values: DiskValues) -> None:
    """Let `tensor` be a disk home of `values`, without memory."""
    if isinstance(tensor, DiskTensor) and tensor._overspill_values is values:
        return
    body = disk_home(values, tensor)
    _hand_over(tensor, body)
    with torch._C.DisableTorchFunctionSubclass():
        kind = type(tensor)
        tensor.__dict__.update({name: body.__dict__[name] for name in _OF_DISK_HOMES if name in body.__dict__})
        tensor.__class__ = DiskTensor
        torch._C._swap_tensor_impl(tensor, body)
        body.__class__ = kind
    _unused.append((tensor, _OF_HOST_HOMES))
    _taken.append(body)


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
        _hand_over(tensor, body)
        kind = plain_kind(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            torch._C._swap_tensor_impl(tensor, body)
            cast(torch.Tensor, tensor).__class__ = kind
            body.__dict__.update({name: tensor.__dict__.get(name) for name in _OF_DISK_HOMES})
            body.__class__ = DiskTensor
        _unused.extend((tensor, name) for name in _OF_DISK_HOMES)
        _taken.append(body)
        return
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.requires_grad and tensor.device != values.device:
            _refuse_late_gradients(tensor)
        gradient, tensor.grad = tensor.grad, None
        if tensor.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
            _taken.append(tensor.detach())
        tensor.data = values
        if gradient is not None:
            tensor.grad = gradient.to(values.device, values.dtype)
    tensor.__class__ = plain_kind(tensor)
    _unused.append((tensor, _OF_HOST_HOMES))


def _hand_over(tensor: torch.Tensor, body: torch.Tensor) -> None:
    """Give `body`, which is to be the tensor's, its gradient and hooks."""
    if tensor.requires_grad:
        _refuse_late_gradients(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.grad is not None:
            body.grad = tensor.grad.to(body.device, body.dtype)
        body._backward_hooks = tensor._backward_hooks
        body._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


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


_taken: list[torch.Tensor] = []
"""Bodies and memory that tensors had before."""

_unused: list[tuple[torch.Tensor, str]] = []
"""Attributes of homes on tensors that are others by now."""


def let_go(patience: float = 0.5) -> None:
    """Free what was taken from tensors, once no other thread can be using it."""
    computing = _computing_threads()
    end = time.monotonic() + patience
    while computing and time.monotonic() < end:
        time.sleep(0.001)
        now = _computing_threads()
        computing = {thread: step for thread, step in computing.items() if now.get(thread) == step}
    while _unused:
        tensor, name = _unused.pop()
        if not isinstance(tensor, DiskTensor if name in _OF_DISK_HOMES else HostTensor):
            tensor.__dict__.pop(name, None)
    _taken.clear()


_looking = threading.Lock()


def _current_frames() -> dict[int, FrameType]:
    """What each thread executes. Without the garbage collector: before Python 3.12.4, a collection in the middle of it
    lets other threads run, which may wait for the lock that it holds, and nobody goes on."""
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _computing_threads() -> dict[int, tuple[int, int]]:
    """The threads that may be inside torch, and the step of its program that each is at.

    Inside torch without the interpreter's lock, a thread runs. One that sleeps waits for something, or for the lock.
    """
    frames = _current_frames()
    return {
        thread.ident: (id(frame), frame.f_lasti)
        for thread in threading.enumerate()
        if thread.ident is not None
        and thread is not threading.current_thread()
        and not thread.name.startswith(OUR_THREADS)
        and (frame := frames.get(thread.ident)) is not None
        and is_running(thread)
    }

"""Models that take turns on a device: each comes whole when it is called, and goes when the next one is.

Note: where a call is led. As in `attach.py`, at `_compiled_call_impl`; but outside of what stands there for a model
that is offloaded, since no verb may change a model inside its call. While it is away, the model is one that overspill
streams: whoever calls a part of it, or reads a weight, is served as well. Should a call reach us from inside that
interception, because both were put in place at the same moment, it is passed on, and the model streams.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from overspill.api import offload, restore
from overspill.devices import CPU, compute_device
from overspill.errors import StateError
from overspill.gate import Ticket, gate_of
from overspill.integrations.accelerate import is_dispatched
from overspill.managed import managers_of
from overspill.movement import to_device
from overspill.offloading import NothingToOffloadError

_hooks: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[UserCpuOffloadHook]]" = weakref.WeakKeyDictionary()


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    prev_module_hook: "UserCpuOffloadHook | None" = None,
) -> "tuple[nn.Module, UserCpuOffloadHook]":
    """Keep a model in host memory until it is called; then it comes whole, and stays until its hook's `offload`.

    Args:
        model: In memory, or dispatched.
        execution_device: Where to. None: the first accelerator, else the CPU.
        prev_module_hook: Of the model that runs before this one: it goes when this one is called.

    Returns:
        The model, and its hook: `hook.offload()` takes it away, `hook.remove()` leaves it an ordinary one.

    Raises:
        StateError: A part of the model has no values.
    """
    return model, UserCpuOffloadHook(model, compute_device(execution_device), prev_module_hook)


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of all models in `model`."""
    for module in model.modules():
        _remove_hook(module)


def _remove_hook(model: nn.Module) -> None:
    reference = _hooks.get(model)
    hook = None if reference is None else reference()
    if hook is not None:
        hook.remove()


def refuse_meta(model: nn.Module) -> None:
    """Raise for a model without values."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise StateError(f"{name} is on the meta device, without values. Use load_checkpoint_and_dispatch")


class UserCpuOffloadHook:
    """What brings a model to its device, and takes it away again."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        previous: "UserCpuOffloadHook | None",
        rests: Literal["cpu", "disk"] = "cpu",
    ) -> None:
        _remove_hook(model)  # a model has one at a time
        if managers_of(model) or is_dispatched(model):
            restore(model, device=CPU)  # it takes its turns whole, however it was run before
        refuse_meta(model)
        self.model = model
        self._device, self._previous, self._rests = device, previous, rests
        self._changing = threading.RLock()
        self._is_here = True
        self._removed = False
        self._inner: Callable[..., Any] | None = model._compiled_call_impl
        self._led = self._call  # one object, to be known again
        self.offload()
        _hooks[model] = weakref.ref(self)

    def offload(self) -> None:
        """Take the model away from its device, if it is there."""
        with self._changing:
            if self._removed or not self._is_here:
                return
            self._is_here = False  # before it goes: a call that begins now waits, and brings it back
            try:
                if not self._rests_where_it_computes():
                    self._go()
            except BaseException:
                self._is_here = True
                raise
            self.model._compiled_call_impl = self._led

    def remove(self) -> None:
        """Leave the model, an ordinary one, where it is now."""
        with self._changing:
            self._removed = True
            if managers_of(self.model):
                restore(self.model, device=CPU)
            if self.model._compiled_call_impl is self._led:
                if self._inner is not None:
                    self.model._compiled_call_impl = self._inner
                else:
                    del self.model._compiled_call_impl  # the class has it too, as None
            _hooks.pop(self.model, None)

    def _rests_where_it_computes(self) -> bool:
        return self._device == CPU and self._rests == "cpu"

    def _go(self) -> None:
        if managers_of(self.model):
            return  # somebody has offloaded it meanwhile, to wherever they wanted it
        try:
            offload(self.model, to=self._rests, device=self._device, min_bytes=0)
        except NothingToOffloadError:
            pass  # a model without weights takes its turn too

    def _come(self) -> None:
        if self._previous is not None:
            self._previous.offload()
        if self._is_here:
            return
        if managers_of(self.model):
            restore(self.model, device=self._device)
        else:
            self.model.to(self._device)  # somebody has made it an ordinary one meanwhile
        self._is_here = True

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self._inner if self._inner is not None else self.model._call_impl
        gate, ticket = gate_of(self.model), Ticket()
        if self._removed or gate.is_inside(ticket.thread):  # also where the model calls itself
            return inner(*args, **kwargs)
        try:
            while True:
                with self._changing:
                    self._come()
                gate.enter(ticket)  # whoever changes the model now waits for this call
                if self._is_here:
                    break
                gate.leave(ticket)
            args, kwargs = to_device((args, kwargs), self._device)
            return inner(*args, **kwargs)
        finally:
            gate.leave(ticket)

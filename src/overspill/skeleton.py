"""Models without weights: parameters on the meta device, so that a model of any size can be built, and planned for."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

# Note: why registration is where tensors go to meta
#
# The alternative, `with torch.device("meta")`, sends every tensor of `__init__` there: buffers whose values are nowhere
# but in `__init__` (a rotary embedding's frequencies) would be lost, and code that computes with tensors to configure
# itself (`torch.linspace(0, rate, depth).tolist()`) fails. A factory call cannot know what its tensor will become; a
# registration does. The price is that a parameter exists for a moment before it is registered. `torch.empty`, which
# torch's own layers use, touches none of its pages; `torch.randn` would, for one parameter at a time, and frees them
# at once. Initialisers that run after the registration see a meta tensor, and have nothing to do.


@contextmanager
def empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Build modules without weights: within the context, parameters are on the meta device, and take no memory.

    Buffers are real, since a checkpoint seldom holds them; `include_buffers=True` sends them to meta too. Parameters
    keep their class, attributes and ties. What was built before the context is not touched: a parameter from outside
    keeps its values there, and its twin in the new module has none. Only the calling thread is affected; contexts nest,
    and the inner one counts.

    Args:
        include_buffers: Buffers take no memory either. A checkpoint must hold them then.

    Example:
        with overspill.empty_weights():
            model = build()
        assert model[0].weight.is_meta
    """
    with registered_on(torch.device("meta"), include_buffers), _NothingToInitialise():
        yield


@contextmanager
def registered_on(device: torch.device, include_buffers: bool = False) -> Iterator[None]:
    """Within the context, what modules register is on `device`, with its values there. See `empty_weights`."""
    enclosing = _this_thread.contexts
    shared = next((context.twins for context in reversed(enclosing) if context.device == device), None)
    _install_hooks()
    enclosing.append(_Context(device, include_buffers, WeakTensorKeyDictionary() if shared is None else shared))
    try:
        yield
    finally:
        enclosing.pop()


@dataclass(frozen=True)
class _Context:
    device: torch.device
    include_buffers: bool
    # From each tensor that was registered to its twin on the device, so that a tensor registered twice stays one. Weak,
    # or the tensors would live as long as the context.
    twins: WeakTensorKeyDictionary


class _NothingToInitialise(TorchFunctionMode):
    """Skips the random initialisation of meta tensors.

    torch computes shapes and dtypes for it in Python, which was two thirds of the time that a skeleton took (an 8B
    Llama, torch 2.13: 0.14 s with it, 0.05 s without). The random numbers' state is untouched either way.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__name__", "") in _RANDOM_FILLS:
            tensor: torch.Tensor = arguments[0] if arguments else (keywords or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*arguments, **(keywords or {}))


# By name: as methods of a tensor, as functions of torch.nn.init, and as those that Transformers puts in their place.
_RANDOM_FILLS: Final = frozenset({"normal_", "uniform_", "erfinv_", "kaiming_uniform_"})


class _ThreadState(threading.local):
    """The contexts that the current thread is in, innermost last."""

    def __init__(self) -> None:
        self.contexts: list[_Context] = []


_this_thread = _ThreadState()

# torch's registration hooks are global, so each call of them looks at its own thread's contexts. Once in place they
# stay: a thread that builds a module goes through them, and fails if another removes them meanwhile.
_hooks_lock = threading.Lock()
_hooked = False


def _install_hooks() -> None:
    global _hooked
    with _hooks_lock:
        if not _hooked:
            # Typed in torch as returning None, documented as returning what to register instead.
            register_module_parameter_registration_hook(_on_parameter)  # type: ignore[arg-type]
            register_module_buffer_registration_hook(_on_buffer)  # type: ignore[arg-type]
            _hooked = True


def _on_parameter(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    contexts = _this_thread.contexts
    return _twin_of(parameter, contexts[-1]) if contexts else None


def _on_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
    contexts = _this_thread.contexts
    if not contexts or not contexts[-1].include_buffers or buffer is None:
        return None
    return _twin_of(buffer, contexts[-1])


def _twin_of(tensor: torch.Tensor, context: _Context) -> torch.Tensor | None:
    """What to register in place of `tensor`; None to register `tensor` itself."""
    if tensor.is_meta or tensor.device == context.device or is_lazy(tensor):
        return None  # there already; without values to bring there; or without a shape yet, and without memory
    twin: torch.Tensor | None = context.twins.get(tensor)
    if twin is None:
        twin = context.twins[tensor] = _make_twin(tensor, context.device)
    return twin


def _make_twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Without overrides: a subclass's own `.to` may do more than move it (bitsandbytes quantizes).
    with torch._C.DisableTorchFunctionSubclass():
        data = torch.Tensor.to(tensor.detach(), device)
    if type(data) is torch.Tensor:
        # Not by the class's constructor, whose arguments are unknown. What it would have set is in __dict__.
        twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        return twin
    # A wrapper around inner tensors, which it has moved in its own way; its __dict__ holds the real ones.
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data

"""Calls of a managed model, intercepted: each unit is live around its own call, inputs and outputs move as needed.

Note: where a call is intercepted. `nn.Module.__call__` runs `_compiled_call_impl` where a module has one: that is where
`block.compile()` puts the compiled call. Standing there, we are outside the compiled region of each way to compile a
block (`block.compile()`, `torch.compile(block)`, a compiled `block.forward`), inside activation checkpointing (which
overrides `__call__`), and our `finally` also runs on KeyboardInterrupt, which forward hooks do not see. Copies and
pickles of most modules drop that attribute by themselves. A compiler that traces the model around the block goes
straight to the block's forward unless the block has hooks: an empty one makes it call the block as everyone does, meet
us, and break its graph there. `__reduce_ex__`, which pickle and copy look up on the instance, leaves both out, and so
does `__deepcopy__` where the module's class has one.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from overspill.devices import CPU, Moment
from overspill.gate import Gate, Ticket
from overspill.graph import recorder, saving_weights_as_notes
from overspill.homes import ComputingOn
from overspill.movement import tensors_in, to_device
from overspill.recording import COMPUTE, Counts
from overspill.residency import Residency, Use
from overspill.steps import Root

Call = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Scope(Protocol):
    """What happens around one call of a module."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Before the call: its arguments, or others in their place. `leave` follows, also if this fails."""

    def leave(self, output: Any) -> Any:
        """After the call: its output, None if it failed, or another in its place."""


class UnitScope:
    """What happens around one call of a unit's root."""

    def __init__(self, root: Root, residency: Residency) -> None:
        self._residency = residency
        self._use = Use(root)
        self._saving: AbstractContextManager[None] | None = None
        self._begun: Moment | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self._residency.acquire(self._use)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._save_weights()
        device = self._residency.device
        moved = (args, kwargs) if device == CPU else _moved((args, kwargs), device)
        self._begun = self._residency.now()
        return moved

    def _save_weights(self) -> None:
        """Have what operations save of the unit hold none of its memory until backward needs it."""
        records = recorder()
        if records is None or not records.takes_weights(self._use.root.module, self._use.slabs()):
            saving = saving_weights_as_notes(self._residency.loans(self._use))
            saving.__enter__()
            self._saving = saving

    def leave(self, output: Any) -> Any:
        self._residency.note(COMPUTE, self._use.root.path, self._begun)
        try:
            if self._saving is not None:
                self._saving.__exit__(None, None, None)
        finally:
            self._residency.release(self._use)
        return output


class AlignScope:
    """Around a resident module of a model that computes on several devices: its inputs come to its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return _moved((args, kwargs), self._device)

    def leave(self, output: Any) -> Any:
        return output


class ModelScope:
    """Around a call of the whole model: inputs come to the compute device, outputs go back where the inputs were."""

    def __init__(
        self, device: torch.device, skip: Collection[str], before: Callable[[], None], counts: Counts | None = None
    ) -> None:
        self._device, self._skip, self._counts = device, skip, counts
        self._begun: Moment | None = None
        self._back: torch.device | None = None
        self._computing = ComputingOn(device)
        self._entered = False
        before()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self._computing.__enter__()
        self._entered = True
        self._begun = None if self._counts is None else Moment(self._device)
        if self._device == CPU:
            return args, kwargs
        first = next(tensors_in((args, {k: v for k, v in kwargs.items() if k not in self._skip})), None)
        self._back = first.device if first is not None and first.device != self._device else None
        return _moved((args, kwargs), self._device, self._skip)

    def leave(self, output: Any) -> Any:
        if self._entered:
            self._computing.__exit__()
        if self._counts is not None and self._begun is not None and output is not None:
            self._counts.end_pass(self._begun, Moment(self._device))
        return output if self._back is None else to_device(output, self._back, self._skip)


def _moved(arguments: Arguments, device: torch.device, skip: Collection[str] = ()) -> Arguments:
    return cast(Arguments, to_device(arguments, device, skip))


MANAGER: Final = "_overspill"
"""The attribute that a managed model keeps its manager in."""

_COPYING: Final = "__reduce_ex__", "__deepcopy__"
"""What pickle and copy look up on the instance."""

_OURS: Final = frozenset({MANAGER, *_COPYING})


class Added:
    """Whatever else a managed model keeps among its attributes, and its copies do not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A class that copies its attributes in its own way has nothing of ours to copy."""


class _Of(Added):
    """A function that gets a module first, as a method in the module's own attributes."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *args: Any) -> Any:
        return self._function(self._module, *args)


class Interception:
    """One module's calls, led through scopes. `refresh` keeps it in place when the module is compiled later."""

    def __init__(self, module: nn.Module, gate: Gate, make_scopes: Sequence[Callable[[], Scope]]) -> None:
        self._module = module
        self._gate = gate
        self._make_scopes = make_scopes
        self.removed = False
        self._guard: RemovableHandle | None = None
        self._known_to_dynamo = False
        self._lock = threading.Lock()
        self._inner = _standing(module)
        if self._inner is None:
            self._guard = module.register_forward_pre_hook(_empty_hook, prepend=True)
        module.__dict__["__reduce_ex__"] = _Of(module, _reduced)
        if hasattr(type(module), "__deepcopy__"):
            module.__dict__["__deepcopy__"] = _Of(module, _copied)
        self._install()

    def _install(self) -> None:
        inner: Call = self._inner if self._inner is not None else self._module._call_impl
        self._call = self._intercepted(inner)
        self._known_to_dynamo = _dynamo_is_loaded()
        self._module._compiled_call_impl = self._call

    def refresh(self) -> None:
        """Stand outside again after `module.compile()`, and be known to the compiler once it is loaded."""
        if self._module._compiled_call_impl is self._call and self._known_to_dynamo == _dynamo_is_loaded():
            return
        with self._lock:
            if self._module._compiled_call_impl is not self._call:
                self._inner = self._module._compiled_call_impl
                if self._guard is not None:  # it would stand inside the compiled call
                    self._guard.remove()
                    self._guard = None
            self._install()

    def retire(self) -> None:
        """Lead no call any more, but stand there until another does, or `remove`.

        Between the two a call finds its way to the gate, where it waits for whatever changes, and is then called anew.
        """
        self.removed = True

    def remove(self) -> None:
        """Leave the module to whoever stands there by now, or as if nobody ever had."""
        self.retire()
        module = self._module
        with self._lock:
            if self._guard is not None:
                self._guard.remove()
                self._guard = None
            call = _standing(module)
            if call is None:
                module.__dict__.pop("_compiled_call_impl", None)  # the class has it too, as None
            else:
                module._compiled_call_impl = call
            if _owner(call) is None:
                for name in _COPYING:
                    module.__dict__.pop(name, None)

    def _enter(
        self, ticket: Ticket, scopes: list[Scope], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """A call begins: its arguments, or None where it is somebody else's by now."""
        self._gate.enter(ticket)
        if self.removed:  # while this call waited at the gate
            return None
        for make_scope in self._make_scopes:
            scope = make_scope()
            scopes.append(scope)  # before it holds anything, so that whatever happens it is left again
            args, kwargs = scope.enter(args, kwargs)
        return args, kwargs

    def _leave(self, ticket: Ticket, scopes: list[Scope], output: Any) -> Any:
        """It ends."""
        try:
            return _left(scopes, output)
        finally:
            self._gate.leave(ticket)

    def _intercepted(self, inner: Call) -> Call:
        module = self._module
        around = unseen = self._enter, self._leave, self._gate.leave
        compiler: Callable[[], object] = _no_compiler
        if _dynamo_is_loaded():
            enter, leave, back = map(torch.compiler.disable, around)
            unseen = enter, leave, back
            compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback

        def call(*args: Any, **kwargs: Any) -> Any:
            # To hide from a compiler takes time, and short steps wait for it: only where one looks on.
            enter, leave, back = around if compiler() is None else unseen
            ticket = Ticket()
            scopes: list[Scope] = []
            output = None
            try:
                try:
                    arguments = enter(ticket, scopes, args, kwargs)
                    if arguments is None:
                        return module(*args, **kwargs)
                    output = inner(*arguments[0], **arguments[1])
                finally:
                    output = leave(ticket, scopes, output)
                return output
            finally:
                if ticket.is_through:  # an interrupt came before `leave` was on its way
                    back(ticket)

        if _dynamo_is_loaded():
            call = torch.compiler.disable(call, recursive=False)
        call.__dict__[_OWNER] = self
        return call


def _left(scopes: list[Scope], output: Any) -> Any:
    """The output of a call whose scopes, the last first, are left behind."""
    while scopes:
        try:
            output = scopes.pop().leave(output)
        except BaseException:
            _left(scopes, None)
            raise
    return output


_OWNER = "overspill_interception"
_CALL: Final = "_compiled_call_impl"


def _owner(call: Call | None) -> Interception | None:
    """Whose call it is, if it is ours."""
    return getattr(call, _OWNER, None)


def _standing(module: nn.Module) -> Call | None:
    """What stands in the place of the module's calls, but for interceptions that are over."""
    call: Call | None = module._compiled_call_impl
    while (owner := _owner(call)) is not None and owner.removed:
        call = owner._inner
    return call


def _compiled_call(module: nn.Module) -> Call | None:
    """What a compiler has put in the place of the module's calls."""
    call: Call | None = module._compiled_call_impl
    while (owner := _owner(call)) is not None:
        call = owner._inner
    return call


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` or a part of it is compiled, in any of the ways people write it."""
    if not _dynamo_is_loaded():
        return False
    wrapper = sys.modules["torch._dynamo"].OptimizedModule
    return any(
        isinstance(part, wrapper)
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        or _compiled_call(part) is not None
        for part in module.modules()
    )


def _no_compiler() -> None:
    """Nothing compiles what this thread does."""


def _dynamo_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules  # importing it ourselves would take longer than all of overspill


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """What copies and pickles of an intercepted module are made of: nothing of ours."""
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], _without_ours(reduced[2]), *reduced[3:])
    # A class that does it in its own way, mostly of all attributes: what `torch.fx` traces.
    stand_in = object.__new__(type(module))
    vars(stand_in).update(_without_ours(vars(module)))
    return type(module).__reduce_ex__(stand_in, protocol)


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """A copy of an intercepted module that its class makes in its own way, mostly of all its attributes: parametrized
    modules. Without anything of ours, which would have the copy compute with the original's weights.
    """
    made = type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
    if isinstance(made, nn.Module) and made is not module:
        ours = [name for name, value in vars(module).items() if isinstance(value, Added) and name in vars(made)]
        kept = _without_ours({name: value for name, value in vars(made).items() if name not in ours})
        vars(made).clear()
        vars(made).update(kept)
    return made


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module, or of a copy of it, as they would be without us."""
    state = {name: value for name, value in attributes.items() if name not in _OURS and not isinstance(value, Added)}
    if _owner(state.get(_CALL)) is not None:  # it is among them only where a class does not leave out what is compiled
        del state[_CALL]
    hooks = state.get("_forward_pre_hooks", {})
    state["_forward_pre_hooks"] = OrderedDict((key, hook) for key, hook in hooks.items() if hook is not _empty_hook)
    return state


def _empty_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Does nothing. That a module has a hook keeps a compiler around it from going straight to its forward."""

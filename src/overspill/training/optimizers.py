"""Optimizers of a model whose weights have moved: what they remember follows, and one of another model is refused."""

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from overspill.errors import StateError
from overspill.tensors import TensorSpec


class OptimizerWatch:
    """Looks at each optimizer's step while a model's weights are offloaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._moved: list[tuple[weakref.ref[Optimizer], weakref.ref[torch.Tensor], str, torch.device]] = []
        self._useless: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose last step did nothing
        _watching.begin(self)

    def end(self) -> None:
        """Leave optimizers alone, with what they remember back where it was."""
        _watching.end(self)
        for optimizer_of, parameter_of, key, device in self._moved:
            optimizer, parameter = optimizer_of(), parameter_of()
            if optimizer is not None and parameter is not None and key in optimizer.state.get(parameter, {}):
                optimizer.state[parameter][key] = optimizer.state[parameter][key].to(device)
        self._moved.clear()

    def look_at(self, optimizer: Optimizer) -> None:
        """Before a step: see that it can and does update the model, if it is meant to."""
        model = self._model()
        if model is None:
            return
        mine = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ours = [parameter for parameter in held if id(parameter) in mine]
        for parameter in ours:
            self._follow(optimizer, parameter)
        if ours or not _is_of_a_twin(held, model):
            self._useless.discard(optimizer)
        elif optimizer not in self._useless:
            self._useless.add(optimizer)  # once may be: whoever trains two models may begin with the other one
        else:
            raise StateError(
                "this optimizer holds other parameters than the model that is being trained, of the same shapes and "
                "without gradients: its steps do nothing. Make it anew from model.parameters()"
            )

    def _follow(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Bring what is remembered of a parameter to where that is now."""
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.device != parameter.device and not _counts_on_cpu(value):
                self._moved.append((weakref.ref(optimizer), weakref.ref(parameter), key, value.device))
                optimizer.state[parameter][key] = value.to(parameter.device)


def _counts_on_cpu(value: torch.Tensor) -> bool:
    """Optimizers count steps in a scalar that may stay on the CPU whatever they update."""
    return value.ndim == 0 and value.device.type == "cpu"


def _is_of_a_twin(held: Sequence[torch.Tensor], model: nn.Module) -> bool:
    """Whether parameters are those of a copy of `model` that nobody trains."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in held) or all(each.grad is None for each in trained):
        return False
    return Counter(map(TensorSpec.of, held)) == Counter(map(TensorSpec.of, trained))


class _Watching:
    """The watches there are, told of each step of any optimizer.

    torch knows such hooks globally, and whoever adds or removes one while another thread's optimizer goes through them,
    or from a garbage collection in the midst of that, makes that optimizer's step fail. So there is one for all
    watches, which is added for the first and stays: without watches it does nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._watches: tuple[weakref.ref[OptimizerWatch], ...] = ()  # never changed, only replaced: steps go through it

    def begin(self, watch: OptimizerWatch) -> None:
        with self._lock:
            if not self._hooked:
                register_optimizer_step_pre_hook(self._before_step)
                self._hooked = True
            alive = [each for each in self._watches if each() is not None]
            self._watches = (*alive, weakref.ref(watch))

    def end(self, watch: OptimizerWatch) -> None:
        with self._lock:
            self._watches = tuple(each for each in self._watches if each() not in (None, watch))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watch_of in self._watches:
            watch = watch_of()
            if watch is not None:
                watch.look_at(optimizer)


_watching = _Watching()

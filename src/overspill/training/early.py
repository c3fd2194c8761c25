"""What an optimizer does before its step is called, while backward goes on: norms, and updates that can be taken back.

Note: early updates. Within `overlap()` a parameter is updated as soon as its gradient is final, though nobody has
called `step()` yet. So every early update can be taken back, and is, unless `step()` finds all that it was made of
unchanged: the gradient, the settings of its group (a schedule may have moved the learning rate), the parameter. What is
taken back, or was not begun, `step()` does itself. So the result is that of the usual loop, whatever happens between
backward and step: an exception, a skipped step, clipping by hand. To go back takes copies of what an update overwrites,
and the time to make them; `overlap(undo=False)` saves both, and raises where it would have to go back.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.autograd.graph import increment_version

from overspill.devices import CPU, free_memory, total_memory
from overspill.errors import StateError
from overspill.tensors import TensorSpec
from overspill.training.gradient_workers import Arrivals, compute_as_with, workers

Group = dict[str, Any]
"""One of an optimizer's parameter groups: its parameters and their settings."""

_KEPT_FREE: Final = 0.1
"""The share of host memory that copies for undoing leave alone."""


class Updater(Protocol):
    """The optimizer, as early work sees it."""

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """What it remembers of each parameter."""

    def name_of(self, parameter: torch.Tensor) -> str:
        """For errors."""

    def refuse_sparse_gradient(self, parameter: torch.Tensor) -> None:
        """Raise if that is what the parameter has."""

    def update(self, group: Group, parameters: list[torch.Tensor]) -> None:
        """The step of some parameters of a group."""


class EarlyNorms:
    """Norms of gradients, taken while backward goes on. Nothing is changed, so there is nothing to take back."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._norms: dict[torch.Tensor, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.backward_ended = False  # another may follow: what it adds to is measured again
        self._arrivals = Arrivals(parameters, lambda parameter: None, self._measure, torch.get_num_threads())

    def _measure(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            version = gradient._version  # before: what is added meanwhile makes the norm stale
            self._norms[parameter] = gradient, version, _norm(gradient)

    def finish(self) -> dict[torch.Tensor, torch.Tensor]:
        """The norms of those gradients that are as they were."""
        self._arrivals.close()
        return {
            parameter: norm
            for parameter, (gradient, version, norm) in self._norms.items()
            if parameter.grad is gradient and gradient._version == version
        }

    def revoke(self, cause: BaseException | None = None) -> None:
        self._arrivals.close()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """As `clip_grad_norm_` takes it: on one core, so that it takes several workers to keep up with memory."""
    return torch._foreach_norm([gradient], 2.0)[0]


def norms_of(gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those of gradients that are on one device."""
    if not gradients or gradients[0].device != CPU:
        return iter(torch._foreach_norm(list(gradients), 2.0) if gradients else ())
    threads = torch.get_num_threads()

    def measure(gradient: torch.Tensor) -> torch.Tensor:
        compute_as_with(threads)
        return _norm(gradient)

    return workers(threads).map(measure, gradients)


class UndoMemory:
    """Memory for copies of what early updates overwrite. Kept from step to step: fresh pages are slow to be had."""

    def __init__(self) -> None:
        self._unused: dict[object, list[torch.Tensor]] = {}

    def copies(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
        """A copy of each, or None where host memory runs short."""
        copies: list[torch.Tensor] = []
        for tensor in tensors:
            copy = self._take(TensorSpec.laid_out_as(tensor))
            if copy is None:
                self.give_back(copies)
                return None
            copies.append(copy.copy_(tensor))
        return copies

    def _take(self, spec: TensorSpec) -> torch.Tensor | None:
        unused = self._unused.get((spec, spec.strides))
        if unused:
            return unused.pop()
        if free_memory(CPU) - spec.nbytes < _KEPT_FREE * total_memory(CPU):
            return None
        return spec.empty(CPU)

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        for copy in copies:
            spec = TensorSpec.laid_out_as(copy)
            self._unused.setdefault((spec, spec.strides), []).append(copy)


@dataclass
class _Update:
    """A parameter ahead of its step: what its update was made of, and what it takes to go back."""

    gradient: torch.Tensor
    gradient_version: int
    settings: dict[str, object]
    is_first: bool  # there was no state before
    copies: list[torch.Tensor]  # of the parameter, then of its state
    version: int = -1  # the parameter's, after the update

    def is_what_step_would_do(self, parameter: torch.Tensor, group: Group) -> bool:
        return (
            parameter.grad is self.gradient
            and self.gradient._version == self.gradient_version
            and _settings(group) == self.settings
        )


class EarlyUpdates:
    """The updates of one step that are made before it is called."""

    def __init__(self, optimizer: Updater, groups: dict[torch.Tensor, Group], undo: UndoMemory | None) -> None:
        self._optimizer, self._groups, self._undo = optimizer, groups, undo
        self._name = optimizer.name_of
        self._updates: dict[torch.Tensor, _Update] = {}
        self._seen: set[torch.Tensor] = set()
        self.backward_ended = False
        # One worker: the kernel itself uses all cores.
        self._arrivals = Arrivals(groups, self._admit, self._update, workers=1)

    def _admit(self, parameter: torch.Tensor) -> None:
        """A gradient is there, says autograd: from now on its parameter may change."""
        if self.backward_ended:
            raise StateError(
                f"a gradient of {self._name(parameter)} arrived between overlap() and step(), from a forward that may "
                "have seen parameters ahead of their step. Put overlap() around the last backward before step() only"
            )
        if parameter in self._seen:
            raise StateError(
                f"a second gradient of {self._name(parameter)} arrived in overlap(), where the first was in use. Run "
                "one backward a step there, and checkpoints that share a parameter with use_reentrant=False"
            )
        self._optimizer.refuse_sparse_gradient(parameter)
        self._seen.add(parameter)
        # What saved the parameter and has still to run must not read it while it changes. Autograd raises there now.
        increment_version(parameter)

    def _update(self, parameter: torch.Tensor) -> None:
        gradient, group = parameter.grad, self._groups[parameter]
        if gradient is None:
            return  # a hook has taken it away
        state = self._optimizer.state.get(parameter)
        overwritten = [parameter, *(state or {}).values()]
        copies = [] if self._undo is None else self._undo.copies(overwritten)
        if copies is None:
            return  # no room to go back: left to `step`
        update = _Update(gradient, gradient._version, _settings(group), not state, copies)
        self._updates[parameter] = update  # before anything is changed: a failure half-way is taken back too
        self._optimizer.update(group, [parameter])
        update.version = parameter._version

    def finish(self) -> set[torch.Tensor]:
        """The parameters that are updated as their step would do it now. The others are as they were."""
        self._arrivals.close()
        if self._arrivals.failure is not None:
            parameter, error = self._arrivals.failure
            raise StateError(f"the update of {self._name(parameter)} failed during backward: {error}") from error
        for parameter, update in list(self._updates.items()):
            if parameter._version != update.version:
                raise StateError(
                    f"{self._name(parameter)} was edited between its update in backward and step(), and the "
                    "edit is lost. Edit parameters before overlap(), or after step()"
                )
            if not update.is_what_step_would_do(parameter, self._groups[parameter]):
                self._take_back(parameter)
        return set(self._updates)

    def forget(self) -> None:
        """The step is done: there is no way back any more."""
        if self._undo is not None:
            for update in self._updates.values():
                self._undo.give_back(update.copies)
        self._updates = {}

    def revoke(self, cause: BaseException | None = None) -> None:
        """Let all parameters and their state be as before. Where that cannot be: say so with `cause`, or raise."""
        self._arrivals.close()
        if self._undo is None and self._updates:
            problem = (
                f"{len(self._updates)} parameters were updated in backward, ahead of a step that did not follow, and "
                "stay so: overlap(undo=False) has no way back"
            )
            self._updates = {}
            if cause is None:
                raise StateError(problem)
            cause.add_note(problem)
        for parameter in list(self._updates):
            self._take_back(parameter)

    def _take_back(self, parameter: torch.Tensor) -> None:
        if self._undo is None:
            raise StateError(
                f"the gradient of {self._name(parameter)}, or a setting of its group, was changed after "
                "overlap(undo=False) had used it. Clip with HostAdamW(max_grad_norm=…), step schedulers after the "
                "optimizer, or leave undo at True"
            )
        update = self._updates.pop(parameter)
        state = self._optimizer.state
        with torch.no_grad():
            overwritten = [parameter] if update.is_first else [parameter, *state[parameter].values()]
            for tensor, copy in zip(overwritten, update.copies, strict=True):
                tensor.copy_(copy)
        if update.is_first:
            state.pop(parameter, None)
        self._undo.give_back(update.copies)


def _settings(group: Group) -> dict[str, object]:
    """What an update takes from its group, as it is now."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }

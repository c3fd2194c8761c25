"""AdamW for parameters in host memory: the CPU updates a block while backward goes on with the blocks before it.

Note: layouts and versions. torch's fused kernel runs over memory from front to back: on tensors that lie in another
order than their parameter it computes nonsense without a word. Nor does it move the parameter's version, so autograd
and homes would not notice the edit. Both are seen to here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from overspill.devices import CPU
from overspill.errors import StateError
from overspill.homes import HostTensor
from overspill.tensors import TensorSpec, is_dense
from overspill.training.early import EarlyNorms, EarlyUpdates, Group, UndoMemory, norms_of


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW for parameters in host memory, which can update them while backward is still under way.

    Bit for bit `torch.optim.AdamW(fused=True)`, or with `fused=False` what `torch.optim.AdamW()` does by itself, which
    takes several times as long on a CPU. State dicts are the same in both directions; as with torch's own, a group that
    is loaded brings along whether it is fused. Parameters on an accelerator, beside others in host memory, are updated
    there by `step()`.

    Args:
        params: Parameters, or groups of them, as torch's optimizers take them.
        lr: As in `torch.optim.AdamW`, and so are the next four.
        betas: Of the running averages of gradients and their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient.
        amsgrad: Keep the largest of the averages of squares.
        maximize: Go up rather than down.
        fused: Use torch's fused kernel.
        max_grad_norm: Does in `step()` what `torch.nn.utils.clip_grad_norm_` would do before it. The attribute
            `grad_norm` is then the norm that the last step found. None: no clipping.

    Raises:
        ValueError: A number that is out of range, as in torch.

    Example:
        optimizer = overspill.HostAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
        with optimizer.overlap():
            model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """

    _step_supports_amp_scaling = True  # a GradScaler tells us what it found, rather than edit gradients unseen

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool = True,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}: give a norm above 0, or None for no clipping")
        self.max_grad_norm = max_grad_norm
        self._start_afresh()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused or None)

    def _start_afresh(self) -> None:
        self.grad_norm: torch.Tensor | None = None
        self._early: EarlyUpdates | EarlyNorms | None = None
        self._undo = UndoMemory()

    @contextmanager
    def overlap(self, *, undo: bool = True) -> Iterator[None]:
        """Around the last backward before `step()`: what can be done of the step is done within it, by other threads.

        That is the update of each parameter in host memory whose gradient is final, or with `max_grad_norm`, before
        whose norm nothing may change, each gradient's norm. Do not read parameters from here to `step()`; where the
        rest of backward reads one, as with `x * weight.detach()`, autograd raises. A block that is recomputed reads all
        that it has. What `step()` finds changed (gradients, learning rates) is done again, and without a `step()`
        everything is taken back: by an exception in here, `zero_grad()` or `state_dict()`. Edits of gradients through
        `.data` go unnoticed.

        Args:
            undo: Keep what it takes to take updates back. False saves that memory and time, and raises instead.

        Raises:
            StateError: No parameter is trained in host memory, or it was entered twice without a step.
        """
        if self.max_grad_norm is not None and not undo:
            raise StateError("overlap(undo=False) has no effect with max_grad_norm: nothing is updated before the norm")
        groups = {parameter: group for group in self.param_groups for parameter in _updated_early(group)}
        if not groups:
            raise StateError("overlap() has no effect: no parameter of this optimizer is trained in host memory")
        if isinstance(self._early, EarlyUpdates):
            raise StateError("overlap() was entered twice without a step. Call step() or zero_grad() in between")
        self._revoke_early()
        early: EarlyUpdates | EarlyNorms
        if self.max_grad_norm is None:
            early = EarlyUpdates(self, groups, self._undo if undo else None)
        else:
            early = EarlyNorms(groups)
        self._early = early
        try:
            yield
        except BaseException as error:
            if self._early is early:  # no step has ended it
                self._early = None
                early.revoke(error)
            raise
        early.backward_ended = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, less those that are updated already.

        Args:
            closure: Computes the loss anew, as in torch. Its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        early, self._early = self._early, None
        try:
            self._check_gradients()
            self._check_scaler(early)
            norms = early.finish() if isinstance(early, EarlyNorms) else {}
            done = early.finish() if isinstance(early, EarlyUpdates) else set()
        except BaseException as error:
            if early is not None:
                early.revoke(error)
            raise
        if self.max_grad_norm is not None:
            self.grad_norm = self._clip(self.max_grad_norm, norms)
        for group in self.param_groups:
            left = [parameter for parameter in group["params"] if parameter not in done]
            self.update(group, [parameter for parameter in left if parameter.grad is not None])
        if isinstance(early, EarlyUpdates):
            early.forget()
        return loss

    def update(self, group: Group, parameters: list[torch.Tensor]) -> None:
        """torch's own update of some parameters of a group."""
        if not parameters:
            return
        if group["fused"]:
            for parameter in parameters:
                self._lay_out_state(parameter)
        gradients: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        maxima: list[torch.Tensor] = []
        steps: list[torch.Tensor] = []
        # Makes the state of parameters that have none, and lists what belongs to each.
        has_complex = self._init_group(  # type: ignore[no-untyped-call]
            {**group, "params": parameters}, [], gradients, averages, squares, maxima, steps
        )
        if group["fused"]:
            gradients = [_laid_out_as(*pair) for pair in zip(parameters, gradients, strict=True)]
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            gradients,
            averages,
            squares,
            maxima,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            decoupled_weight_decay=True,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        increment_version(parameters)

    def _lay_out_state(self, parameter: torch.Tensor) -> None:
        """A checkpoint may bring state in another order of elements than the parameter has here."""
        state = self.state.get(parameter, {})
        for name, values in state.items():
            if values.shape == parameter.shape:
                state[name] = _laid_out_as(parameter, values)

    def _clip(self, max_norm: float, known: dict[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What `clip_grad_norm_` does, with the norms that are known already."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return torch.tensor(0.0)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        norms: list[torch.Tensor] = []
        # In torch's order, on which the sum's last bit depends: by device and dtype.
        for [alike], indices in self._group_tensors_by_device_and_dtype([gradients], with_indices=True).values():
            measured = [known.get(parameters[index]) for index in indices]
            missing: list[Any] = [gradient for gradient, norm in zip(alike, measured, strict=True) if norm is None]
            fresh = norms_of(missing)
            norms += [next(fresh) if norm is None else norm for norm in measured]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(gradients[0].device) for n in norms]), 2.0)
        clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _check_gradients(self) -> None:
        """Before anything is changed: whether every gradient is there, and of a kind that can be used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.refuse_sparse_gradient(parameter)
                if group["fused"] and not (parameter.is_contiguous() or is_dense(parameter)):
                    raise StateError(
                        f"{self.name_of(parameter)} has gaps in its memory (strides {parameter.stride()}), which the "
                        "fused update would write to. Give its module a contiguous copy, or use fused=False"
                    )

    def refuse_sparse_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise StateError(
                f"the gradient of {self.name_of(parameter)} is sparse, which AdamW cannot use. Build the embedding "
                "with sparse=False, or give the parameter to torch.optim.SparseAdam"
            )

    def _check_scaler(self, early: "EarlyUpdates | EarlyNorms | None") -> None:
        """What a GradScaler says in `step()` comes too late for what was done before it."""
        if getattr(self, "found_inf", None) is None:
            return
        if not all(group["fused"] for group in self.param_groups):
            raise StateError("a GradScaler needs the fused update. Build this optimizer with fused=True")
        if getattr(self, "grad_scale", None) is not None and self.max_grad_norm is not None:
            raise StateError(
                "max_grad_norm would clip scaled gradients. Call scaler.unscale_(optimizer) before its step"
            )
        if early is not None:
            raise StateError(
                "overlap() cannot be used with a GradScaler, which decides after backward. Train in bfloat16"
            )

    def _revoke_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.revoke()

    def name_of(self, parameter: torch.Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, one in enumerate(group["params"]):
                if one is parameter:
                    names = group.get("param_names")
                    what = f"parameter {index} of group {number}" if names is None else names[index]
                    return f"{what} ({TensorSpec.of(parameter)})"
        return f"a parameter ({TensorSpec.of(parameter)}) that is in no group"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._revoke_early()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self._revoke_early()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._revoke_early()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._revoke_early()
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_early" not in self.__dict__:  # unpickled; load_state_dict comes by here too
            self._start_afresh()
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def _updated_early(group: Group) -> list[torch.Tensor]:
    """The parameters whose memory the worker can use: in host memory, and not of somebody's own kind."""
    if group["capturable"] or group["differentiable"]:
        return []
    return [
        parameter
        for parameter in group["params"]
        if (isinstance(parameter, HostTensor) or type(parameter) in (nn.Parameter, torch.Tensor))
        and parameter.requires_grad
        and parameter.device == CPU
        and parameter.is_floating_point()
        and is_dense(parameter)
    ]


def _laid_out_as(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values`, in memory in the order that the parameter has."""
    if values.stride() == parameter.stride():
        return values
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=values.dtype, device=values.device).copy_(
        values
    )

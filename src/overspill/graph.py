"""What autograd's graph keeps of a streamed unit: ways home for gradients and notes about weights, never a slab."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn

from overspill.devices import backward_number
from overspill.host_link import Departure, Landing
from overspill.slab import Layout, Slab
from overspill.tensors import is_dense, over

# Gradients.
#
# Note: how a gradient gets home. Two nodes stand between a live weight and its home. The first runs where the weight
# computed: it starts the copy to pinned memory and leaves that memory for the second at once. The second belongs to the
# CPU, so autograd runs it in the thread that called backward, beside the one that feeds the device: there we wait for
# the copy. Whatever comes behind it (accumulation, hooks, `torch.autograd.grad`) sees complete values, and all has
# arrived when backward returns. Each pair of nodes serves several weights of a unit, and autograd knows of one tensor
# between the two, without memory, not of one a weight: the interpreter is what short steps wait for.


@dataclass(slots=True)
class _Crossing:
    """What one backward has sent from the first of two nodes to the second."""

    gradients: list[torch.Tensor | None]
    departure: Departure | None


class _Leave(torch.autograd.Function):
    """Homes to lives, as autograd sees it: the same values, and gradients that leave for where the homes are."""

    @staticmethod
    def forward(
        ctx: Any, lives: list[torch.Tensor], crossings: dict[int, _Crossing], landing: Landing, between: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that no loss depends on gets no gradient
        ctx.crossings, ctx.landing = crossings, landing
        ctx.device = between.device
        return tuple(lives)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        crossing = _Crossing(list(gradients), None)
        home, differentiable = ctx.device, torch.is_grad_enabled()
        leaving: dict[int, torch.Tensor] = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if differentiable or gradient.layout is not torch.strided or gradient.device == home:
                crossing.gradients[index] = gradient.to(home)  # differentiable again, if need be
            elif gradient.is_contiguous() or is_dense(gradient):
                leaving[index] = gradient
            else:
                leaving[index] = gradient.contiguous()
        if leaving:
            crossing.departure, copies = ctx.landing.link.send(list(leaving.values()), ctx.landing)
            for index, copy in zip(leaving, copies, strict=True):
                crossing.gradients[index] = copy
        ctx.crossings[backward_number()] = crossing
        return None, None, None, _nothing(ctx.device)


class _Arrive(torch.autograd.Function):
    """The homes' side. What it gives has no values: `_Leave` gives the live weights in its place."""

    @staticmethod
    def forward(ctx: Any, crossings: dict[int, _Crossing], *homes: torch.Tensor) -> torch.Tensor:
        ctx.crossings = crossings
        with torch._C.DisableTorchFunctionSubclass():  # where they are, not where they act as if they were
            return _nothing(homes[0].device).detach()

    @staticmethod
    def backward(ctx: Any, *between: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        crossing = ctx.crossings.pop(backward_number())
        if crossing.departure is not None:
            crossing.departure.wait()
        return None, *crossing.gradients


_thread = threading.local()


class Replaying:
    """Within, this thread computes a block once more, for what its operations save: no gradient will flow back."""

    def __init__(self) -> None:
        self._weights: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> None:
        self._around, _thread.replay = _replay(), self

    def __exit__(self, *exception: object) -> None:
        _thread.replay = self._around

    def shown(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights to compute with."""
        self._weights += map(weakref.ref, weights)
        return [weight.requires_grad_() for weight in weights]

    def let_go_of_weights(self) -> None:
        """Somebody has the graph, and that has its leaves: without their memory."""
        for reference in self._weights:
            weight = reference()
            if weight is not None:
                weight.data = _nothing(weight.device)


def _replay() -> Replaying | None:
    """What this thread is within."""
    return getattr(_thread, "replay", None)


def is_replaying() -> bool:
    """Whether this thread computes a block once more."""
    return _replay() is not None


def onload(
    homes: Sequence[torch.Tensor], lives: Sequence[torch.Tensor], landing_of: Callable[[int], Landing], together: int
) -> list[torch.Tensor]:
    """`lives`, such that their gradients arrive at `homes`, about `together` bytes at once.

    `landing_of`: where those land of which this is the first.
    """
    replay = _replay()
    if replay is not None:
        return replay.shown(lives)
    shown: list[torch.Tensor] = []
    while len(shown) < len(homes):
        group = slice(len(shown), len(shown) + _how_many(homes[len(shown) :], together))
        crossings: dict[int, _Crossing] = {}  # by the number of the backward: a graph may be gone through by several
        between = _applied(_Arrive, crossings, *homes[group])
        landing = landing_of(len(shown))
        shown += _applied(_Leave, list(lives[group]), crossings, landing, between)
    return shown


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`, which does nothing but ask about torch.func before it goes on here, for half of its time."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # torch has it in C


def _how_many(homes: Sequence[torch.Tensor], together: int) -> int:
    """How many of the first ones share their nodes.

    One that has hooks is alone: where a weight gets no gradient and its neighbours do, autograd would call its hooks
    all the same, with None.
    """
    nbytes = 0
    with torch._C.DisableTorchFunctionSubclass():
        for count, home in enumerate(homes):
            if home._backward_hooks or home._post_accumulate_grad_hooks:
                return max(count, 1)
            if nbytes >= together:
                return count
            nbytes += home.nbytes
    return len(homes)


# Versions.


class Version:
    """Whether a tensor was edited in place since, without holding its memory.

    Any saved-tensors hook turns autograd's own check off. A tensor keeps its version when it is given other data, so
    one that is detached and emptied goes on counting the edits of the first.
    """

    __slots__ = ("_counter", "_expected", "shape")

    def __init__(self, tensor: torch.Tensor, expected: int | None = None) -> None:
        self.shape = tensor.shape
        self._counter: torch.Tensor | None = None
        if not tensor.is_inference():  # those have no version, and cannot be edited
            self._counter = tensor.detach()
            if tensor.layout is torch.strided:  # others cannot be emptied
                self._counter.data = _nothing(tensor.device)
            self._expected = tensor._version if expected is None else expected

    def check(self) -> None:
        """Raise as autograd does if the tensor was edited."""
        counter = self._counter
        if counter is not None and counter._version != self._expected:
            refuse_other_version(self.shape, counter._version, self._expected)


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    """A tensor without memory, whose dtype does not matter."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device)


def refuse_edited(what: str) -> NoReturn:
    """Raise what autograd raises when a tensor that it needs was edited."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}"
    )


def refuse_other_version(shape: Sequence[int], version: int, expected: int) -> NoReturn:
    """The same, of a tensor whose versions are known."""
    refuse_edited(f"a tensor of shape {list(shape)} is at version {version}; expected version {expected} instead")


# What is saved.


class Lender(Protocol):
    """Whoever brings a streamed unit's bytes back to the device for its backward."""

    def weight(self, index: int, version: int) -> torch.Tensor:
        """A weight, arrived as far as the current stream is concerned. Raises if it is not at `version` any more."""

    def version(self, index: int) -> int:
        """Grows with each in-place edit of a weight that autograd would notice, at home or in a call."""


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class _SavedWeight:
    """A view of a weight that an operation saved: its unit comes back when backward asks for it."""

    lender: Lender
    index: int
    dtype: torch.dtype
    shape: torch.Size
    offset: int  # in bytes, from where the weight begins
    stride: tuple[int, ...]
    version: int
    is_conj: bool
    is_neg: bool

    def values(self) -> torch.Tensor:
        whole = self.lender.weight(self.index, self.version)
        if whole.dtype is self.dtype:
            start = int(whole.storage_offset()) + self.offset // self.dtype.itemsize
            view = whole.as_strided(self.shape, self.stride, start)
        else:
            start = int(whole.storage_offset()) * whole.itemsize + self.offset
            view = over(whole.untyped_storage(), self.dtype, start, self.shape, self.stride)
        if self.is_conj:  # its bytes are those of the weight: whoever reads them conjugates, or negates
            view = view.conj()
        return torch._neg_view(view) if self.is_neg else view


class SavedTensor:
    """Any other saved tensor, with the version that autograd would have checked had no hook been there."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saved its own result would otherwise hold itself. The two share their version.
        self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def values(self) -> torch.Tensor:
        """The tensor, if it is what it was."""
        tensor = self._tensor
        if self._version is not None and tensor._version != self._version:
            refuse_other_version(tensor.shape, tensor._version, self._version)
        return tensor


_Hook = Callable[[Any], Any]


class Recorder(ABC):
    """Whose hooks see all that a block's operations save, and hold none of it longer than one backward needs the block.

    Weights may be among it, then. That is quicker than notes: a block saves each of its weights, and short steps wait
    for what is done for each.
    """

    @abstractmethod
    def takes_weights(self, module: nn.Module, slabs: Sequence[Slab]) -> bool:
        """Whether weights of `module`, which lie in `slabs`, can be saved as they are."""


def recorder() -> Recorder | None:
    """Whose hooks are called for what is saved now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None, None)
    owner = getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, Recorder) else None


def saving_weights_as_notes(parts: Sequence[tuple[Slab, Lender]]) -> AbstractContextManager[None]:
    """Within, a saved tensor that lies in one of the slabs is kept as a note, so the slab can go.

    Only the innermost hooks are called, so everything else is passed on to the hooks around (activation checkpointing).
    """
    slabs = [(slab.memory.data_ptr(), slab.memory.nbytes, slab.layout, lender) for slab, lender in parts]
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack_other, unpack_other = cast(tuple[_Hook, _Hook], outer or (SavedTensor, None))
    note = _no_note if is_replaying() else _note

    def pack(tensor: torch.Tensor) -> Any:
        try:
            address = tensor.data_ptr()  # quicker than to ask for its storage
        except RuntimeError:  # sparse tensors and some subclasses have no memory of the usual sort
            return pack_other(tensor)
        for start, nbytes, layout, lender in slabs:
            if 0 <= address - start < nbytes:
                return note(tensor, address - start, layout, lender)
        return pack_other(tensor)

    def unpack(saved: Any) -> Any:
        # Whichever hooks of ours made it. This is asked for each tensor that a backward needs, so it must be quick.
        return saved.values() if type(saved) in _OURS else unpack_other(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


_OURS = (_SavedWeight, SavedTensor)


def _no_note(tensor: torch.Tensor, start: int, layout: Layout | None, lender: Lender) -> None:
    """In a replay no gradient asks for a weight."""


def _note(tensor: torch.Tensor, start: int, layout: Layout | None, lender: Lender) -> _SavedWeight:
    assert layout is not None
    index = layout.index_at(start)
    offset, version = start - layout.offsets[index], lender.version(index)
    lazy = tensor.is_conj(), tensor.is_neg()
    return _SavedWeight(lender, index, tensor.dtype, tensor.shape, offset, tensor.stride(), version, *lazy)

"""What autograd's graph keeps of a streamed unit: ways home for gradients and notes about weights, never a slab."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from overspill.slab import Slab
from overspill.store import Store


class _Onload(torch.autograd.Function):
    """Home to live, as autograd sees it: the same values, and a gradient that goes to where the home is."""

    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # where it is, not where it acts as if it were
            ctx.device = home.device
        return live

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device), None


def onload(home: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """`live`, such that its gradient arrives at `home`."""
    return cast(torch.Tensor, _Onload.apply(home, live))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _SavedWeight:
    """A view of a weight that an operation saved: fetched again when backward asks for it."""

    store: Store
    index: int
    offset: int  # in elements, from the weight's start
    size: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    version: int

    def values(self) -> torch.Tensor:
        if self.store.version(self.index) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an offloaded weight of shape {list(self.size)} was edited between forward and backward"
            )
        weight = self.store.layout.specs[self.index].empty(self.device)
        with torch.no_grad():
            self.store.refresh(self.index, weight)
        return weight.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _SavedTensor:
    """Any other saved tensor, with the version that autograd would have checked had no hook been there."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _SavedElsewhere:
    """What the hooks around ours made of a tensor."""

    packed: Any


_Hook = Callable[[Any], Any]


@contextmanager
def saving_weights_as_notes(parts: Sequence[tuple[Store, Slab]]) -> Iterator[None]:
    """Within, a saved tensor that lies in one of the slabs is kept as a note, so the slab can go.

    Only the innermost hooks are called, so everything else is passed on to the hooks around (activation checkpointing).
    """
    slabs = {slab.memory.untyped_storage()._cdata: store for store, slab in parts}
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        store = slabs.get(_storage(tensor))
        if store is not None:
            return _note(tensor, store)
        if outer is not None:
            return _SavedElsewhere(cast(_Hook, outer[0])(tensor))
        # Detached: a node that saved its own result would otherwise hold itself. The two share their version.
        return _SavedTensor(tensor.detach(), tensor._version)

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            return saved.values()
        if isinstance(saved, _SavedElsewhere):
            assert outer is not None
            return cast(torch.Tensor, cast(_Hook, outer[1])(saved.packed))
        assert isinstance(saved, _SavedTensor)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(saved.tensor.shape)} is at version {saved.tensor._version}; "
                f"expected version {saved.version} instead"
            )
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return 0


def _note(tensor: torch.Tensor, store: Store) -> _SavedWeight:
    start = tensor.storage_offset() * tensor.element_size()
    layout = store.layout
    index = max(i for i, offset in enumerate(layout.offsets) if offset <= start)
    return _SavedWeight(
        store,
        index,
        (start - layout.offsets[index]) // tensor.element_size(),
        tensor.shape,
        tensor.stride(),
        tensor.device,
        store.version(index),
    )

"""Buffers that a block writes in its forward: running statistics, counts, codebooks. A replay must not do so again.

Note: a replay computes with what the buffers were when the forward began, be they written by the forward or by anybody
since. It has tensors of its own for those, and whatever it writes goes with them. To copy a buffer takes time, and most
are never written: masks, frequencies, packed weights. So large ones are copied in the first call of a block, to see,
and from then on where they were written once. Where a copy is missing that a replay needs, it is told.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from overspill.errors import StateError
from overspill.graph import refuse_edited
from overspill.homes import DiskTensor, HostTensor, edits_of, is_plain, ordinary
from overspill.stand_ins import NOTHING, StandIns

SMALL: Final = 1 << 16
"""Bytes of a buffer that is copied in each call."""

_Key = tuple[int, str]


class BlockBuffers:
    """What is known of the buffers of one block: which of them its calls write."""

    def __init__(self) -> None:
        self.written: set[_Key] = set()
        self.was_called = False

    def begin_call(self, modules: Sequence[nn.Module]) -> "Before | None":
        """What a call begins with. Nothing if the block has no buffers."""
        with_buffers = [module for module in modules if module._buffers]
        if not with_buffers:
            return None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # to look at a home is not to use it
            return Before(self, [_Entry.of(module, name, self) for module in with_buffers for name in module._buffers])


@dataclass(slots=True)
class _Entry:
    """One entry of a module's table, as it was."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    edits: int
    copy: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Module, name: str, buffers: BlockBuffers) -> "_Entry":
        tensor = module._buffers[name]
        if tensor is None or tensor.is_inference():  # the latter cannot be edited
            return cls(module, name, tensor, 0, tensor)
        edits = edits_of([tensor])[0]
        if not is_plain(tensor):
            return cls(module, name, tensor, edits, None)
        is_copied = tensor.nbytes <= SMALL or not buffers.was_called or (id(module), name) in buffers.written
        return cls(module, name, tensor, edits, ordinary(tensor).clone() if is_copied else None)

    @property
    def key(self) -> _Key:
        return id(self.module), self.name

    def is_other(self) -> bool:
        """Whether it is not what it was when the call began."""
        return self.module._buffers.get(self.name, NOTHING) is not self.tensor or self.was_edited()

    def was_edited(self) -> bool:
        """Whether the tensor itself is another by now."""
        tensor = self.tensor
        return tensor is not None and not tensor.is_inference() and edits_of([tensor])[0] != self.edits

    def is_written_unseen(self) -> bool:
        """Whether each call writes it without a trace in its version: running statistics."""
        return isinstance(self.module, _NormBase) and self.module.training

    def stand_in(self, device: torch.device) -> torch.Tensor | None:
        """What a replay has in its place."""
        tensor, copy = self.tensor, self.copy
        if tensor is None or copy is None:
            return tensor  # which has not changed
        where = device if isinstance(tensor, HostTensor | DiskTensor) else tensor.device
        return copy.to(where, copy=True).requires_grad_(tensor.requires_grad)


class Before:
    """A block's buffers when a call began."""

    def __init__(self, buffers: BlockBuffers, entries: list[_Entry]) -> None:
        self._buffers, self._entries = buffers, entries
        self._shown: dict[int, _Entry] = {}
        self._written: set[_Key] | None = None  # until the call has ended
        self._added: list[tuple[dict[str, Any], str]] = []

    def are_shown(self) -> None:
        """The modules show what the call computes with: some may be on the device for as long as that takes."""
        for entry in self._entries:
            shown = entry.module._buffers.get(entry.name)
            if shown is not None and shown is not entry.tensor:
                self._shown[id(shown)] = entry

    def end_call(self, *, has_failed: bool) -> None:
        """The call has ended. One that has failed may not have come as far as writing."""
        with torch._C.DisableTorchFunctionSubclass():
            self._written = {each.key for each in self._entries if each.is_other() or each.is_written_unseen()}
        self._buffers.written |= self._written
        self._buffers.was_called |= not has_failed
        for entry in self._entries:
            if entry.copy is not None and entry.copy.nbytes > SMALL and entry.key not in self._buffers.written:
                entry.copy = None
        known = {entry.key for entry in self._entries}
        modules = {id(entry.module): entry.module for entry in self._entries}.values()
        self._added = [(m._buffers, name) for m in modules for name in m._buffers if (id(m), name) not in known]

    def version_of(self, shown: torch.Tensor) -> "BufferVersion | None":
        """Of a buffer that the call had on the device for a while."""
        entry = self._shown.get(id(shown))
        return None if entry is None or entry.tensor is None else BufferVersion(entry.tensor)

    def again(self, block: str, device: torch.device) -> AbstractContextManager[None]:
        """Within, the block's modules show the buffers as they were."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            others = [entry for entry in self._entries if self._may_be_other(entry)]
            for entry in others:
                if entry.copy is None and (self._is_written(entry) or entry.was_edited()):
                    self._refuse(block, entry)
            return StandIns(self._as_they_were(others, device))

    def _may_be_other(self, entry: _Entry) -> bool:
        if self._written is None:  # a block may compute gradients within itself
            return entry.copy is not None or entry.is_other()
        return self._is_written(entry) or entry.is_other()

    def _is_written(self, entry: _Entry) -> bool:
        return entry.tensor is not None and self._written is not None and entry.key in self._written

    def _refuse(self, block: str, entry: _Entry) -> None:
        self._buffers.written.add(entry.key)
        raise StateError(
            f"{type(entry.module).__name__}.{entry.name}, a buffer of {block}, was written for the first time, in its "
            "forward or since. Nobody had kept what it was, so the block cannot be recomputed for this backward. From "
            "now on it is kept: run the step again"
        )

    def _as_they_were(
        self, others: Iterable[_Entry], device: torch.device
    ) -> Iterator[tuple[dict[str, Any], str, object]]:
        made: dict[int, torch.Tensor | None] = {}  # one that is there twice, once
        for entry in others:
            identity = id(entry.tensor)
            if identity not in made:
                made[identity] = entry.stand_in(device)
            yield entry.module._buffers, entry.name, made[identity]
        yield from ((table, name, NOTHING) for table, name in self._added)


class BufferVersion:
    """The version of a buffer that comes to the device and goes: what it was there counts for nothing."""

    def __init__(self, home: torch.Tensor) -> None:
        self._home, self._expected = home, edits_of([home])

    def check(self) -> None:
        """Raise as autograd does if the buffer was edited."""
        if edits_of([self._home]) != self._expected:
            refuse_edited(f"a buffer of shape {list(self._home.shape)} was edited between forward and backward")

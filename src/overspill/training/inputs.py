"""The tensors among a block's arguments, kept for the day it is computed once more.

Note: some blocks edit their inputs, by an in-place activation first thing. A replay needs those as they were, so they
are copied. Most blocks do not: all inputs are copied in the first call of each kind of block, to see, and from then on
those that were edited. One that is edited for the first time in a later call is told when it is needed.
"""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from overspill.errors import StateError
from overspill.homes import is_plain
from overspill.integrations.caches import as_it_is
from overspill.tensors import storage_key


class Keeper(Protocol):
    """Whoever looks after what a block needs for its replay."""

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Put a tensor aside, and return what gives it back."""

    def bring_next(self) -> None:
        """Backward is half-way through the block: soon another will need what was put aside before."""


class EditedInputs:
    """Which of their inputs blocks of one kind edit: a replay needs those as they were. Known once one was called."""

    def __init__(self) -> None:
        self._edited: set[int] = set()
        self._is_known = False

    def may_edit(self, index: int) -> bool:
        """Whether to keep a copy of the input at `index` before the call."""
        return not self._is_known or index in self._edited

    def see(self, inputs: Collection["Input"], *, has_failed: bool) -> None:
        """A call with these has ended. One that has failed may not have come as far as an edit."""
        self._is_known |= not has_failed
        edited = [each for each in inputs if each.was_edited()]
        if edited:  # hardly ever, and short steps wait for what is done for each
            self._edited.update(each.index for each in edited)
            storages = [each.storage() for each in inputs]
            for each in edited:
                each.take_back(is_alone=storages.count(each.storage()) == 1)


class Input:
    """A tensor among a block's arguments, the one at `index`."""

    _before: torch.Tensor | None = None
    _kept: Callable[[], torch.Tensor] | None = None
    _is_edited_again = False
    _is_lost = False

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.index = index
        self._tensor: torch.Tensor | None = tensor  # until it is put aside
        self._requires_grad = tensor.requires_grad
        self._edits = None if tensor.is_inference() else tensor._version

    def keep_as_it_is(self) -> None:
        """The call may edit it."""
        if self._tensor is not None and self._edits is not None and is_plain(self._tensor):
            self._before = self._tensor.detach().clone()

    def was_edited(self) -> bool:
        """Whether the call has edited it."""
        if self._is_edited_again:
            return True
        return self._tensor is not None and self._edits is not None and self._tensor._version != self._edits

    def storage(self) -> int:
        """The identity of its memory."""
        return 0 if self._tensor is None else storage_key(self._tensor)

    def take_back(self, *, is_alone: bool) -> None:
        """Have it as it was before the call edited it.

        `is_alone`: no other input has its memory. One that has would have to be edited with it.
        """
        self._is_lost = self._before is None or not is_alone
        if not self._is_lost:
            self._tensor, self._is_edited_again = self._before, True

    def put_aside(self, keep: Keeper) -> None:
        """The call has ended. Whoever keeps the tensor knows of edits from now on."""
        assert self._tensor is not None
        self._kept = keep(self._tensor)
        self._tensor = self._before = None

    def again(self) -> torch.Tensor:
        """The tensor, for a replay, which may edit it."""
        if self._kept is None and self.was_edited():  # by a call under way, which computes gradients within itself
            self.take_back(is_alone=True)
        tensor = self._tensor if self._kept is None else self._kept()
        assert tensor is not None
        if self._is_lost:
            raise StateError(
                f"a block that is to be recomputed has edited an input, of shape {list(tensor.shape)}, for the first "
                "time or while another input has the same memory. In the first case run the step again: from now on "
                "the input is kept as it was. In the other, give the block a copy"
            )
        values = tensor.detach()
        if self._requires_grad:
            values.requires_grad_()
        if not self._is_edited_again:
            return values
        with torch.enable_grad():  # a leaf cannot be edited
            return values.clone()


class FilledCache:
    """A key-value cache among a block's arguments, as it was before the call.

    Not the cache itself: that has what the block computed, whose graph has the block's arguments.
    """

    def __init__(self, cache: Any) -> None:
        self._before = as_it_is(cache)

    def again(self) -> Any:
        """A cache, for a replay to fill."""
        return as_it_is(self._before)

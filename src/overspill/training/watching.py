"""What is seen of a block's calls while a step is measured."""

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from overspill.devices import Moment
from overspill.graph import storage_key
from overspill.training.recompute import Frame


class Watch:
    """Time and bytes of one block's calls."""

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.input_bytes = 0
        self._calls: list[tuple[Moment, Moment]] = []

    def begin_call(self, frame: Frame, weights: Collection[int], device: torch.device) -> Callable[[], None]:
        """Watch the call that `frame` records. Returns what to call at its end."""
        seen: dict[int, StorageWeakRef] = {}  # held, so that no storage gets the identity of one that is gone

        def count(tensor: torch.Tensor) -> None:
            key = storage_key(tensor)
            if key and key not in seen and key not in weights and tensor.device == device:
                seen[key] = StorageWeakRef(tensor.untyped_storage())
                self.saved_bytes += tensor.untyped_storage().nbytes()

        frame.on_save = count
        self.input_bytes += frame.input_bytes
        return partial(self._end_call, Moment(device), device)

    def _end_call(self, start: Moment, device: torch.device) -> None:
        self._calls.append((start, Moment(device)))

    def seconds(self) -> float:
        """Of all calls together. The device must have done its work."""
        return sum(end.seconds_since(start) for start, end in self._calls)

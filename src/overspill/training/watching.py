"""What is seen of a block's calls while a step is measured."""

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from overspill.devices import Moment
from overspill.tensors import storage_key
from overspill.training.recompute import Frame


class Watch:
    """Time and bytes of one block's calls."""

    def __init__(self, on_replay: Callable[["Watch"], None], device: torch.device, small: int) -> None:
        self.on_end: Callable[[], None] = lambda: None
        """Called when a call has ended."""
        self._on_replay, self._device, self._small = on_replay, device, small
        self.saved_bytes = 0
        self.saved_tensors = 0
        """Those that are not small."""
        self.largest_bytes = 0
        self.input_bytes = 0
        self.sent_bytes = 0
        self.host_seconds = 0.0
        """In which replays were queued: nothing waits for the device there."""
        self._calls: list[tuple[Moment, Moment]] = []
        self._replays: list[tuple[Moment, Moment]] = []
        self._backwards: list[tuple[Moment, Moment]] = []

    def begin_call(self, frame: Frame, weights: Collection[int], sent: Callable[[], int]) -> Callable[[], None]:
        """Watch the call that `frame` records, and its replay. Returns what to call at its end.

        `sent`: how many bytes have left the device so far.
        """
        seen: dict[int, StorageWeakRef] = {}  # held, so that no storage gets the identity of one that is gone

        def count(tensor: torch.Tensor) -> None:
            key = storage_key(tensor)
            if key and key not in seen and key not in weights and tensor.device == self._device:
                seen[key] = StorageWeakRef(tensor.untyped_storage())
                nbytes = tensor.untyped_storage().nbytes()
                self.saved_bytes += nbytes
                self.saved_tensors += nbytes >= self._small
                self.largest_bytes = max(self.largest_bytes, nbytes)

        frame.on_save = count
        frame.on_replay = self._begin_replay
        self.input_bytes += frame.input_bytes
        end, before = partial(self._end, self._calls, Moment(self._device)), sent()

        def end_call() -> None:
            end()
            self.sent_bytes += sent() - before
            self.on_end()

        return end_call

    def _begin_replay(self) -> Callable[[], None]:
        self._on_replay(self)
        began, end = time.perf_counter(), partial(self._end, self._replays, Moment(self._device))

        def end_replay() -> None:
            self.host_seconds += time.perf_counter() - began
            end()

        return end_replay

    def _end(self, times: list[tuple[Moment, Moment]], start: Moment) -> None:
        times.append((start, Moment(self._device)))

    def end_backward(self) -> None:
        """What followed the last replay is done."""
        if len(self._replays) > len(self._backwards):  # else one has failed
            self._end(self._backwards, self._replays[-1][1])

    def seconds(self) -> float:
        """Of all calls together. The device must have done its work."""
        return _sum(self._calls)

    def replay_seconds(self) -> float | None:
        """Of all replays together; None where there was none."""
        return _sum(self._replays) if self._replays else None

    def backward_seconds(self) -> float | None:
        """Of all backwards together, replays apart; None where the end of one is not known."""
        known = self._replays and len(self._backwards) == len(self._replays)
        return _sum(self._backwards) if known else None


def _sum(times: Iterable[tuple[Moment, Moment]]) -> float:
    return sum(end.seconds_since(start) for start, end in times)

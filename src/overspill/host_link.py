"""Bytes on their way from a device to host memory, and back: what training leaves there for a while."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from overspill.config import DEVICE_ALIGNMENT, MIB, align
from overspill.devices import (
    current_stream_waits,
    new_stream,
    on_stream,
    record_event,
    stream_numbers,
    stream_waits,
    users_counter,
    without_autograd,
)
from overspill.slab import HostPool, Slab


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How much leaves a device at once: what is on its way, or waits for others to leave with, takes device memory."""

    in_flight: int
    """Bytes that may be on their way to host memory at once."""
    departures: int
    """… or so many departures, however large."""
    together: int = 256 * MIB
    """Gradients of so many bytes share a departure, once the last of them has been computed."""
    last_together: int = 32 * MIB
    """… of those that are computed last: backward ends when they have arrived, and has nothing else to do meanwhile."""


USUAL = Pace(in_flight=512 * MIB, departures=2)
ONE_BY_ONE = Pace(in_flight=0, departures=1)


class Departure:
    """Copies from a device to host memory. Holds what they copy until they have ended, or whoever frees it must wait.

    `sent_from`: the number of the stream that computed it.
    """

    def __init__(self, sources: Collection[torch.Tensor], host: Slab, left: torch.Event | None, sent_from: int) -> None:
        self.nbytes = sum(source.nbytes for source in sources)
        self.host = host
        self.left = left  # on the stream of departures, behind the copies
        self.sent_from = sent_from
        self._has_ended = left is None
        self._sources: Collection[torch.Tensor] = sources

    def ended(self) -> bool:
        """Whether the copies have ended."""
        if not self._has_ended and self.left is not None and self.left.query():
            self._end()
        return self._has_ended

    def wait(self) -> None:
        """Wait here until the copies have ended."""
        if not self._has_ended and self.left is not None:
            self.left.synchronize()
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self.let_go()

    def let_go(self) -> None:
        """Hold nothing on the device: somebody else does, or the stream that computed it waits for the copies."""
        self._sources = ()


class Landing:
    """Host memory that the same tensors land in each time they leave, while nobody else has any of it by then.

    Gradients are alike from step to step. To take memory for a block's took 87 of the 321 µs in which the host sent it,
    without what it takes to make tensors of it (H200, torch 2.11).
    """

    def __init__(self, link: "HostLink") -> None:
        self.link = link
        self._laid_out: tuple[Slab, list[torch.Tensor]] | None = None
        self._layouts: list[_Layout] = []
        self._users: Callable[[], int] = lambda: 0
        self._unshared = 0

    def again(self, sources: Collection[torch.Tensor]) -> tuple[Slab, list[torch.Tensor]] | None:
        """The memory of the last time, if it is free and what lay there was laid out as these are."""
        if self._laid_out is None or self._users() != self._unshared:
            return None
        return self._laid_out if _layouts(sources) == self._layouts else None

    def remember(self, laid_out: tuple[Slab, list[torch.Tensor]]) -> None:
        """Have it for the next time, unless somebody has what is here: that will be free in its turn."""
        if self._laid_out is None or self._users() == self._unshared:
            self._laid_out = laid_out
            self._layouts = _layouts(laid_out[1])
            self._users = users_counter(laid_out[0].memory.untyped_storage())
            self._unshared = self._users()


_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def _layouts(tensors: Iterable[torch.Tensor]) -> list[_Layout]:
    """What is equal for those that are laid out alike."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


class HostLink:
    """What leaves one device for host memory and may come back: pinned memory for it, and a stream each way.

    Two streams, since the link carries as much in one direction while it is busy in the other.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = HostPool(device)
        self.pace = USUAL
        self._departures, self._returns = new_stream(device), new_stream(device)
        self._under_way: deque[Departure] = deque()
        self._stream = stream_numbers(device)
        self._lock = threading.Lock()

    def send(
        self, sources: Collection[torch.Tensor], landing: Landing | None = None
    ) -> tuple[Departure, list[torch.Tensor]]:
        """Start to copy dense tensors to host memory, once all that this thread has queued so far is computed.

        While too much is under way, what this thread queues from now on waits: a host that runs ahead of its device
        would fill the device's memory.
        Returns also the copies, which have their values once the departure has ended. They share one slab.
        """
        with self._lock, without_autograd():
            laid_out = None if landing is None else landing.again(sources)
            if laid_out is None:
                laid_out = self._lay_out(sources)
                if landing is not None:
                    landing.remember(laid_out)
            else:
                self._make_way(laid_out[0].memory.nbytes)
            host, copies = laid_out
            if landing is not None:
                copies = [copy.detach() for copy in copies]  # which are gone when nobody has them any more
            stream = self._departures
            computed = record_event(self.device)
            with on_stream(stream):
                stream_waits(stream, [*host.overwrite_after, *([] if computed is None else [computed])])
                host.overwrite_after = []  # whatever follows on this stream is behind them
                torch._foreach_copy_(copies, list(sources), non_blocking=True)  # laid out alike: the bytes as they are
            left = record_event(self.device, stream)
            departure = Departure(sources, host, left, self._stream())
            host.used_until(left)
            if left is not None:
                self._under_way.append(departure)
            return departure, copies

    def _lay_out(self, sources: Collection[torch.Tensor]) -> tuple[Slab, list[torch.Tensor]]:
        """Room for copies of these in one slab."""
        ends = list(accumulate(align(source.nbytes, DEVICE_ALIGNMENT) for source in sources))
        self._make_way(ends[-1])
        host = self.pool.take(ends[-1])
        typed = {dtype: host.memory.view(dtype) for dtype in {source.dtype for source in sources}}
        copies = [  # through .data, since views share a version: to edit one gradient is not to edit all
            typed[source.dtype].as_strided(source.shape, source.stride(), start // source.itemsize).data
            for source, start in zip(sources, [0, *ends], strict=False)
        ]
        return host, copies

    def _forget_ended(self) -> None:
        """Let go of what has been copied."""
        while self._under_way and self._under_way[0].ended():
            self._under_way.popleft()

    def _make_way(self, nbytes: int) -> None:
        self._forget_ended()
        pace, under_way = self.pace, self._under_way
        while len(under_way) >= pace.departures and sum(each.nbytes for each in under_way) + nbytes > pace.in_flight:
            self._let_go(under_way.popleft())

    def _let_go(self, departure: Departure) -> None:
        """Have its memory for what this thread computes from now on, which waits for the copies.

        The host goes on. It had waited here until the device was through with the forward, and was late from then on.
        """
        if departure.sent_from == self._stream():
            current_stream_waits(self.device, departure.left)
            departure.let_go()
        else:
            departure.wait()  # its memory goes back to another stream

    def bring_back(self, host: Slab, nbytes: int, left: torch.Event | None) -> tuple[torch.Tensor, torch.Event | None]:
        """The first bytes of `host`, which are there behind `left`, on the device; and what to wait for to use them.

        Their memory is the current stream's. Whoever drops it before the event has passed must keep it until then.
        """
        with self._lock:
            self._forget_ended()
        stream = self._returns
        with torch.inference_mode(False):
            back = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        made = record_event(self.device)  # torch's allocator may give memory that queued work still uses
        with on_stream(stream), torch.inference_mode(False), torch.no_grad():
            stream_waits(stream, [event for event in (made, left) if event is not None])
            back.copy_(host.memory[:nbytes], non_blocking=True)
        arrived = record_event(self.device, stream)
        host.used_until(arrived)
        return back, arrived

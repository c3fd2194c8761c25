"""The gate of a model: calls go through side by side, a change of the model itself waits until none is under way."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from overspill.errors import StateError

_COURTESY = 0.05
"""Seconds that a new call lets a waiting change go first. Not forever: the call may be one that others wait for."""


class Ticket:
    """One call's way through the gate."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_through = False  # its call is under way


class Gate:
    """Serialises what changes a model with its calls. A call may contain others, in the same thread or in others."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._calls: set[Ticket] = set()  # a set, not a count: an interrupt at any line leaves it right
        self._waiting: set[Ticket] = set()
        self._changing: Ticket | None = None
        self.on_idle: Callable[[], None] = _nothing  # when the last call that is under way ends

    def enter(self, ticket: Ticket) -> None:
        """A call begins. `leave` must follow, also if this fails."""
        with self._free:
            if self._waiting or self._changing is not None:
                self._wait_for_changes(ticket)
            ticket.is_through = True  # first: an interrupt may come in between
            self._calls.add(ticket)

    def _wait_for_changes(self, ticket: Ticket) -> None:
        if not self.is_inside(ticket.thread):
            self._free.wait_for(lambda: not self._waiting, timeout=_COURTESY)
        self._free.wait_for(lambda: self._changing is None or self._changing.thread == ticket.thread)

    def leave(self, ticket: Ticket) -> None:
        """A call ends."""
        with self._free:
            if ticket not in self._calls:
                return
            self._calls.discard(ticket)
            ticket.is_through = False
            if not self._calls:
                self._free.notify_all()
                self.on_idle()

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Within, no call is under way, and none begins. `what` is about to happen, for errors."""
        ticket = Ticket()
        with self._free:
            if self.is_inside(ticket.thread):
                raise StateError(f"cannot {what} while a forward of it is running. Do that before or after the call")
            self._waiting.add(ticket)
            try:
                self._free.wait_for(lambda: not self._calls and self._changing is None)
                self._changing = ticket
            finally:
                self._waiting.discard(ticket)
        try:
            yield
        finally:
            with self._free:
                self._changing = None
                self._free.notify_all()

    def is_inside(self, thread: int) -> bool:
        """Whether a call of this thread is under way."""
        return any(ticket.thread == thread for ticket in self._calls)


def _nothing() -> None:
    """For a model that has nothing to do when it is idle."""


_gates: "weakref.WeakKeyDictionary[nn.Module, Gate]" = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def gate_of(model: nn.Module) -> Gate:
    """The one gate of `model`."""
    with _gates_lock:
        return _gates.setdefault(model, Gate())

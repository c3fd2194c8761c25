"""Threads that work on gradients while backward goes on, and how gradients get to them."""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from overspill.errors import StateError


@functools.cache
def workers(count: int) -> ThreadPoolExecutor:
    """Threads that work on gradients while others do other things.

    Their names are not like those of our other threads: they compute with parameters, so that whoever takes memory from
    a parameter (`rehoming.let_go`) must wait for them.
    """
    return ThreadPoolExecutor(count, "host-adamw", initializer=partial(torch.set_grad_enabled, False))


os.register_at_fork(after_in_child=workers.cache_clear)  # a child has none of its parent's threads


def compute_as_with(threads: int) -> None:
    """Let torch use as many threads below this one as below the caller's: the rounding of some sums depends on it."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class Arrivals:
    """The gradients of a backward, handed to workers one by one as they become final."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        admit: Callable[[torch.Tensor], None],
        work: Callable[[torch.Tensor], None],
        workers: int,
    ) -> None:
        self._admit, self._work, self._workers = admit, work, workers
        self._process = os.getpid()
        self._threads = torch.get_num_threads()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = 0
        self.failure: tuple[torch.Tensor, BaseException] | None = None
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters]

    def close(self) -> None:
        """Take no more, and wait for those that are being worked on. The others have not been begun."""
        for hook in self._hooks:
            hook.remove()
        if os.getpid() != self._process:
            raise StateError(
                "this process was forked while the optimizer was at work, which goes on in its parent. "
                "Fork after optimizer.step()"
            )
        with self._changed:
            self._closed = True
            while self._busy:
                self._changed.wait(timeout=1.0)  # a bounded wait lets an interrupt through

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Called by autograd, in its thread."""
        self._admit(parameter)
        workers(self._workers).submit(self._take, parameter)

    def _take(self, parameter: torch.Tensor) -> None:
        with self._changed:
            if self._closed or self.failure is not None:
                return
            self._busy += 1
        try:
            compute_as_with(self._threads)
            self._work(parameter)
        except BaseException as error:  # it belongs to the step, not to this thread
            self.failure = parameter, error
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

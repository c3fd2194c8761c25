"""Models built without weights, or with weights that are on a device from the start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overspill.devices import compute_device
from overspill.skeleton import empty_weights, registered_on

_INCLUDE_BUFFERS = "ACCELERATE_INIT_INCLUDE_BUFFERS"  # Accelerate's own variable, which decides where nothing is said
_YES = {"1", "on", "t", "true", "y", "yes"}


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters are on the meta device, and take no memory.

    Args:
        include_buffers: Buffers too. None: what the environment variable ACCELERATE_INIT_INCLUDE_BUFFERS says, else no.
    """
    with empty_weights(_with_buffers(include_buffers)):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules whose parameters are on a device from the start.

    Args:
        device: Where they are.
        include_buffers: Buffers too. None: what the environment variable ACCELERATE_INIT_INCLUDE_BUFFERS says, else no.
    """
    if device in ("meta", torch.device("meta")):
        with empty_weights(_with_buffers(include_buffers)):
            yield
        return
    with registered_on(compute_device(device), _with_buffers(include_buffers)):
        yield


def _with_buffers(given: bool | None) -> bool:
    return os.environ.get(_INCLUDE_BUFFERS, "").lower() in _YES if given is None else given

"""A disk that fails when it is told to, as the reader and the writers of overspill see it; nobody else does.

Nothing of the operating system is replaced: each module gets an `os` of its own, whose calls go through a `Faults`.
"""

import errno
import io
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from overspill import bundles
from overspill.checkpoint import lease, pagecache, publishing, reader, writer
from overspill.transfer import Transfer

READS = ("preadv", "pread", "open", "bring_in", "show")
WRITES = ("write", "copy_file_range", "fsync", "replace", "link", "create")
HARD = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "torn": errno.ENOSPC}
"""What makes a call fail, and with what. A torn write has written a part of it by then."""
SOFT = ("short", "delay")
"""What is no error: all that was asked for comes, in pieces or late."""


class Faults:
    """Decides which call fails. Harmless until armed; then the calls of one name fail from one of them on."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()  # reader threads share it
        self._kind: str | None = None
        self._names: tuple[str, ...] = ()
        self._spared = self._left = 0
        self.calls = 0
        """Of any name, also harmless ones."""
        self.injected = 0
        """Faults, hard and soft, since this was last armed."""

    def arm(self, kind: str, names: tuple[str, ...], *, spared: int, times: int) -> None:
        """Let `spared` calls of these names pass; then `times` calls meet a fault of this kind."""
        with self._lock:
            self._kind, self._names, self._spared, self._left = kind, names, spared, times
            self.injected = 0

    def arm_at_random(self, chance: random.Random) -> str:
        """Some fault, somewhere. Returns what it is, for messages."""
        kind = chance.choice([*HARD, *SOFT])
        names = chance.choice([READS, WRITES, READS + WRITES]) if kind != "torn" else ("write",)
        if chance.random() < 0.3:
            names = (chance.choice(names),)
        spared, times = chance.choice([0, 0, 1, 2, 5, 9, 20]), chance.choice([1, 1, 2, 10**6])
        self.arm(kind, names, spared=spared, times=times)
        return f"{kind} in {'/'.join(names)} after {spared}, {times} times"

    def mend(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._kind = None

    def meet(self, name: str, nbytes: int | None = None) -> int | None:
        """Called before each call of `name`. Raises, waits, or says to how many bytes the call shall be cut."""
        with self._lock:
            self.calls += 1
            if self._kind is None or name not in self._names:
                return nbytes
            if self._spared or not self._left:
                self._spared -= self._spared > 0
                return nbytes
            self._left -= 1
            self.injected += 1
            kind, part = self._kind, self._chance.random()
        if kind == "delay":
            time.sleep(part * 0.002)
        if kind == "short" and nbytes is not None:
            return max(1, int(nbytes * part)) if nbytes else nbytes
        if kind in HARD:
            raise fault(kind)
        return nbytes

    def tears(self, name: str) -> bool:
        """Whether the next call of `name` is a write that ends in the middle."""
        with self._lock:
            return self._kind == "torn" and name in self._names and not self._spared and self._left > 0


def fault(kind: str) -> OSError:
    """The error that the system would raise."""
    return OSError(HARD[kind], os.strerror(HARD[kind]))


class FaultyOs(ModuleType):
    """The module `os`, with the calls that touch files led through `faults`."""

    def __init__(self, faults: Faults) -> None:
        super().__init__("os")
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        (target,) = buffers
        return os.preadv(descriptor, [target[: self._faults.meet("preadv", len(target))]], offset, *flags)

    def pread(self, descriptor: int, nbytes: int, offset: int) -> bytes:
        met = self._faults.meet("pread", nbytes)
        assert met is not None
        return os.pread(descriptor, met, offset)

    def open(self, path: Any, flags: int, *mode: int, **options: Any) -> int:
        self._faults.meet("create" if flags & os.O_CREAT else "open")
        return os.open(path, flags, *mode, **options)

    def copy_file_range(self, source: int, target: int, nbytes: int, offset: int) -> int:
        met = self._faults.meet("copy_file_range", nbytes)
        assert met is not None
        return os.copy_file_range(source, target, met, offset)

    def fsync(self, descriptor: int) -> None:
        self._faults.meet("fsync")
        os.fsync(descriptor)

    def link(self, *paths: Any, **options: Any) -> None:
        self._faults.meet("link")
        os.link(*paths, **options)


def _file_of(faults: Faults) -> type[io.FileIO]:
    class FaultyFile(io.FileIO):
        """A file whose writes go through `faults`."""

        def write(self, data: Any) -> int:
            if faults.tears("write"):
                super().write(data[: len(data) // 2])
            return super().write(data[: faults.meet("write", len(data))])

    return FaultyFile


def install(faults: Faults, patch: pytest.MonkeyPatch) -> None:
    """Put `faults` between overspill and its files, for as long as `patch` holds."""
    faulty: Any = FaultyOs(faults)
    for module in (reader, writer, publishing, bundles):
        patch.setattr(module, "os", faulty)
    patch.setattr(writer, "FileIO", _file_of(faults))
    patch.setattr(lease, "os", faulty)
    for name in ("bring_in", "show"):
        patch.setattr(pagecache, name, _led(faults, getattr(pagecache, name), name))
    patch.setattr(pagecache, "are_in_memory", lambda *_: False)  # each use has its pages brought in
    for name in ("replace", "rename"):
        patch.setattr(Path, name, _led(faults, getattr(Path, name), "replace"))


def _led(faults: Faults, call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def led(*arguments: Any) -> Any:
        faults.meet(name)
        return call(*arguments)

    return led


def delayed(call: Callable[..., Any], chance: random.Random, most: float) -> Callable[..., Any]:
    """`call`, which at random waits first: so that threads meet in other orders than they would by themselves."""
    lock = threading.Lock()

    def waiting(*args: Any, **options: Any) -> Any:
        with lock:
            pause = chance.random() * most if chance.random() < 0.3 else 0.0
        time.sleep(pause)  # of nothing at all, it still lets another thread run
        return call(*args, **options)

    return waiting


# ---------------------------------------------------------------- what a process holds


def descriptors() -> dict[int, str]:
    """The open files of this process, less the one that lists them."""
    held = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            held[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue
    return held


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def python_threads() -> list[threading.Thread]:
    """The threads that Python code has started. Autograd's, which torch starts for a device, are not among them."""
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


def fill_ring(device: str) -> None:
    """Have the pinned chunks that a process makes when it needs them, and keeps."""
    if device == "cpu":
        return
    ring = Transfer(torch.device(device)).ring()
    chunks = []
    while (chunk := ring._another()) is not None:
        chunks.append(chunk)
    for chunk in chunks:
        ring.give(chunk, None)

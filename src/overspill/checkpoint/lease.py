"""The kernel's promise that nobody changes a file while its pages are computed with."""

import fcntl
import os
import signal
from contextlib import suppress

from overspill.checkpoint.index import SourceFile


class Lease:
    """While it is held, whoever opens the file for writing, or shortens it, waits.

    Not for longer than /proc/sys/fs/lease-break-time (45 s): then the kernel takes it, and `is_intact` tells.
    """

    _descriptor = -1

    def __init__(self, file: SourceFile, descriptor: int) -> None:
        self._file = file
        self._process = os.getpid()
        self._descriptor = descriptor

    @classmethod
    def take(cls, file: SourceFile, descriptor: int) -> "Lease | None":
        """None where there is none to be had: the file is open for writing, somebody else's, or on a network."""
        if not hasattr(fcntl, "F_SETLEASE"):
            return None
        try:
            # Opened anew: a lease goes with the opening, and this way each has its own, which no other ends.
            # Without waiting for somebody who has a lease for writing: we can do without ours.
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        lease = cls(file, own)
        try:
            # Whoever wants to write has us sent a signal, which by default would end the process. This one is ignored.
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            lease.end()
            return None
        return lease

    def is_ours(self) -> bool:
        """Whether it was not taken by the process that this one was forked from, which may end it at any time."""
        return self._process == os.getpid()

    def is_intact(self) -> bool:
        """Whether nobody has written meanwhile, nor waits to."""
        return self.is_ours() and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def check(self) -> None:
        """Raise CheckpointChangedError unless the file is what it was when it was opened first."""
        self._file.check(self._descriptor)

    def end(self) -> None:
        """Let others write."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self.is_ours():
            with suppress(OSError):  # it was taken
                # Not by closing alone: a process that was forked meanwhile has the same opening.
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(descriptor)

    def __del__(self) -> None:
        self.end()  # whatever interrupted those who would have done so

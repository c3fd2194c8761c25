"""How much memory a program holds that is no file's, for the children that measure themselves."""

import ctypes
import threading
from pathlib import Path


def held() -> int:
    """Bytes. A window may be counted as shared memory: that is not given back under pressure either."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def held_in_use() -> int:
    """The same without what the C library keeps of memory that was freed: large tensors may come from there, too."""
    ctypes.CDLL(None).malloc_trim(0)
    return held()


class Watch:
    """The most that is held while the block runs, over what was held before it."""

    def __enter__(self) -> "Watch":
        self.before, self.growth, self._done = held(), 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._done.wait(0.001):
            self.growth = max(self.growth, held() - self.before)

    def __exit__(self, *exception: object) -> None:
        self.growth = max(self.growth, held() - self.before)
        self._done.set()
        self._thread.join()

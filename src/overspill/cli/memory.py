"""The most memory that a piece of work took."""

import threading
from pathlib import Path

import psutil
import torch

from overspill.devices import peak_memory, reset_peak_memory

_STATUS = Path("/proc/self/status")
_OWN = ("RssAnon:", "RssShmem:")  # what no file backs


class PeakMemory:
    """Within the block, watches what this process takes beyond what it had, and what `device` holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overspill-memory", daemon=True)
        self._most = self._before = 0

    @property
    def host(self) -> int:
        """Bytes beyond what Python and its libraries took before."""
        return self._most - self._before

    @property
    def on_device(self) -> int | None:
        """Bytes of tensors on the accelerator. None where the CPU computes."""
        return None if self._device.type == "cpu" else peak_memory(self._device)

    def __enter__(self) -> "PeakMemory":
        reset_peak_memory(self._device)
        self._most = self._before = _own_memory()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._most = max(self._most, _own_memory())
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, _own_memory())


def _own_memory() -> int:
    if not _STATUS.exists():
        return int(psutil.Process().memory_info().rss)
    lines = _STATUS.read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_OWN))

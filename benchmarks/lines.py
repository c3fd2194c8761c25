"""The lines: what the link and the disk of this machine give, measured beside the work that depends on them."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from overspill.cli.lines import CHUNK, drop_from_cache, read_rate
from overspill.devices import pinned_bytes


@dataclass(frozen=True)
class Rate:
    """Bytes a second, from several measurements. The line is the best of them: that is what the hardware allows."""

    samples: tuple[float, ...]

    @property
    def best(self) -> float:
        return max(self.samples)

    def __add__(self, other: "Rate") -> "Rate":
        return Rate(self.samples + other.samples)

    def __str__(self) -> str:
        return f"{self.best / 1e9:.2f} GB/s (of {min(self.samples) / 1e9:.2f}–{self.best / 1e9:.2f})"


class Link:
    """Pinned host memory to the device, in one large copy of random bytes."""

    def __init__(self, device: torch.device, nbytes: int = 1 << 30) -> None:
        self._device = device
        self._source = pinned_bytes(nbytes, device)
        self._source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device))

    def rate(self, times: int = 7) -> Rate:
        """Measure it now."""
        target = torch.empty_like(self._source, device=self._device)
        samples = []
        for _ in range(times + 2):  # two to warm up
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(self._source, non_blocking=True)
            target.copy_(self._source, non_blocking=True)
            torch.cuda.synchronize()
            samples.append(2 * target.nbytes / (time.perf_counter() - start))
        return Rate(tuple(samples[2:]))


def direct_rate(files: Sequence[Path]) -> Rate:
    """Read all of `files` from the disk itself, past the page cache, with as many threads as overspill has."""
    return Rate((read_rate(files, os.O_DIRECT),))


def cached_rate(files: Sequence[Path]) -> Rate:
    """Read all of `files` through the page cache; whatever it held before, it holds them all afterwards."""
    return Rate((read_rate(files),))


# The page cache.


def drop_caches(files: Sequence[Path]) -> None:
    """Have the next read of `files` come from the disk. What is memory-mapped somewhere stays."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:  # not root: the kernel still takes a hint for files of our own
        for file in files:
            drop_from_cache(file)


def storage_bytes() -> int | None:
    """Bytes that this process has had from the disk itself so far; None where the kernel does not count them."""
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(counters["read_bytes"]) or None


def settle_reads(pause: float = 0.05) -> None:
    """Wait until no thread of this process reads files any more."""
    before: str | None = None
    while True:
        try:
            now = Path("/proc/self/io").read_text().splitlines()[0]
        except OSError:
            time.sleep(1)
            return
        # The reading of the counters counts too, a few hundred bytes.
        if before is not None and int(now.split()[1]) - int(before.split()[1]) < CHUNK // 16:
            return
        before = now
        time.sleep(pause)


def on_disk(candidates: Sequence[Path], nbytes: int) -> Path:
    """The first of `candidates` that is on a real disk and has room for `nbytes`."""
    for path in candidates:
        free = os.statvfs(path)
        if filesystem(path) not in ("tmpfs", "ramfs") and free.f_bavail * free.f_frsize > nbytes:
            return path
    raise SystemExit(
        f"none of {', '.join(map(str, candidates))} is a disk with {nbytes / 1e9:.0f} GB free: use --folder"
    )


def filesystem(path: Path) -> str:
    """The kind of file system that `path` is on."""
    found, kind = -1, "unknown"
    resolved = path.resolve()
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind_here, *_ = line.split()
        if resolved.is_relative_to(point) and len(point) >= found:
            found, kind = len(point), kind_here
    return kind

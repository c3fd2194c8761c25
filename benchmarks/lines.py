"""The lines: what the link and the disk of this machine give, measured beside the work that depends on them."""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from overspill.devices import PAGE, pinned_bytes, reader_threads

CHUNK: Final = 16 << 20


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
    return Rate((_read_all(files, os.O_DIRECT),))


def cached_rate(files: Sequence[Path]) -> Rate:
    """Read all of `files` through the page cache; whatever it held before, it holds them all afterwards."""
    return Rate((_read_all(files, 0),))


def _read_all(files: Sequence[Path], flags: int) -> float:
    """Bytes a second, with a buffer a thread."""
    descriptors = [os.open(file, os.O_RDONLY | flags) for file in files]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    jobs = _jobs(descriptors, sizes)
    lock = threading.Lock()

    def work(buffer: memoryview) -> None:
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            _read(*job, buffer)

    buffers = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(reader_threads())]
    for buffer in buffers:
        buffer[::PAGE] = b"\1" * (CHUNK // PAGE)  # page faults are no part of the disk's rate
    with ThreadPoolExecutor(len(buffers)) as pool:
        start = time.perf_counter()
        list(pool.map(work, buffers))
        seconds = time.perf_counter() - start
    for descriptor in descriptors:
        os.close(descriptor)
    return sum(sizes) / seconds


def _jobs(descriptors: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for descriptor, size in zip(descriptors, sizes, strict=True):
        yield from zip(itertools.repeat(descriptor), range(0, size, CHUNK), itertools.repeat(size), strict=False)


def _read(descriptor: int, offset: int, size: int, buffer: memoryview) -> None:
    wanted, done = min(CHUNK, size - offset), 0
    while done < wanted:  # a direct read asks for whole pages, and may stop early at the end of an extent
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        assert count > 0, "the file became shorter"
        done += count


# The page cache.


def drop_caches(files: Sequence[Path]) -> None:
    """Have the next read of `files` come from the disk. What is memory-mapped somewhere stays."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:  # not root: the kernel still takes a hint for files of our own
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


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

"""Devices, streams, events, pinning and free memory: the only file that names a vendor."""

import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from overspill.config import MIB, align
from overspill.errors import BudgetError

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
OUR_THREADS = "overspill-"
"""What the names of threads that we start begin with."""


def accelerators() -> list[torch.device]:
    """Every accelerator of this process, in order."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def compute_device(device: torch.device | str | int | None = None) -> torch.device:
    """The device to compute on: `device`, else the first accelerator, else the CPU."""
    present = accelerators()
    if device is None:
        return present[0] if present else CPU
    wanted = _parse_device(device, present)
    if wanted.type == "cpu":
        return CPU
    if wanted.index is None:
        wanted = torch.device(wanted.type, 0)
    if wanted not in present:
        known = ", ".join(map(str, [*present, CPU]))
        raise BudgetError(f"there is no device {device} here. This process can compute on: {known}")
    return wanted


def _parse_device(device: torch.device | str | int, present: list[torch.device]) -> torch.device:
    if isinstance(device, int):
        return torch.device(present[0].type if present else "cuda", device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise BudgetError(f"{device!r} is not a device. Write an index such as 0, or 'cuda:0' or 'cpu'") from error


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device` now: what is free, with what torch's allocator holds unused."""
    if device.type == "cpu":
        return _host_memory()[0]
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def reserve(nbytes: int, device: torch.device) -> None:
    """Have torch's allocator take `nbytes` at once, for the many tensors that are about to be made of them."""
    if device.type != "cpu":
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def total_memory(device: torch.device) -> int:
    """Bytes that `device` has in all."""
    if device.type == "cpu":
        return _host_memory()[1]
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def _host_memory() -> tuple[int, int]:
    """Bytes of host memory that can be taken now, and all that there are."""
    import psutil  # whoever gives budgets does without it

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


@functools.cache
def link_rate(device: torch.device) -> float | None:
    """Measured bytes a second from pinned host memory to `device`; None where the CPU computes."""
    if device.type == "cpu":
        return None
    source = pinned_bytes(64 * MIB, device)
    target = torch.empty_like(source, device=device)
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(device)
    return 8 * source.nbytes / (time.perf_counter() - start)


class HostPages(mmap.mmap):
    """Page-aligned anonymous memory, which can be registered with a device so that copies to it run at full speed.

    Registering after the pages were touched runs at 17 GB/s and at the exact size, where torch's pinned allocator gives
    1.5 GB/s and rounds up to a power of two (H200, torch 2.11).
    """

    _registered: int = 0

    def __new__(cls, nbytes: int) -> "HostPages":
        # Private: a forked child must not write to its parent's memory, which is what mmap would do by itself.
        pages = super().__new__(cls, -1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without transparent huge pages: small pages do too
                pass
        return pages

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def register(self, device: torch.device) -> None:
        """Pin the pages for copies to `device`. The pages should have been written to before: that is much faster."""
        if device.type != "cuda" or self._registered:
            return
        address = self.address
        _register(address, len(self), device)
        self._registered = address

    def __del__(self) -> None:
        # Runs before mmap gives the pages back: registered memory must not be unmapped.
        if self._registered:
            _unregister(self._registered)
            self._registered = 0


ALONE_ON_ITS_PAGES = 33 * MIB
"""Host memory of this size has pages of its own: glibc takes at most 32 MiB from the heap that all share. A page that
is pinned for one tensor and begins another makes copies of the other fail: CUDA refuses memory that is half pinned."""


class PinnedRanges:
    """Host memory that others allocated, pinned page by page where it lies: no copy is made of it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]  # they must outlive their registration
        self._ranges = _whole_pages((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        self._registered: list[int] = []

    def register(self, device: torch.device) -> None:
        """Pin the pages for copies to `device`, once."""
        if device.type != "cuda" or self._registered:
            return
        for start, end in self._ranges:
            _register(start, end - start, device)
            self._registered.append(start)

    def __del__(self) -> None:
        while self._registered:
            _unregister(self._registered.pop())


def is_running(thread: threading.Thread) -> bool:
    """Whether a thread uses a core now, or is about to. Where the system does not tell, it may."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return thread.is_alive() and not Path("/proc/self/task").exists()
    return stat.rpartition(")")[2].split()[0] in "RD"


def files_in_memory() -> list[tuple[int, int]]:
    """The address ranges of this process that show files. To pin such a page is to copy it."""
    maps = Path("/proc/self/maps")
    ranges = []
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, _, _, _, inode, *_ = line.split()
        if int(inode):
            start, end = span.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def _whole_pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that `ranges` (address, bytes) touch, neighbours merged: a page can be registered only once."""
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        start, end = address // PAGE * PAGE, align(address + nbytes, PAGE)
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _register(address: int, nbytes: int, device: torch.device) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if status:
        raise BudgetError(
            f"could not pin {nbytes} bytes of host memory for {device} (CUDA error {status}). "
            "Lower the 'cpu' budget in max_memory, or raise the locked-memory limit (ulimit -l)"
        )


def _unregister(address: int) -> None:
    if not sys.is_finalizing():  # torch may be half gone by then, and the process's pages go all at once
        torch.cuda.cudart().cudaHostUnregister(address)


def host_bytes(pages: mmap.mmap) -> torch.Tensor:
    """All of `pages` as a byte tensor, which keeps them alive."""
    return torch.frombuffer(pages, dtype=torch.uint8)


def buffer_of(memory: torch.Tensor) -> memoryview:
    """The bytes of contiguous host `memory`, to read files into. The caller keeps the tensor alive meanwhile."""
    return memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr())).cast("B")


def touch(memory: torch.Tensor) -> None:
    """Write to every page of `memory`, with several threads: the kernel's page faults are the slow part of pinning."""
    with ThreadPoolExecutor(reader_threads()) as pool:
        list(pool.map(lambda part: part.zero_(), memory.chunk(reader_threads())))


def copy_bytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy dense host tensors, each to one laid out alike, with several threads: fresh pages are slow to be had."""
    parts = [
        (target.data_ptr() + start, source.data_ptr() + start, min(_COPIED_AT_ONCE, source.nbytes - start))
        for target, source in pairs
        for start in range(0, source.nbytes, _COPIED_AT_ONCE)
    ]
    with ThreadPoolExecutor(reader_threads()) as pool:
        list(pool.map(lambda part: ctypes.memmove(*part), parts))


_COPIED_AT_ONCE = 16 * MIB


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Fresh host memory, pinned for `device` where that is an accelerator."""
    pages = HostPages(nbytes)
    memory = host_bytes(pages)
    if device.type != "cpu":
        touch(memory)
        pages.register(device)
    return memory


def reader_threads() -> int:
    """How many threads read files at once: nearly all cores (14 were best on 16), and two at least to hide latency."""
    return max(2, min(14, (os.cpu_count() or 2) - 2))


class _DeviceRange:
    """A range of device memory in the form that torch takes without a copy, for as long as the tensor lives."""

    def __init__(self, arena: torch.Tensor, start: int, nbytes: int) -> None:
        self._arena = arena  # it must outlive its ranges
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (arena.data_ptr() + start, False),
            "version": 3,
        }


Arena = HostPages | torch.Tensor
"""Memory that ranges are leased of: pages of the host, or one tensor on an accelerator."""


def new_arena(nbytes: int, device: torch.device) -> Arena:
    """Memory to lease ranges of. Fresh pages of the host cost nothing until they are used."""
    if device.type == "cpu":
        return HostPages(nbytes)
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    raise BudgetError(f"cannot stream to a {device.type!r} device: use a CUDA or ROCm device, or the CPU")


def lease_range(arena: Arena, start: int, nbytes: int) -> tuple[torch.Tensor, object]:
    """Bytes of `arena` as a tensor with a storage of its own, and the object that dies with that storage.

    Views of one big tensor share its storage, so nobody could tell whether a view is still in use somewhere. A storage
    of its own ends when the last view of it does, wherever that view was kept; until then it holds the arena too.
    """
    with torch.inference_mode(False):  # whoever needs it first, it may be used outside inference mode later
        if isinstance(arena, torch.Tensor):
            device_range = _DeviceRange(arena, start, nbytes)
            return torch.as_tensor(device_range, device=arena.device), device_range
        host_range = memoryview(arena)[start : start + nbytes]
        return torch.frombuffer(host_range, dtype=torch.uint8), host_range


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream for copies; None where the CPU computes, whose copies are synchronous."""
    return None if device.type == "cpu" else torch.Stream(device=device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Within, this thread's work is queued on `stream`. The CPU has none, and does at once what it is asked."""
    return _AS_IT_IS if stream is None else stream


def outside_inference_mode() -> AbstractContextManager[object]:
    """Within, inference mode is off. Costs nothing where it is."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def without_autograd() -> AbstractContextManager[object]:
    """Within, inference mode and gradients are off. Costs nothing where they are, as in most backwards."""
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return _AS_IT_IS
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


_AS_IT_IS = nullcontext()


def record_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event | None:
    """A mark behind all work queued so far on `stream`, or on the device's current stream."""
    if device.type == "cpu":
        return None
    event = torch.Event(device=device)
    event.record(_current_stream(device.index) if stream is None else stream)
    return event


_current_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""`torch.accelerator.current_stream`, which takes nine times as long to understand its argument."""


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that this thread computes on; None where the CPU computes."""
    return None if device.type == "cpu" else _current_stream(device.index)


@functools.cache
def stream_numbers(device: torch.device) -> Callable[[], int]:
    """What tells which stream of `device` a thread computes on: another number for each. It costs next to nothing."""
    if device.type == "cpu":
        return lambda: 0
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def keep_for(stream: torch.Stream, arena: Arena) -> None:
    """Once `arena` is freed, nobody gets its memory before `stream` is done with what it was asked to do until then."""
    if isinstance(arena, torch.Tensor):
        # Whoever frees it may be the garbage collector, in the middle of a compilation, whose operations are others.
        with torch._C.DisableTorchFunction(), torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS):
            arena.record_stream(stream)


_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
"""Of modes and kinds of tensors that a thread's operations are led through beside the tensors' own."""


def current_stream_waits(device: torch.device, event: torch.Event | None) -> None:
    """Let the device's current stream wait for `event`, without waiting here."""
    if event is not None:
        _current_stream(device.index).wait_event(event)


def stream_waits(stream: torch.Stream | None, events: Iterable[torch.Event]) -> None:
    """Let `stream` wait for `events`: until the bytes that it will overwrite are no longer in use, say."""
    if stream is None:
        return
    for event in events:
        stream.wait_event(event)


def synchronize(device: torch.device) -> None:
    """Wait here until `device` has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait_for_pinned(values: Iterable[object]) -> None:
    """Wait here for what is on its way to those `values` that are in pinned host memory: the CPU is about to read them.

    Torch's optimizers bring what a gradient scaler has found to where weights are without waiting for it.
    """
    pinned = (value.is_pinned() for value in values if isinstance(value, torch.Tensor) and value.device == CPU)
    if any(pinned):
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)


def reset_peak_memory(device: torch.device) -> None:
    """Begin anew to look for the most that torch's allocator has given out."""
    if device.type != "cpu":
        torch.empty(0, device=device)  # in a process that has not used it yet the allocator does not know the device
        torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that torch's allocator has given out since; 0 for the CPU, which has none that counts."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated(device))


class Moment:
    """A moment in the work of a device: now on the CPU, else when a stream, usually the current one, gets here."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self.device = None if device.type == "cpu" else device
        self._seconds = time.perf_counter()
        self._event: torch.Event | None = None
        if self.device is not None:
            self._event = torch.Event(device=device, enable_timing=True)
            self._event.record(_current_stream(device.index) if stream is None else stream)

    def seconds_since(self, earlier: "Moment") -> float:
        """Of the device's time, once it has come past both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000


@functools.cache
def _generator(device: torch.device) -> torch.Generator | None:
    """What draws an accelerator's random numbers."""
    if device.type == "cpu":
        return None
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator


def _drawn(generator: torch.Generator | None) -> tuple[int, int] | None:
    """Where an accelerator is in its random numbers: which row of them, and how many it has drawn."""
    return None if generator is None else (generator.initial_seed(), generator.get_offset())


class RandomState:
    """The random numbers that the CPU and one device will draw next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._generator = _generator(device)
        self._drawn = _drawn(self._generator)

    def _draw_from_here(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._generator is not None and self._drawn is not None:
            row, drawn = self._drawn
            self._generator.manual_seed(row)
            self._generator.set_offset(drawn)

    def has_passed(self) -> bool:
        """Whether any have been drawn since."""
        return self._drawn != _drawn(self._generator) or not torch.equal(self._cpu, torch.get_rng_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, the same numbers are drawn once more; behind it, those that would have come without it."""
        now = RandomState(self._device)
        self._draw_from_here()
        try:
            yield
        finally:
            now._draw_from_here()


NO_BACKWARD = -1

backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward of autograd the calling thread works for, or NO_BACKWARD. It costs next to nothing."""


def running_backward() -> int | None:
    """Which backward of autograd the calling thread works for, if it does."""
    number = backward_number()
    return None if number == NO_BACKWARD else number


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that this thread works for has ended, unless that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and arrays share `storage`, with `storage` itself counted in."""
    return users_counter(storage)()


def users_counter(storage: torch.UntypedStorage) -> Callable[[], int]:
    """What tells that each time it is called, while `storage` lives. It costs next to nothing."""
    return functools.partial(storage_use_count, storage._cdata)


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""The same for a storage that is named by its `_cdata`."""

"""The page cache: whether a range of a file lies in it, when it goes there, and how to compute with it in place."""

import ctypes
import errno
import functools
import mmap
import os

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE

_MAP_FIXED = 0x10
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # advice that is done at once, and tells of a failure; Linux 5.14 and later
_MREMAP_TO = 1 | 2  # MREMAP_MAYMOVE, MREMAP_FIXED

_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def lies_in_page_cache(descriptor: int, offset: int, nbytes: int) -> bool | None:
    """Whether all of the range is cached; None where the kernel does not tell.

    Trying with RWF_NOWAIT is no way to ask: a miss starts to read ahead, and a cold checkpoint was read one and a half
    times (24.1 GB for 16.1, Linux 6.18).
    """
    counts = _Counts()
    wanted = _Range(offset, nbytes)
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(counts), 0) != 0:
        return None if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP) else False
    pages = (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return int(counts.cached) >= pages


def start_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with a range that was written, and do not wait for it.

    Left to itself, the kernel begins when a tenth of the memory waits to be written, and the end of a save is spent
    waiting for the rest. A hint: where it cannot be given, the file is no less written.
    """
    begin = getattr(_libc, "sync_file_range", None)
    if begin is not None:
        begin(ctypes.c_int(descriptor), ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_START_WRITING))


@functools.cache
def can_show() -> bool:
    """Whether this system can do what follows."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return bool(_libc.madvise(address, mmap.PAGESIZE, _POPULATE_READ) == 0)


def show(address: int, descriptor: int, offset: int, nbytes: int) -> None:
    """Let whole pages of our memory show those of a file. What is written to them stays with us."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc.mmap(address, nbytes, protection, flags, descriptor, offset) != address:
        raise _last_error()


def are_in_memory(address: int, nbytes: int) -> bool:
    """Whether no page that is shown at `address` needs the disk. Much faster than to bring in those that are there.

    Whoever may not write to the file is told that they all are; but then there is no lease on it either.
    """
    found = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    return _libc.mincore(address, nbytes, found) == 0 and b"\0" not in found.raw[: len(found)]


def bring_in(address: int, nbytes: int) -> None:
    """Have pages that are shown at `address` in memory. An OSError where they cannot be read: no signal, as later."""
    if _libc.madvise(address, nbytes, _POPULATE_READ) != 0:
        raise _last_error()


def make_own(address: int, nbytes: int) -> None:
    """Put a copy in the place of pages that are shown at `address`: from here on they depend on no file.

    To write to them does not do: they would be copies, but where a file is shortened the kernel takes those away too.
    """
    bring_in(address, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if copy == _FAILED:
        raise _last_error()
    try:
        if _libc.madvise(copy, nbytes, _POPULATE_WRITE) != 0:
            raise _last_error()
        ctypes.memmove(copy, address, nbytes)
        # One step to all threads: whoever reads there meanwhile finds the same bytes.
        if _libc.mremap(copy, nbytes, nbytes, _MREMAP_TO, address) != address:
            raise _last_error()
    except BaseException:
        _libc.munmap(copy, nbytes)
        raise


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))

"""Sizes that people write ("10GiB") and the constants that policies share."""

import re

from overspill.errors import BudgetError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALL_TENSOR = 1 * MIB
"""A tensor, or a leaf module, smaller than this stays on the compute device: moving it costs more than it frees."""

HOST_ALIGNMENT = 64
"""Where a tensor starts in host memory. CPU kernels may round differently on memory that is less aligned."""

DEVICE_ALIGNMENT = 256
"""Where a tensor starts in device memory: what CUDA's own allocator guarantees."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?I?B)?\s*", re.IGNORECASE)


def parse_size(size: int | str, *, what: str = "size") -> int:
    """Bytes in `size`: an int, or a string such as "10GiB", "1.5 GB" or "500MB". `what` names it in errors."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise BudgetError(f"{what} must be a number of bytes or a string such as '10GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise BudgetError(f"{what} is negative: {size}. Give a number of bytes of 0 or more, or '10GiB'")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise BudgetError(f"{what} {size!r} is not a size. Write bytes, or a number with B, KB, MB, GB, KiB, MiB, GiB")
    unit = (match["unit"] or "B").upper()
    return int(float(match["number"]) * _UNITS[unit])


def format_size(nbytes: int | float) -> str:
    """`nbytes` as people read it, in powers of 1024: "9.77 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def align(nbytes: int, alignment: int) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment

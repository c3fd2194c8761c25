"""Reads the header of a safetensors file and believes nothing in it: the way in is where a lie is cheapest to catch."""

import json
import reprlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeGuard

import torch

from overspill.errors import CheckpointCorruptError
from overspill.tensors import TensorSpec

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's name of each dtype. Its packed ones (F4, F6) are left out: a shape in them counts halves of bytes."""

MAX_HEADER = 100_000_000
"""The format's own limit, which also bounds what a hostile file can make us parse."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_LENGTH_FIELD = 8
_MAX_INT64 = 2**63 - 1
_CURE = "Download or save the file again"


def read_header(file: BinaryIO, path: Path, size: int) -> dict[str, tuple[TensorSpec, int]]:
    """Each tensor's spec and absolute byte offset in `file`, which has `size` bytes. Reads no values."""
    length = _header_length(file, path, size)
    raw = file.read(length)
    if len(raw) != length:
        raise _corrupt(path, f"ended after {len(raw)} of the header's {length} bytes")
    header = parse_json_object(raw, path)
    _check_metadata(header.pop("__metadata__", None), path)

    data_start = _LENGTH_FIELD + length
    ranges: list[tuple[int, int, str]] = []
    tensors: dict[str, tuple[TensorSpec, int]] = {}
    for name, entry in header.items():
        spec, begin = _read_entry(name, entry, path)
        ranges.append((begin, begin + spec.nbytes, name))
        tensors[name] = (spec, data_start + begin)
    _check_coverage(ranges, size - data_start, path)
    return tensors


def parse_json_object(raw: bytes, path: Path) -> dict[str, object]:
    """`raw` as one strict JSON object: UTF-8, no key twice, no NaN. Anything else is refused as `path`'s fault."""
    parse_int = _parse_integer if b"-0" in raw else None  # json's own is faster
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=parse_int
        )
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON and integers of absurd length are ValueErrors
        raise _corrupt(path, f"holds a header that is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _corrupt(path, f"holds a header that is a JSON {type(value).__name__}, not an object")
    return value


def _header_length(file: BinaryIO, path: Path, size: int) -> int:
    if size < _LENGTH_FIELD:
        raise _corrupt(path, f"has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(file.read(_LENGTH_FIELD), "little")
    if length > MAX_HEADER:
        raise _corrupt(path, f"claims a header of {length} bytes; safetensors allows {MAX_HEADER}")
    if length > size - _LENGTH_FIELD:
        raise _corrupt(path, f"is truncated: it claims a header of {length} bytes, and has {size} bytes in all")
    return length


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Parsers disagree on which of two equal keys wins, so a file with both means different things to different readers.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r} occurs more than once")
    return unique


def _parse_integer(text: str) -> int | float:
    # -0 is the float that it is to other readers of JSON; to Python's it is 0, and so a size or an offset.
    return -0.0 if text == "-0" else int(text)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, "holds a __metadata__ that does not map strings to strings")
    if not all(_is_unicode(text) for text in (*metadata.keys(), *metadata.values())):
        raise _corrupt(path, "holds a __metadata__ that is not valid Unicode")


def _read_entry(name: str, entry: object, path: Path) -> tuple[TensorSpec, int]:
    """One tensor's spec and its offset behind the header."""
    if not _is_unicode(name):
        raise _corrupt(path, f"holds the tensor name {name!r}, which is not valid Unicode")
    if not isinstance(entry, dict):
        raise _corrupt(path, f"describes tensor {name!r} by {reprlib.repr(entry)}, not by a JSON object")
    if unknown := entry.keys() - _FIELDS:
        # Whoever wrote it meant something by it, so to read on without it could be to read other values.
        raise _corrupt(path, f"describes tensor {name!r} by {reprlib.repr(min(unknown))}, which no reader knows of")
    spec = TensorSpec(_read_shape(name, entry, path), _read_dtype(name, entry, path))
    offsets = entry.get("data_offsets")
    if not _is_naturals(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"gives tensor {name!r} the data_offsets {reprlib.repr(offsets)}, not two byte positions")
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise _corrupt(path, f"gives tensor {name!r}, {spec}, bytes {begin} to {end}; it takes {spec.nbytes} bytes")
    return spec, begin


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape it, no UTF-8 can hold it
        return False
    return True


def _read_dtype(name: str, entry: dict[str, object], path: Path) -> torch.dtype:
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointCorruptError(
            f"{path} gives tensor {name!r} the dtype {reprlib.repr(dtype)}, which is none of {known}. "
            "Save the checkpoint again in one of these"
        )
    return DTYPES[dtype]


def _read_shape(name: str, entry: dict[str, object], path: Path) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not _is_naturals(shape):
        raise _corrupt(path, f"gives tensor {name!r} the shape {reprlib.repr(shape)}, not a list of sizes of 0 or more")
    # Zeros are left out of the product: torch's strides overflow even where an empty dimension makes the tensor empty.
    # It stops early, because the product of a million large sizes would take for ever.
    elements = 1
    for extent in shape:
        elements *= max(extent, 1)
        if elements > _MAX_INT64:
            raise _corrupt(path, f"gives tensor {name!r} the shape {reprlib.repr(shape)}, more than memory can address")
    return tuple(shape)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    # `type`, not `isinstance`: JSON's true is an int to Python.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_INT64 for item in value)


def _check_coverage(ranges: list[tuple[int, int, str]], data_size: int, path: Path) -> None:
    """The tensors must tile the file's data exactly: an overlap would alias two of them, a hole could hide anything."""
    position, previous = 0, "the header"
    for begin, end, name in sorted(ranges):
        if begin < position:
            raise _corrupt(path, f"lets tensor {name!r} overlap {previous} ({begin} is before {position})")
        if begin > position:
            raise _corrupt(path, f"has {begin - position} unused bytes before tensor {name!r}")
        if end > data_size:
            raise _corrupt(path, f"is truncated: tensor {name!r} ends {end - data_size} bytes after the file")
        position, previous = end, f"tensor {name!r}"
    if position != data_size:
        raise _corrupt(path, f"has {data_size - position} bytes after its last tensor")


def _corrupt(path: Path, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{path} {problem}. {_CURE}")

"""Finds the tensors of a file that `torch.save` wrote, in place: no value is read and no code of the file runs."""

import pickle
import re
import reprlib
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

from overspill.checkpoint.pickle_check import PickleRefusedError, check_pickle
from overspill.checkpoint.safetensors_header import MAX_HEADER
from overspill.errors import CheckpointCorruptError, CheckpointError, CheckpointUnsafeError
from overspill.tensors import TensorSpec

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # the lengths of name and extra field, which stand between it and the data
_ENCRYPTED = 0x1
_LITTLE_ENDIAN = b"little"
_PICKLE = "data.pkl"

_AGAIN = "Download or save the file again"
_CONVERT = "Convert it to safetensors: safetensors.torch.save_file(torch.load(path, weights_only=True), ...)"
_CONVERT_PLAIN = "Save it again with each tensor as a plain tensor.contiguous()"
_CONVERT_UNSAFE = "If you trust whoever made it, load it where it can do no harm, and save it as safetensors there"


def read_pickled(file: BinaryIO, path: Path, size: int) -> dict[str, tuple[TensorSpec, int]]:
    """Each tensor's spec and absolute byte offset in `file`, which has `size` bytes.

    The file holds a dict of tensors, or such a dict under "state_dict" beside entries that are left alone (a trainer's
    epoch, its optimizer). An entry of the dict of tensors that is no tensor is refused: leaving it out would lose it.
    """
    records = _read_records(file, path)
    tensors: dict[str, tuple[TensorSpec, int]] = {}
    # `dict.items`, since a pickle may have given the dict attributes of any name.
    for name, tensor in dict.items(_tensor_dict(_load_on_meta(file, path), path)):
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path} holds the entry {reprlib.repr(name)} of type {type(tensor).__name__}, not a tensor by name. "
                "Save a dict of tensors alone, such as model.state_dict()"
            )
        _check_type(name, tensor, path)
        bare = torch.Tensor.detach(tensor)  # without the attributes that a pickle may have given it, of any name
        _check_plain(name, bare, path)
        tensors[name] = _locate(name, bare, records, path, size)
    return tensors


def _read_records(file: BinaryIO, path: Path) -> dict[int, zipfile.ZipInfo]:
    """The archive's data records by the byte at which their data start, as its own directory has it."""
    if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
        raise CheckpointError(
            f"{path} is not a zip archive, so torch.save of torch 1.6 or later did not write it. {_CONVERT}"
        )
    try:
        archive = zipfile.ZipFile(file)
        _check_archive(archive, path)
        return {_data_start(file, info): info for info in archive.infolist() if "/data/" in info.filename}
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises whatever its parsing trips over: struct.error, OSError, ValueError …
        raise CheckpointCorruptError(f"{path} is truncated or damaged: {error}. {_AGAIN}") from error


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    if any(name.endswith("/constants.pkl") for name in archive.namelist()):
        raise CheckpointUnsafeError(
            f"{path} is a TorchScript program, and loading it would run its code. {_CONVERT_UNSAFE}"
        )
    for info in archive.infolist():
        # Of every record, not of the tensors' alone: a small pickle must not unpack to fill the memory either.
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise CheckpointError(
                f"{path} holds the record {info.filename!r} compressed or encrypted. Save it again with torch.save"
            )
        # By its size first: many such records could each be the whole file.
        if info.filename.endswith("/byteorder") and not (
            info.file_size == len(_LITTLE_ENDIAN) and archive.read(info) == _LITTLE_ENDIAN
        ):
            raise CheckpointError(f"{path} was written on a big-endian machine. {_CONVERT}")


def _data_start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    raw = file.read(_LOCAL_HEADER.size)
    magic, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
    if magic != _ZIP_MAGIC:
        raise ValueError(f"record {info.filename!r} has no header at byte {info.header_offset}")
    return info.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def _load_on_meta(file: BinaryIO, path: Path) -> object:
    try:
        check_pickle(_read_pickle(file))
        file.seek(0)
        return torch.load(file, map_location="meta", weights_only=True)
    except PickleRefusedError as error:
        raise CheckpointUnsafeError(f"{path} is unsafe to load: {error}. {_CONVERT_UNSAFE}") from error
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error))
        wants = f"it calls {culprit[1]}" if culprit else "its pickle holds more than tensors and plain containers"
        raise CheckpointUnsafeError(f"{path} may run code when it is loaded: {wants}. {_CONVERT_UNSAFE}") from error
    except NotImplementedError as error:  # what the meta device does not have, quantized tensors above all
        raise CheckpointError(
            f"{path} holds a kind of tensor that cannot be read in place. {_CONVERT_PLAIN}"
        ) from error
    except Exception as error:  # a damaged pickle can trip its reader anywhere
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointCorruptError(f"{path} cannot be unpickled: {reason}. {_AGAIN}") from error


def _read_pickle(file: BinaryIO) -> bytes:
    """The very bytes that torch.load will unpickle: not every reader of archives finds the same record by a name."""
    with zipfile.ZipFile(file) as records:
        sizes = [record.file_size for record in records.infolist() if record.filename.lower().endswith(_PICKLE)]
    if max(sizes, default=0) > MAX_HEADER:  # whichever of them is the one
        raise ValueError(f"its pickle has {max(sizes)} bytes")
    file.seek(0)
    content: bytes = torch._C.PyTorchFileReader(file).get_record(_PICKLE)
    return content


def _tensor_dict(loaded: object, path: Path) -> dict[object, object]:
    if isinstance(loaded, dict) and isinstance(dict.get(loaded, "state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, not a dict of tensors. Save model.state_dict() instead"
        )
    return loaded


def _check_type(name: str, tensor: torch.Tensor, path: Path) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _not_plain(name, f"a {type(tensor).__name__}", path)


def _check_plain(name: str, tensor: torch.Tensor, path: Path) -> None:
    """Refuses a tensor whose values are not simply its bytes in the file, one after another."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"of layout {tensor.layout} and dtype {tensor.dtype}"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "a lazily conjugated or negated view"
    elif not tensor.is_contiguous():
        problem = f"not contiguous (shape {list(tensor.shape)}, strides {list(tensor.stride())})"
    else:
        return
    raise _not_plain(name, problem, path)


def _not_plain(name: str, problem: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds tensor {name!r}, which is {problem}, so it cannot be read in place. {_CONVERT_PLAIN}"
    )


def _locate(
    name: str, tensor: torch.Tensor, records: dict[int, zipfile.ZipInfo], path: Path, size: int
) -> tuple[TensorSpec, int]:
    """The tensor's place, checked against the archive's directory.

    torch works the offset out from how its own writer lays records out. An archive that something else has written
    may be laid out otherwise, and a hostile one may lie, so the offset counts only where the directory agrees.
    """
    start = tensor.untyped_storage()._checkpoint_offset
    if start is None:
        raise CheckpointError(
            f"{path} holds no values for tensor {name!r}: it was saved from the meta device. {_AGAIN}"
        )
    record = records.get(start)
    if record is None:
        raise CheckpointCorruptError(f"{path} has no record where tensor {name!r} should start, byte {start}. {_AGAIN}")
    spec, begin = TensorSpec.of(tensor), int(tensor.storage_offset()) * tensor.dtype.itemsize
    if begin + spec.nbytes > record.file_size or start + record.file_size > size:
        raise CheckpointCorruptError(
            f"{path} says that tensor {name!r}, {spec}, starts at byte {begin} of a record of {record.file_size} "
            f"bytes, itself at byte {start} of a file of {size} bytes: it does not fit. {_AGAIN}"
        )
    return spec, start + begin

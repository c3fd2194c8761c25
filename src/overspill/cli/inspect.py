"""`overspill inspect`: what a checkpoint holds, and all that is wrong with it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from overspill.checkpoint import StoredTensor, open_checkpoint
from overspill.checkpoint.inspection import Inspection, inspect_checkpoint
from overspill.cli.errors import ExitCode, require
from overspill.cli.options import Debug, Json
from overspill.cli.output import Output, printable, table
from overspill.config import format_size
from overspill.errors import CheckpointError
from overspill.integrations.configs import check_against_config
from overspill.table import pattern


def inspect(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A checkpoint: a folder, an index.json, or a file of weights.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, not one line for alike ones.")] = False,
    model: Annotated[
        bool, typer.Option("--model", help="Compare it with the model that its config.json describes, too.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a checkpoint's tensors, dtypes and files, and all problems found. Reads headers, not weights.

    Duplicate and missing tensors, truncated or overlapping files, an index that disagrees with its shards, names that
    leave the folder, Git LFS pointers. Exits with 3 if anything keeps it from being loaded.
    """
    output: Output = context.obj
    found = inspect_checkpoint(path)
    if model:
        require("transformers", "the comparison with a model")
        _compare_with_model(found)
    output.result(_document(found), *_shown(found, every=tensors))
    if not found.ok:
        raise typer.Exit(ExitCode.PROBLEMS)


def _compare_with_model(found: Inspection) -> None:
    folder = found.path if found.path.is_dir() else found.path.parent
    if not found.ok:
        found.note("warning", folder, "it was not compared with its model: the errors must be mended first")
        return
    try:
        check_against_config(open_checkpoint(found.path), folder)
    except CheckpointError as error:
        found.note("error", folder, str(error))


def _shown(found: Inspection, *, every: bool) -> Iterator[str | Text]:
    total = sum(tensor.nbytes for tensor in found.tensors.values())
    elements = sum(tensor.spec.numel for tensor in found.tensors.values())
    yield (
        f"{found.path}: {len(found.tensors):,} tensors, {elements:,} elements, {format_size(total)} in "
        f"{len(found.shards)} file{'s' if len(found.shards) != 1 else ''}\n"
    )
    if found.tensors:
        rows = _every_tensor(found.tensors.values()) if every else _alike(found.tensors.values())
        yield table(["tensor", "shape", "dtype", "size"], rows, right=["size"])
        yield ""
    if found.shards:
        files = [
            (printable(shard.path.name), f"{len(shard.tensors):,}", format_size(shard.size), _dtypes(shard.tensors))
            for shard in found.shards
        ]
        yield table(["file", "tensors", "size", "dtypes"], files, right=["tensors", "size"])
        yield ""
    if not found.problems:
        yield "No problems found."
    for problem in found.problems:
        yield f"{problem.severity}: {printable(problem.message)}"


def _every_tensor(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, str, str, str]]:
    for tensor in tensors:
        yield printable(tensor.name), str(list(tensor.spec.shape)), _dtype(tensor), format_size(tensor.nbytes)


def _alike(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, str, str, str]]:
    """One line for tensors that differ in the number of their block only."""
    count: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    nbytes: Counter[tuple[str, tuple[int, ...], str]] = Counter()
    for tensor in tensors:
        key = (pattern(tensor.name), tensor.spec.shape, _dtype(tensor))
        count[key] += 1
        nbytes[key] += tensor.nbytes
    for (name, shape, dtype), times in count.items():
        label = printable(name) + (f" ({times})" if times > 1 else "")
        yield label, str(list(shape)), dtype, format_size(nbytes[name, shape, dtype])


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.spec.dtype).removeprefix("torch.")


def _dtypes(tensors: Iterable[StoredTensor]) -> str:
    return ", ".join(sorted({_dtype(tensor) for tensor in tensors}))


def _document(found: Inspection) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for tensor in found.tensors.values():
        dtypes[_dtype(tensor)] += tensor.nbytes
    return {
        "path": str(found.path),
        "ok": found.ok,
        "index": None if found.index is None else str(found.index),
        "total_bytes": sum(dtypes.values()),
        "bytes_by_dtype": dict(dtypes),
        "files": [
            {"file": str(shard.path), "bytes": shard.size, "tensors": len(shard.tensors)} for shard in found.shards
        ],
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.spec.shape),
                "dtype": _dtype(tensor),
                "bytes": tensor.nbytes,
                "file": tensor.file.path.name,
                "offset": tensor.offset,
            }
            for tensor in found.tensors.values()
        ],
        "problems": [
            {"severity": problem.severity, "file": str(problem.file), "message": problem.message}
            for problem in found.problems
        ],
    }

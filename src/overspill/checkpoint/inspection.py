"""All that is wrong with a checkpoint, not only the first thing: what people want to know before they load it."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from overspill.checkpoint.index import (
    StoredTensor,
    choose_files,
    leaves_folder,
    open_checkpoint,
    read_weight_map,
)
from overspill.checkpoint.safetensors_header import parse_json_object
from overspill.errors import CheckpointError

_SHOWN = 4  # names that a problem lists before it says how many more there are

Severity = Literal["error", "warning"]
"""An error keeps the checkpoint, or what it should hold, from being loaded. A warning does not."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, and with which file."""

    severity: Severity
    file: Path
    message: str


@dataclass(frozen=True)
class Shard:
    """One file that holds tensors, of which the checkpoint may use some only."""

    path: Path
    size: int
    tensors: tuple[StoredTensor, ...]


@dataclass
class Inspection:
    """What could be read of a checkpoint, and all that is wrong with it."""

    path: Path
    index: Path | None = None
    """Its index.json, if it has one."""
    shards: list[Shard] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """What a load would see."""

    @property
    def ok(self) -> bool:
        return not any(problem.severity == "error" for problem in self.problems)

    def note(self, severity: Severity, file: Path, message: str) -> None:
        """Remember a problem."""
        self.problems.append(Problem(severity, file, message))


def inspect_checkpoint(path: str | os.PathLike[str]) -> Inspection:
    """Look at every file of the checkpoint at `path`. Reads headers only.

    Raises CheckpointError where there is nothing to look at; everything else is a problem among others.
    """
    files = choose_files(Path(path).absolute())
    found = Inspection(Path(path).absolute())
    if files[0].suffix == ".json":
        found.index = files[0]
        _look_at_index(found, files[0])
    else:
        for file in files:
            _look_at_file(found, file)
        _gather(found)
    return found


def _look_at_file(found: Inspection, path: Path) -> Shard | None:
    try:
        tensors = tuple(open_checkpoint(path).values())
    except CheckpointError as error:
        found.note("error", path, str(error))
        return None
    shard = Shard(path, path.stat().st_size, tensors)
    found.shards.append(shard)
    if not tensors:
        found.note("warning", path, f"{path} holds no tensors. Remove it, or save the checkpoint again")
    return shard


def _gather(found: Inspection) -> None:
    """The tensors of files that no index lists: none may be there twice."""
    for shard in found.shards:
        repeated: dict[Path, list[str]] = defaultdict(list)
        for tensor in shard.tensors:
            first = found.tensors.setdefault(tensor.name, tensor)
            if first is not tensor:
                repeated[first.file.path].append(tensor.name)
        for other, names in repeated.items():
            found.note(
                "error",
                shard.path,
                f"{other} and {shard.path} both hold {_listed(names)}, and no index.json says which counts. "
                "Remove one of the files, or add an index",
            )


def _look_at_index(found: Inspection, index: Path) -> None:
    try:
        weight_map = read_weight_map(index)
    except CheckpointError as error:
        found.note("error", index, str(error))
        return
    if not weight_map:
        found.note("warning", index, f"{index} lists no tensors. Save the checkpoint again")
    listed: dict[str, list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        listed[shard].append(name)
    content = {shard: _look_at_listed(found, index, shard, names) for shard, names in listed.items()}
    _compare(found, index, weight_map, {shard: tensors for shard, tensors in content.items() if tensors is not None})
    _check_total(found, index)
    _look_for_strays(found, index, listed)


def _look_at_listed(found: Inspection, index: Path, shard: str, names: list[str]) -> dict[str, StoredTensor] | None:
    """The tensors of a shard that the index names; None if it cannot be read."""
    path = index.parent / shard
    if leaves_folder(shard):
        found.note(
            "error",
            index,
            f"{index} names the shard {shard!r}, which lies outside {index.parent}: it is never read. Put the shard "
            "beside the index, and its bare name into the index",
        )
    elif not path.exists():
        found.note(
            "error",
            index,
            f"{index} names the shard {shard!r} for {_listed(names)}, and there is no such file. Download or copy it",
        )
    else:
        read = _look_at_file(found, path)
        return None if read is None else {tensor.name: tensor for tensor in read.tensors}
    return None


def _compare(
    found: Inspection, index: Path, weight_map: Mapping[str, str], content: Mapping[str, Mapping[str, StoredTensor]]
) -> None:
    """The index with what its shards hold."""
    held = {name for tensors in content.values() for name in tensors}
    absent: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, shard in weight_map.items():
        if shard in content and name in content[shard]:
            found.tensors[name] = content[shard][name]
        elif shard in content:
            absent[shard, name in held].append(name)
    for (shard, elsewhere), names in absent.items():
        where = "another shard holds it" if elsewhere else "no shard does"
        message = f"{index} says that {shard!r} holds {_listed(names)}, but {where}. Save the checkpoint again"
        found.note("error", index, message)
    for shard, tensors in content.items():
        if unlisted := [name for name in tensors if name not in weight_map]:
            message = f"{shard!r} holds {_listed(unlisted)}, which {index.name} does not list: a load leaves it out"
            found.note("warning", index.parent / shard, f"{message}. Save the checkpoint again if it belongs to it")
        if repeated := [name for name in tensors if weight_map.get(name, shard) != shard]:
            message = f"{shard!r} holds {_listed(repeated)}, which {index.name} has in another shard"
            found.note("warning", index.parent / shard, f"{message}: a load does not look here. Save it again")


def _check_total(found: Inspection, index: Path) -> None:
    metadata = parse_json_object(index.read_bytes(), index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.nbytes for tensor in found.tensors.values())
    # Only where all is there: an error has been noted for whatever is missing.
    if isinstance(total, int | float) and found.ok and int(total) != held:
        found.note(
            "warning",
            index,
            f"{index} says that the tensors take {int(total)} bytes, and they take {held}: it was written for other "
            "shards, or ties were counted twice. Save the checkpoint again",
        )


def _look_for_strays(found: Inspection, index: Path, listed: Iterable[str]) -> None:
    """Weights beside the index that it says nothing of."""
    known = set(listed)
    strays = [path.name for path in sorted(index.parent.glob("*.safetensors")) if path.name not in known]
    if strays and index.name.endswith(".safetensors.index.json"):
        found.note(
            "warning",
            index,
            f"{index.parent} holds {_listed(strays)}, which {index.name} does not list: a load leaves it out. "
            "Remove it if it is left over",
        )


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more

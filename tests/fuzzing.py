"""What must hold for every hostile checkpoint, and a process of its own to try thousands of them in.

An input is never to crash, hang, take memory out of proportion, read outside its file or its folder, or run code. It is
refused by one of our errors, which names the file, or its tensors are what an independent reader finds in the bytes.
"""

import argparse
import importlib
import json
import random
import re
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from fuzz_inputs import IndexMaker, PickleMaker, SafetensorsMaker
from overspill.checkpoint import CheckpointIndex, open_checkpoint
from overspill.checkpoint.reader import FileReader
from overspill.checkpoint.safetensors_header import DTYPES
from overspill.config import MIB
from overspill.errors import CheckpointError

HEADROOM = 256 * MIB
"""What a process that examines inputs may take on top of what it has when it begins."""

STATED_REASONS = {
    "a key occurs twice: readers disagree on which counts": "occurs more than once",
    "a field that the format does not have may change what the others mean": "which no reader knows of",
    "a tensor that is described by a list relies on the order of fields": "not by a JSON object",
    "F4 and F6 count parts of bytes, and a dtype may only be a name": "the dtype .* which is none of",
    "an empty tensor may hide sizes that torch cannot hold": r"the shape .*(memory can address|sizes of 0 or more)",
}
"""Why a file is refused that the safetensors package accepts: the reason, and how the error says it."""

Tensors = dict[str, tuple[str, list[int], bytes]]


# ---------------------------------------------------------------- what must hold


def examine_safetensors(content: bytes, path: Path) -> str:
    """Open `content` as the file `path`."""
    _rewrite(path, content)
    peer = accepted_by_safetensors(content)
    index = _opened(path)
    if isinstance(index, CheckpointError):
        assert str(path) in str(index), index
        assert peer is None or any(re.search(how, str(index)) for how in STATED_REASONS.values()), index
        return "refused" if peer is None else "refused for a stated reason"
    assert peer is not None, "accepted, and the safetensors package refuses it"
    assert as_read(index) == peer
    return "accepted"


def accepted_by_safetensors(content: bytes) -> Tensors | None:
    """What the safetensors package, a reader in another language, finds in `content`; None if it refuses it."""
    try:
        found = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None
    return {name: (info["dtype"], info["shape"], bytes(info["data"])) for name, info in found}


def as_read(index: CheckpointIndex) -> Tensors:
    """Every tensor of a checkpoint, through our own reader."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    reader = FileReader()
    tensors = {}
    for name, stored in index.items():
        target = bytearray(stored.nbytes)
        reader.read(stored.file, stored.offset, memoryview(target))
        tensors[name] = (names[stored.spec.dtype], list(stored.spec.shape), bytes(target))
    reader.close()
    return tensors


def examine_index(content: bytes, folder: Path) -> str:
    """Open `folder`, as `checkpoint_to_index` made it, with `content` for its index."""
    _rewrite(folder / "model.safetensors.index.json", content)
    index = _opened(folder)
    if isinstance(index, CheckpointError):
        assert str(folder) in str(index), index
        return "refused"
    document = json.loads(content)
    assert {name: str(stored.file.path) for name, stored in index.items()} == {
        name: str(folder / shard) for name, shard in document.get("weight_map", document).items()
    }
    for stored in index.values():
        assert stored.file.path.resolve().is_relative_to(folder.resolve()), stored.file.path
        assert 0 <= stored.offset <= stored.file.size - stored.nbytes
    return "accepted"


def checkpoint_to_index(parent: Path) -> Path:
    """A folder of two shards, beside files that an index must not lead to."""
    folder = parent / "model"
    (folder / "sub").mkdir(parents=True)
    values = {name: torch.arange(3.0) for name in "abc"}
    for path in (parent / "secret", folder / "one", folder / "two", folder / "sub" / "three"):
        save_file(values, f"{path}.safetensors")
    return folder


def examine_pickle(content: bytes, path: Path, canary: Path) -> str:
    """Open `content` as a file of torch.save; whatever in it runs makes `canary`."""
    _rewrite(path, content)
    index = _opened(path)
    assert not canary.exists(), "code of the pickle ran"
    if isinstance(index, CheckpointError):
        assert str(path) in str(index), index
        return "refused"
    assert all(0 <= stored.offset <= len(content) - stored.nbytes for stored in index.values())
    return "accepted"


def _opened(path: Path) -> CheckpointIndex | CheckpointError:
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        return error


def _rewrite(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # some file systems wait for the disk where a file is truncated and written anew
    path.write_bytes(content)


# ---------------------------------------------------------------- a process of its own


def main() -> None:
    """Examine `count` inputs of each kind. The parent sees from `current` which one it is that ends or stops this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=["safetensors", "index", "pickle"])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--atheris", action="store_true", help="led by coverage; the first kind alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns of pickles of other protocols
    pairs = {kind: _kind(kind, options.folder, random.Random(options.seed)) for kind in options.kinds}
    for examine, make in pairs.values():
        _examine_warm_up(examine, make)
    _limit_memory()
    if options.atheris:
        _fuzz_with_atheris(*pairs[options.kinds[0]], options.count, options.folder)
        return
    outcomes = {kind: Counter[str]() for kind in pairs}
    for kind, (examine, make) in pairs.items():
        for _ in range(options.count):
            content = make()
            _rewrite(options.folder / "current", content)
            outcomes[kind][examine(content)] += 1
    sys.stdout.write(json.dumps(outcomes))


def _kind(kind: str, folder: Path, chance: random.Random) -> tuple[Callable[[bytes], str], Callable[[], bytes]]:
    if kind == "safetensors":
        file = folder / "model.safetensors"
        return lambda content: examine_safetensors(content, file), SafetensorsMaker(chance).make
    if kind == "index":
        model = checkpoint_to_index(folder)
        return lambda content: examine_index(content, model), IndexMaker(chance, folder).make
    path, canary = folder / "model.pt", folder / "canary"
    return lambda content: examine_pickle(content, path, canary), PickleMaker(chance, canary).make


def _examine_warm_up(examine: Callable[[bytes], str], make: Callable[[], bytes]) -> None:
    """What is imported and cached on first use is not an input's doing."""
    for _ in range(20):
        examine(make())


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _fuzz_with_atheris(examine: Callable[[bytes], str], make: Callable[[], bytes], count: int, folder: Path) -> None:
    atheris: Any = importlib.import_module("atheris")
    from overspill.checkpoint import index, pickle_check, pickled, safetensors_header

    for module in (index, safetensors_header, pickled, pickle_check):
        for name, function in vars(module).items():
            if (
                getattr(function, "__module__", None) == module.__name__
                and callable(function)
                and hasattr(function, "__code__")
            ):
                setattr(module, name, atheris.instrument_func(function))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(200):
        (corpus / str(number)).write_bytes(make())
    # Limits are the parent's business, who watches memory and time.
    atheris.Setup(
        [sys.argv[0], f"-runs={count}", "-rss_limit_mb=0", "-seed=1", f"-artifact_prefix={folder}/", str(corpus)],
        examine,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()

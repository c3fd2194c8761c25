"""The row that needs no GPU: a model wholly on disk, computing on the CPU, each contender in a process of its own."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from common import GB, Check, Row, Shape, Timing, forward, nbytes_of, repeat, write_checkpoint
from lines import cached_rate
from peers import accelerate_disk_offload, pretrained
from safetensors.torch import load_file, save_file
from torch import nn

import overspill

CHILDREN: Final = ("ours", "accelerate", "resident")
MB: Final = 1e6
ALLOWED_GROWTH: Final = 200 * MB
"""Beyond the window: Python's objects, activations, the allocators' slack."""
TIMES: Final = 9


def all_on_disk(shape: Shape, folder: Path) -> Row:
    """Nothing is resident; the page cache is warm, as after a first pass."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    state = shape.random_state(torch.device("cpu"))
    nbytes = nbytes_of(state)
    files = write_checkpoint(shape, state, checkpoint, shards=2)
    del state
    cached_rate(files)
    rate = cached_rate(files)
    found = {name: _contender(name, shape, folder) for name in CHILDREN}
    rate += cached_rate(files)
    ours, theirs, resident = (Timing(tuple(found[name]["seconds"])) for name in CHILDREN)
    window = found["ours"]["window"]
    growth = found["ours"]["growth"]
    same_bits = torch.equal(_logits(folder, "ours"), _logits(folder, "resident"))
    return Row(
        name="disk",
        what=f"one token, {nbytes / GB:.2f} GB all on disk, computing on the CPU, warm",
        ours=ours,
        line=max(resident.median, nbytes / rate.best),
        line_is=f"the longer of the plain model, {resident} s, and reading the page cache, {nbytes / rate.best:.3f} s",
        peer=theirs,
        peer_is="Accelerate",
        targets=[
            Check.at_least("≥ 3 × Accelerate's disk_offload", theirs.median / ours.median, 3),
            Check.at_most(
                f"memory grows by less than the window ({window / MB:.0f} MB) + {ALLOWED_GROWTH / MB:.0f} MB",
                growth / MB,
                (window + ALLOWED_GROWTH) / MB,
                "MB",
            ),
        ],
        checks=[Check("same bits as the plain model", "yes" if same_bits else "no", same_bits)],
        details={
            "page cache to memory": str(rate),
            "plain model, s": str(resident),
            **{f"memory growth, {name}, MB": str(_megabytes(found[name])) for name in CHILDREN},
            "Accelerate's same bits": torch.equal(_logits(folder, "accelerate"), _logits(folder, "resident")),
        },
    )


def _megabytes(found: dict[str, Any]) -> dict[str, int]:
    return {phase: round(found[phase] / MB) for phase in ("growth", "growth_in_passes")}


def _contender(name: str, shape: Shape, folder: Path) -> dict[str, Any]:
    """Run one of them in a fresh process."""
    program = Path(__file__).with_name("inference.py")
    command = [sys.executable, str(program), "--child", name, "--folder", str(folder), "--layers", str(shape.layers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _logits(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / f"{name}.safetensors")["logits"]


# In a process of its own.


def child(name: str, shape: Shape, folder: Path) -> None:
    """Build the model in one of the ways, measure it, and print what was found as JSON."""
    ids = torch.randint(0, shape.vocab, (1, 1), generator=torch.Generator().manual_seed(1))
    make = {"ours": _ours, "accelerate": _accelerate, "resident": _resident}[name]
    found: dict[str, Any] = {}
    with memory_growth(found, "growth") as start:
        model, found["window"] = make(shape, folder)
        with memory_growth(found, "growth_in_passes", start):
            logits = forward(model, ids)
            same = all(torch.equal(forward(model, ids), logits) for _ in range(2))
    assert same, f"{name}: two passes differ"
    found["seconds"] = repeat(lambda: forward(model, ids), TIMES).samples
    save_file({"logits": logits}, folder / f"{name}.safetensors")
    print(json.dumps(found))


def _ours(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = shape.skeleton()
    plan = overspill.plan(model, {}, device="cpu")
    assert plan.streamed_bytes == plan.disk_bytes
    assert plan.resident_bytes == 0
    print(plan)
    return overspill.load(model, folder / "checkpoint", plan, progress=False), plan.window


def _accelerate(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    return accelerate_disk_offload(folder / "checkpoint", shape, folder / "accelerate"), 0


def _resident(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = pretrained(folder / "checkpoint", shape)
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.clone()
        )  # as mapped from the file they may be too little aligned for the same bits
    return model, 0


@contextmanager
def memory_growth(found: dict[str, Any], name: str, start: int | None = None) -> Iterator[int]:
    """Put into `found` by how much the process's own memory grew at most, since now or beyond `start`."""
    start = own_memory() if start is None else start
    most, stop = start, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.003):
            most = max(most, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield start
    finally:
        stop.set()
        watcher.join()
        found[name] = max(most, own_memory()) - start


def own_memory() -> int:
    """Bytes of this process that no file backs, those in shared anonymous mappings included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[entry].split()[0]) * 1024 for entry in ("RssAnon", "RssShmem"))

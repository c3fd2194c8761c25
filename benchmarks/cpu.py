"""The row that needs no GPU: a model wholly on disk, computing on the CPU, each contender in a process of its own.

Note: how the contenders are timed. They take turns, so that whatever else the machine does meanwhile does it to all.
A turn begins with a pass off the clock, and the others follow without a pause: what a pass fetches for the next one is
then on the clock as often as what it found fetched.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from common import GB, Check, Row, Shape, Timing, forward, nbytes_of, repeat, write_checkpoint
from lines import Rate, cached_rate
from peers import accelerate_disk_offload, pretrained
from safetensors.torch import load_file, save_file
from torch import nn

import overspill

CHILDREN: Final = ("ours", "accelerate", "resident")
TURNS: Final = 5
PASSES: Final = 3
"""On the clock in each turn."""
MB: Final = 1e6
ALLOWED_GROWTH: Final = 200 * MB
"""Beyond the window: Python's objects, activations, the allocators' slack."""


def all_on_disk(shape: Shape, folder: Path) -> Row:
    """Nothing is resident; the page cache is warm, as after a first pass."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    state = shape.random_state(torch.device("cpu"))
    nbytes = nbytes_of(state)
    files = write_checkpoint(shape, state, checkpoint, shards=2)
    del state
    cached_rate(files)  # from here on they are in the page cache
    contenders, rate = _take_turns(shape, folder, files)
    ours, theirs, resident = (Timing(tuple(contenders[name].samples)) for name in CHILDREN)
    reading = nbytes / rate.best
    window, growth = contenders["ours"].found["window"], contenders["ours"].found["growth"]
    allowed = window + ALLOWED_GROWTH
    logits = {name: load_file(folder / f"{name}.safetensors")["logits"] for name in CHILDREN}
    same_bits = torch.equal(logits["ours"], logits["resident"])
    return Row(
        name="disk",
        what=f"one token, {nbytes / GB:.2f} GB all on disk, computing on the CPU, warm",
        ours=ours,
        line=max(resident.median, reading),
        line_is=f"the longer of the plain model, {resident} s, and the page cache, {reading:.3f} s at {rate}",
        peer=theirs,
        peer_is="Accelerate",
        targets=[
            Check.at_least("≥ 3 × Accelerate's disk_offload", theirs.median / ours.median, 3),
            Check.at_most(
                f"memory grows by less than window + {ALLOWED_GROWTH / MB:.0f} MB = {allowed / MB:.0f} MB",
                growth / MB,
                allowed / MB,
                "MB",
            ),
        ],
        checks=[Check("same bits as the plain model", "yes" if same_bits else "no", same_bits)],
        details={
            "window, MB": window / MB,
            **{f"memory growth, {name}, MB": each.found["growth"] / MB for name, each in contenders.items()},
            **{f"processor time a pass, {name}, s": min(each.busy) for name, each in contenders.items()},
            "Accelerate's same bits": torch.equal(logits["accelerate"], logits["resident"]),
        },
    )


def _take_turns(shape: Shape, folder: Path, files: list[Path]) -> tuple[dict[str, "Contender"], Rate]:
    """The contenders after their turns, and the page cache's rate, measured in between."""
    contenders = {name: Contender(name, shape, folder) for name in CHILDREN}
    rate = cached_rate(files)
    for _ in range(TURNS):
        for contender in contenders.values():
            contender.turn()
        rate += cached_rate(files)
    for contender in contenders.values():
        contender.end()
    return contenders, rate


class Contender:
    """One way to run the model, in a fresh process that waits for its turns."""

    def __init__(self, name: str, shape: Shape, folder: Path) -> None:
        self._name = name
        self.samples: list[float] = []
        """Seconds of each pass."""
        self.busy: list[float] = []
        """Seconds of processor time a pass, on all cores together; whatever else runs changes them less."""
        program = Path(__file__).with_name("inference.py")
        arguments = ["--child", name, "--folder", str(folder), "--layers", str(shape.layers)]
        command = [sys.executable, str(program), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.found = self.answer()

    def answer(self) -> Any:
        """The next thing it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} ended with status {self._process.wait()}")
        return json.loads(line)

    def turn(self) -> None:
        """Have it run some passes."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        samples, busy = self.answer()
        self.samples += samples
        self.busy.append(busy)

    def end(self) -> None:
        """It must end well, too."""
        self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the process of {self._name} ended with status {self._process.returncode}")


# In a process of its own.


def child(name: str, shape: Shape, folder: Path) -> None:
    """Build the model in one of the ways, print what was found as JSON, then the seconds of each turn."""
    ids = torch.randint(0, shape.vocab, (1, 1), generator=torch.Generator().manual_seed(1))
    make = {"ours": _ours, "accelerate": _accelerate, "resident": _resident}[name]
    found: dict[str, Any] = {}
    with memory_growth(found):
        model, found["window"] = make(shape, folder)
        logits = forward(model, ids)
        same = all(torch.equal(forward(model, ids), logits) for _ in range(2))
    assert same, f"{name}: two passes differ"
    save_file({"logits": logits}, folder / f"{name}.safetensors")
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        samples = repeat(lambda: forward(model, ids), PASSES).samples
        busy = (time.process_time() - start) / (PASSES + 1)
        print(json.dumps([samples, busy]), flush=True)


def _ours(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = shape.skeleton()
    plan = overspill.plan(model, {}, device="cpu")
    assert plan.resident_bytes == plan.cpu_bytes == 0
    return overspill.load(model, folder / "checkpoint", plan, progress=False), plan.window


def _accelerate(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    return accelerate_disk_offload(folder / "checkpoint", shape, folder / "accelerate"), 0


def _resident(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = pretrained(folder / "checkpoint", shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped from a file it may be too little aligned for the same bits
    return model, 0


@contextmanager
def memory_growth(found: dict[str, Any]) -> Iterator[None]:
    """Note in `found` by how much the process's own memory grew at most."""
    start = most = own_memory()
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.003):
            most = max(most, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        found["growth"] = max(most, own_memory()) - start


def own_memory() -> int:
    """Bytes of this process that no file backs, those in shared anonymous mappings included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[entry].split()[0]) * 1024 for entry in ("RssAnon", "RssShmem"))

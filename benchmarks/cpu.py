"""The rows that need no GPU: a model that rests on disk, or is loaded to the CPU, and computes there.

Note: how the contenders are timed. Each has a process of its own. They take turns, so that whatever else the machine
does meanwhile does it to all. A turn begins with a pass off the clock, and the others follow without a pause: what a
pass fetches for the next one is then on the clock as often as what it found fetched. A load is timed with the first
token: Transformers maps the file, so that its load alone reads nothing.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from common import GB, Check, Row, Shape, Timing, forward, nbytes_of, repeat, write_checkpoint
from lines import Rate, cached_rate
from peers import accelerate_disk_offload, diffusers_group_offload, pretrained
from safetensors.torch import load_file, save_file
from torch import nn

import overspill

PASSING: Final = ("ours", "ours-copied", "accelerate", "resident", "diffusers")
LOADING: Final = ("load-ours", "load-transformers", "load-copied")
CHILDREN: Final = PASSING + LOADING
TURNS: Final = 5
PASSES: Final = 3
"""On the clock in each turn."""
MB: Final = 1e6
ALLOWED_GROWTH: Final = 200 * MB
"""Beyond the window: Python's objects, activations, the allocators' slack."""


class Bench:
    """The checkpoint as Transformers writes it, and as we do, in the page cache."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        state = shape.random_state(torch.device("cpu"))
        self.nbytes = nbytes_of(state)
        self.files = write_checkpoint(shape, state, checkpoint, shards=2)
        model, _ = _from_disk(shape, checkpoint)
        overspill.save(model, folder / "saved", progress=False)
        cached_rate([*self.files, *(folder / "saved").glob("*.safetensors")])  # from here on they are in the page cache

    def logits(self, name: str) -> torch.Tensor:
        """What a contender has computed."""
        return load_file(self.folder / f"{name}.safetensors")["logits"]

    def take_turns(self, names: Sequence[str]) -> tuple[dict[str, "Contender"], Rate]:
        """The contenders after their turns, and the page cache's rate, measured in between."""
        contenders = {name: Contender(name, self.shape, self.folder) for name in names}
        rate = cached_rate(self.files)
        for _ in range(TURNS):
            for contender in contenders.values():
                contender.turn()
            rate += cached_rate(self.files)
        for contender in contenders.values():
            contender.end()
        return contenders, rate


def all_on_disk(bench: Bench) -> Row:
    """Nothing is resident; the page cache is warm, as after a first pass."""
    here = [name for name in PASSING if name != "diffusers" or find_spec("diffusers")]
    contenders, rate = bench.take_turns(here)
    timings = {name: contender.timing() for name, contender in contenders.items()}
    ours, theirs, resident = timings["ours"], timings["accelerate"], timings["resident"]
    reading = bench.nbytes / rate.best
    window, growth = contenders["ours"].found["window"], contenders["ours"].found["growth"]
    allowed = window + ALLOWED_GROWTH
    logits = {name: bench.logits(name) for name in here}
    same_bits = all(torch.equal(logits[name], logits["resident"]) for name in ("ours", "ours-copied"))
    return Row(
        name="disk",
        what=f"one token, {bench.nbytes / GB:.2f} GB all on disk, computing on the CPU, warm",
        ours=ours,
        line=resident.median,
        line_is=f"the plain model, {resident} s; a copy of the page cache would take {reading:.3f} s, at {rate}",
        peer=theirs,
        peer_is="Accelerate",
        others={
            "ours, files as Transformers writes them, which are copied": timings["ours-copied"],
            "Diffusers group offloading to disk": timings.get("diffusers", "not here: it is not installed"),
        },
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
            **{f"same bits, {name}": torch.equal(logits[name], logits["resident"]) for name in here},
        },
    )


def load_to_cpu(bench: Bench) -> Row:
    """From the page cache to memory, and the first token."""
    contenders, rate = bench.take_turns(LOADING)
    ours, theirs, copied = (contenders[name].timing() for name in LOADING)
    same_bits = torch.equal(bench.logits("load-ours"), bench.logits("load-copied"))
    return Row(
        name="load",
        what=f"load {bench.nbytes / GB:.2f} GB to the CPU and compute one token, warm",
        ours=ours,
        line=bench.nbytes / rate.best,
        line_is=f"page cache, {rate}",
        peer=theirs,
        peer_is="Transformers, mapped",
        others={"Transformers, copied to memory of its own": copied},
        targets=[Check.at_most("≤ 1.1 × Transformers, copied", ours.median / copied.median, 1.1)],
        checks=[Check("same bits as Transformers' model", "yes" if same_bits else "no", same_bits)],
        details={
            **{f"load alone, {name}, s": str(Timing(tuple(each.loads))) for name, each in contenders.items()},
            **{f"memory growth, {name}, MB": each.found["growth"] / MB for name, each in contenders.items()},
        },
    )


ROWS: Final[Mapping[str, Callable[[Bench], Row]]] = {"disk": all_on_disk, "load": load_to_cpu}


class Contender:
    """One way to run the model, in a fresh process that waits for its turns."""

    def __init__(self, name: str, shape: Shape, folder: Path) -> None:
        self._name = name
        self.samples: list[float] = []
        """Seconds of each pass."""
        self.busy: list[float] = []
        """Seconds of processor time a pass, on all cores together; whatever else runs changes them less."""
        self.loads: list[float] = []
        """Seconds of each load alone, of those that load."""
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
        answer = self.answer()
        self.samples += answer["samples"]
        self.busy.append(answer["busy"])
        self.loads += answer["loads"]

    def timing(self) -> Timing:
        """Of all its turns."""
        return Timing(tuple(self.samples))

    def end(self) -> None:
        """It must end well, too."""
        self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the process of {self._name} ended with status {self._process.returncode}")


# In a process of its own.


def child(name: str, shape: Shape, folder: Path) -> None:
    """Be one of the contenders: print what was found as JSON, then the seconds of each turn."""
    ids = torch.randint(0, shape.vocab, (1, 1), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    with memory_growth(found):
        model, found["window"] = MAKE[name](shape, folder)
        logits = forward(model, ids)
        same = all(torch.equal(forward(model, ids), logits) for _ in range(2))
    assert same, f"{name}: two passes differ"
    save_file({"logits": logits}, folder / f"{name}.safetensors")
    print(json.dumps(found), flush=True)
    loads: list[float] = []
    run: Callable[[], object] = partial(forward, model, ids)
    if name in LOADING:
        del model
        run = partial(_load_and_run, name, shape, folder, ids, loads)
    for _ in sys.stdin:
        loads.clear()
        start = time.process_time()
        samples = repeat(run, PASSES).samples
        busy = (time.process_time() - start) / (PASSES + 1)
        print(json.dumps({"samples": samples, "busy": busy, "loads": loads[1:]}), flush=True)


def _load_and_run(name: str, shape: Shape, folder: Path, ids: torch.Tensor, loads: list[float]) -> None:
    """The first token of a model; what the load alone took is noted."""
    start = time.perf_counter()
    model, _ = MAKE[name](shape, folder)
    loads.append(time.perf_counter() - start)
    forward(model, ids)


def _ours(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    """From files that we wrote: their tensors are aligned, and are computed with where they lie."""
    return _from_disk(shape, folder / "saved")


def _ours_copied(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    """From files as Transformers writes them: one in eight is aligned, by chance, and the others are copied."""
    return _from_disk(shape, folder / "checkpoint")


def _from_disk(shape: Shape, checkpoint: Path) -> tuple[nn.Module, int]:
    model = shape.skeleton()
    plan = overspill.plan(model, {}, device="cpu")
    assert plan.resident_bytes == plan.cpu_bytes == 0
    return overspill.load(model, checkpoint, plan, progress=False), plan.window


def _load(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = shape.skeleton()
    plan = overspill.plan(model, {"cpu": 1 << 40}, device="cpu")
    assert plan.streamed_bytes == 0
    return overspill.load(model, folder / "checkpoint", plan, progress=False), 0


def _accelerate(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    return accelerate_disk_offload(folder / "checkpoint", shape, folder / "accelerate"), 0


def _diffusers(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    return diffusers_group_offload(folder / "checkpoint", shape, torch.device("cpu"), folder / "diffusers"), 0


def _transformers(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    return pretrained(folder / "checkpoint", shape), 0


def _resident(shape: Shape, folder: Path) -> tuple[nn.Module, int]:
    model = pretrained(folder / "checkpoint", shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # mapped from a file it may be too little aligned for the same bits
    return model, 0


MAKE: Final[Mapping[str, Callable[[Shape, Path], tuple[nn.Module, int]]]] = {
    "ours": _ours,
    "ours-copied": _ours_copied,
    "accelerate": _accelerate,
    "resident": _resident,
    "diffusers": _diffusers,
    "load-ours": _load,
    "load-transformers": _transformers,
    "load-copied": _resident,
}


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

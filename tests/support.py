"""What many tests share: small models, checkpoints of them, and plans that put units on a chosen tier."""

import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import overspill
from overspill import mapping, transfer
from overspill.managed import managed
from overspill.movement import to_device
from overspill.plan import Plan, Tier
from overspill.streamed import StreamedUnit
from overspill.transfer import PREFETCHED
from overspill.windows import usual_window

TIERS = ["cpu", "disk", "mixed"]


class Block(nn.Module):
    """A residual block with two linear layers, a norm, a mixed dtype and a buffer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x)))) * gain
        return x + y * self.scale.to(x.dtype) + self.shift


class Net(nn.Module):
    """Embedding, blocks and a head that is tied to the embedding."""

    def __init__(self, blocks: int = 4, width: int = 32, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, gain=0.5)
        return self.head(self.norm(x))


def aligned(model: nn.Module) -> nn.Module:
    """The model with every tensor in 64-byte aligned memory, as a bit-exact comparison needs."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.data = tensor.data.clone()
    return model


DATA_STARTS_AT = 8
"""Where tensors begin in files of `save_checkpoint`, beyond a multiple of 64: as in most files, they are too little
aligned to be computed with where they lie. See the fixture `mapped`."""


def save_checkpoint(model: nn.Module, folder: Path) -> Path:
    """The model's state in one safetensors file, ties stored once."""
    state, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach().clone().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(state, path)
    shift_data(path, DATA_STARTS_AT)
    return path


def map_everything(patch: pytest.MonkeyPatch) -> None:
    """Where the CPU computes, have what is on disk computed with where it lies, however small it is."""
    patch.setattr(sys.modules[__name__], "DATA_STARTS_AT", 0)
    patch.setattr(mapping, "_WORTH_A_RUN", 1)
    patch.setattr(mapping, "_WORTH_MAPPING", 0.01)
    patch.setattr(mapping, "_counts_as_memory", lambda: False)  # whoever runs the tests may limit them


def shift_data(path: Path, start: int) -> None:
    """Have a safetensors file's data begin `start` bytes behind a multiple of 64: its header may end in spaces."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padding = (start - 8 - length) % 64
    path.write_bytes(
        (length + padding).to_bytes(8, "little") + content[8 : 8 + length] + b" " * padding + content[8 + length :]
    )


def placed(plan: Plan, tier: str | Callable[[int], str]) -> Plan:
    """`plan` with every unit on `tier`, or on `tier(index)`. Streams from host memory also where the CPU computes."""
    if tier == "mixed":
        choose: Callable[[int], str] = lambda index: ("cpu", "disk", "device")[index % 3]  # noqa: E731
    elif isinstance(tier, str):
        choose = lambda index: tier  # noqa: E731
    else:
        choose = tier
    placements = tuple(
        dataclasses.replace(placement, tier=Tier(choose(index))) for index, placement in enumerate(plan.placements)
    )
    return dataclasses.replace(plan, placements=placements)


def loaded(build: Callable[[], nn.Module], checkpoint: Path, tier: str, device: str = "cpu") -> nn.Module:
    """A skeleton of `build`, loaded from `checkpoint` with its units on `tier`, to compute on `device`."""
    with overspill.empty_weights():
        model = build()
    model.eval()
    plan = placed(narrow(overspill.plan(model, {}, device=device)), tier)
    return overspill.load(model, checkpoint, plan, progress=False)


def narrow(plan: Plan) -> Plan:
    """`plan` with a window for three units, so that a model of a few blocks really streams through it."""
    units = [placement.unit for placement in plan.placements]
    return dataclasses.replace(plan, windows={plan.device: usual_window(units)})


def run(reference: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The resident model's result, as the managed model gives it: computed on its device, back where the inputs are."""
    device = next(reference.parameters()).device
    args, kwargs = to_device((args, kwargs), device)
    return to_device(reference(*args, **kwargs), torch.device("cpu"))


def run_at_once(works: Sequence[Callable[[], object]]) -> None:
    """Each in a thread of its own, which take turns as often as they can. Raises the first failure of any of them."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


def streamed_units(model: nn.Module) -> list[StreamedUnit]:
    """The units of a managed model that are not resident."""
    manager = managed(model)
    assert manager is not None, "the model is not managed"
    return [unit for residency in manager.residencies for unit in residency._units]


def window_bytes_in_use(model: nn.Module) -> int:
    manager = managed(model)
    assert manager is not None
    return sum(r.window.nbytes - r.window.free_bytes() for r in manager.residencies)


def drain() -> None:
    """Wait until the reader threads, where there are any, have nothing more to do."""
    if transfer._shared_readers is None:
        return
    done, count = threading.Event(), transfer.reader_threads()
    barrier = threading.Barrier(count, action=done.set)
    for _ in range(count):
        transfer._readers().submit(PREFETCHED, lambda: barrier.wait(timeout=30))  # type: ignore[arg-type, return-value]
    assert done.wait(timeout=30), "a read does not come to its end"


def run_program(program: str, timeout: float = 60) -> str:
    """What `program` prints, run by a Python of its own: for what would take this one down."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return result.stdout


# For programs that kill their children. Those are forked: to start Python takes longer than all that they then do.


def in_child(work: Callable[[], object]) -> int:
    """Call `work` in a child of this process, which must not have started threads; the status that it ends with."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        gc.collect()  # _exit runs no finalizers
        os._exit(0)
    return os.waitpid(child, 0)[1]


def die() -> None:
    """End here, without any clearing up."""
    os.kill(os.getpid(), signal.SIGKILL)


def came_to_its_end(status: int, which: str) -> bool:
    """Whether a child did, and did not die before. Whatever else became of it is an error."""
    assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), f"{which}: {status}"
    return status == 0


@dataclasses.dataclass(frozen=True)
class Where:
    """A tier to move to, and the device that computes."""

    device: str
    tier: str

    def offload(self, model: nn.Module, **options: Any) -> Any:
        """Move to the tier. A model that the CPU computes gets into host memory by way of the disk only."""
        if self.tier == "cpu" and self.device == "cpu":
            overspill.offload(model, to="disk", **options)
            options.pop("folder", None)
        return overspill.offload(model, to=self.tier, **options)

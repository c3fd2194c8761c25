"""What the rows that need a GPU share: the checkpoint, the plain model, ours, a peer's passes, and what makes a row."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
from common import GB, Check, Row, Shape, Timing, forward, nbytes_of, repeat, synchronize, write_checkpoint
from lines import Link, settle_reads
from peers import accelerate_auto, offloaded_bytes
from torch import nn

import overspill
from overspill import Plan
from overspill.plan import Tier

DEVICE: Final = torch.device("cuda", 0)
SHARDS: Final = 5
SHORT: Final = 512
PROMPT: Final = 8192
"""Tokens of a short prompt, which arrives sooner than its weights, and of one that takes as long as they do."""
ROUNDING: Final = 32 << 20
"""What torch's allocator may add to the bytes asked for: up to 1 MiB a tensor that it does not split off."""

Budget = Mapping[int | str, int]


class Bench:
    """The checkpoint, the plain model that everything is compared with, and the lines."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder / "checkpoint"
        self.folder.mkdir()
        start = perf_counter()
        self.state = shape.random_state(DEVICE)
        self.nbytes = nbytes_of(self.state)
        self.files = write_checkpoint(shape, self.state, self.folder, SHARDS)
        print(f"checkpoint: {self.nbytes / GB:.2f} GB in {len(self.files)} files, {perf_counter() - start:.1f} s")
        self.plain = shape.skeleton()
        self.plain.load_state_dict(self.state, strict=True, assign=True)
        self.plain.to(DEVICE)  # the buffers, which are in no checkpoint
        random = torch.Generator(DEVICE).manual_seed(1)
        self.inputs = {
            tokens: torch.randint(0, shape.vocab, (1, tokens), device=DEVICE, generator=random)
            for tokens in (1, SHORT, PROMPT)
        }
        self.reference: dict[int, torch.Tensor] = {}
        self.activations: dict[int, int] = {}
        for tokens, ids in self.inputs.items():
            for _ in range(2):  # the first one makes the libraries' workspaces, which stay
                memory = DeviceMemory()
                self.reference[tokens] = forward(self.plain, ids)
                self.activations[tokens] = memory.peak()[0]
            assert self.reference[tokens].isfinite().all()
        self.link = Link(DEVICE)

    def share(self, part: float) -> int:
        """A part of the model's bytes, as a budget."""
        return int(self.nbytes * part)

    def passes(self, model: nn.Module, tokens: int = 1) -> Callable[[], torch.Tensor]:
        """A pass of `model`, to be timed."""
        return partial(forward, model, self.inputs[tokens])

    def same_bits(self, model: nn.Module, tokens: int = 1) -> bool:
        """Whether `model` now gives the plain model's logits, bit for bit."""
        return torch.equal(forward(model, self.inputs[tokens]), self.reference[tokens])


def free() -> None:
    """Give back what the last model held."""
    synchronize()
    settle_reads()
    gc.collect()
    torch.cuda.empty_cache()


class DeviceMemory:
    """The most that is allocated on the device from now on, beyond what is there already."""

    def __init__(self) -> None:
        free()
        torch.cuda.reset_peak_memory_stats()
        self._allocated, self._reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def peak(self) -> tuple[int, int]:
        """Bytes allocated and bytes reserved."""
        synchronize()
        allocated = torch.cuda.max_memory_allocated() - self._allocated
        return allocated, torch.cuda.max_memory_reserved() - self._reserved


# Ours.


@dataclass
class Ours:
    """A model that overspill has loaded, and what was found out about it."""

    bench: Bench
    plan: Plan
    tokens: int
    model: nn.Module
    seconds: dict[str, float]
    peak: tuple[int, int] = (0, 0)
    same_bits: bool = True
    details: dict[str, object] = field(default_factory=dict)

    def run(self) -> torch.Tensor:
        return forward(self.model, self.bench.inputs[self.tokens])

    def check_bits(self) -> None:
        self.same_bits &= self.bench.same_bits(self.model, self.tokens)

    def from_disk(self) -> int:
        """Bytes that a pass reads from files: what rests there, but for what the window keeps."""
        on_disk = (placement.unit for placement in self.plan.placements if placement.tier is Tier.DISK)
        return sum(unit.nbytes for unit in on_disk if unit.name not in self.plan.kept)

    def describe(self) -> None:
        """For the report: what the plan says, and what happened."""
        activations = self.bench.activations[self.tokens]
        self.details = {
            "in host memory, GB": self.plan.cpu_bytes / GB,
            "on disk, GB": self.plan.disk_bytes / GB,
            "streamed a pass (the window keeps the rest), GB": self.plan.streamed_bytes / GB,
            "resident, GB": (self.plan.resident_bytes + self.plan.stays_nbytes) / GB,
            "window, GB": self.plan.window / GB,
            "peak allocated, GB": self.peak[0] / GB,
            "peak reserved, GB": self.peak[1] / GB,
            "of it activations (as in the plain model), GB": activations / GB,
            **{f"{step}, s": seconds for step, seconds in self.seconds.items()},
        }

    def checks(self) -> list[Check]:
        """What every row must show."""
        allowed = self.plan.budgets.get(DEVICE) or self.plan.bytes_on(DEVICE)
        held = self.peak[0] - self.bench.activations[self.tokens]
        measured = f"{held / GB:.3f} of {allowed / GB:.3f} GB"
        bits = Check("same bits as the plain model", "yes" if self.same_bits else "no", self.same_bits)
        return [bits, Check("within the memory budget", measured, held <= allowed + ROUNDING)]


def load(bench: Bench, budget: Budget, tokens: int = 1) -> Ours:
    """Skeleton, plan and load, each of them timed."""
    synchronize()
    marks = [perf_counter()]
    model = bench.shape.skeleton()
    marks.append(perf_counter())
    plan = overspill.plan(model, dict(budget))
    marks.append(perf_counter())
    overspill.load(model, bench.folder, plan, progress=False)
    synchronize()
    marks.append(perf_counter())
    seconds = {step: marks[n + 1] - marks[n] for n, step in enumerate(("skeleton", "plan", "load"))}
    return Ours(bench, plan, tokens, model, seconds)


@contextmanager
def loaded(bench: Bench, budget: Budget, tokens: int = 1) -> Iterator[Ours]:
    """A loaded model; its memory and its bits are checked before and its bits again after what is done with it."""
    overspill.plan(bench.shape.skeleton(), dict(budget))  # measures the link once, which takes device memory
    memory = DeviceMemory()
    ours = load(bench, budget, tokens)
    try:
        ours.check_bits()
        ours.check_bits()  # a second time, with what the first pass has fetched ahead
        ours.peak = memory.peak()
        ours.describe()
        yield ours
        ours.check_bits()
    finally:
        ours.model = nn.Module()  # the caller still holds `ours`
        free()


# Peers.


def peer(
    bench: Bench,
    make: Callable[[], nn.Module],
    times: int,
    *,
    tokens: int = 1,
    before: Callable[[], None] = lambda: None,
) -> tuple[Timing, dict[str, object]]:
    """Time passes of a peer's model, after one to warm up."""

    def measure() -> tuple[Timing, dict[str, object]]:
        model = make()
        details: dict[str, object] = {
            "peer's same bits": bench.same_bits(model, tokens),
            "peer's offloaded, GB": offloaded_bytes(model, bench.state) / GB,
        }
        samples: list[float] = []
        for _ in range(times):
            before()
            samples += repeat(bench.passes(model, tokens), 1, warm_up=0).samples
        return Timing(tuple(samples)), details

    try:
        return measure()
    finally:
        free()


@dataclass(frozen=True)
class Peer:
    """Who is measured beside, how long it took, and what else was found."""

    name: str
    timing: Timing
    details: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def accelerate_auto(
        cls, bench: Bench, budget: Budget, times: int, *, before: Callable[[], None] = lambda: None
    ) -> "Peer":
        """Accelerate within the same budget."""
        make = partial(accelerate_auto, bench.folder, bench.shape, budget)
        return cls("Accelerate", *peer(bench, make, times, before=before))


# Rows.


def row(
    name: str,
    what: str,
    ours: Ours,
    timing: Timing,
    *,
    line: float,
    line_is: str,
    targets: Sequence[Check],
    beside: Peer | None = None,
    moved: int | None = None,
    checks: Sequence[Check] = (),
    details: Mapping[str, object] | None = None,
) -> Row:
    """What was measured of a model that overspill has loaded. `moved` bytes in each repetition make a rate."""
    rate = {} if moved is None else {"GB/s": moved / timing.median / GB}
    return Row(
        name=name,
        what=what,
        ours=timing,
        line=line,
        line_is=line_is,
        peer=None if beside is None else beside.timing,
        peer_is="" if beside is None else beside.name,
        targets=targets,
        checks=[*ours.checks(), *checks],
        details={**ours.details, **rate, **(details or {}), **({} if beside is None else beside.details)},
    )


def of_line(share: float, line: float, timing: Timing) -> Check:
    """So much of what the hardware allows."""
    return Check.at_least(f"≥ {100 * share:.0f} % of the line", line / timing.median, share, "%")


def times_faster(factor: float, than: str, theirs: Timing, timing: Timing) -> Check:
    """So many times as fast as a peer."""
    return Check.at_least(f"≥ {factor:.0f} × {than}", theirs.median / timing.median, factor)


def at_most(factor: float, of: str, seconds: float, timing: Timing) -> Check:
    """No more than so many times those seconds."""
    return Check.at_most(f"≤ {factor} × {of}", timing.median / seconds, factor)

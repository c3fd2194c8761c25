"""The rows that need a GPU: an 8B Llama, one token or a long prompt, from host memory and from disk.

Note: what a repetition's time contains. A pass ends by fetching the first units of the next one, so in a series of
passes each moves exactly the streamed bytes. From host memory that is all waited for by the synchronisation that ends
a repetition. From disk it is not: there the repetitions follow each other without a pause, and the dropping of the page
cache is on the clock. Nothing is fetched off the clock.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
from common import GB, Check, Row, Shape, Timing, alternate, forward, nbytes_of, repeat, synchronize, write_checkpoint
from lines import Link, cached_rate, direct_rate, drop_caches, settle_reads, storage_bytes
from peers import accelerate_auto, accelerate_cpu_offload, offloaded_bytes, pretrained
from torch import nn

import overspill
from overspill import Plan
from overspill.devices import pinned_bytes

DEVICE: Final = torch.device("cuda", 0)
SHARDS: Final = 5
PROMPT: Final = 8192
HOST: Final = 40 << 30
HALF: Final = 0.6
"""Of the model's bytes, as a budget for the GPU: with the window taken off, about half of them are resident."""
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
            for tokens in (1, PROMPT)
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

    def half(self) -> int:
        """The GPU's budget for the rows that stream about half of the model."""
        return int(self.nbytes * HALF)

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
    bench: Bench, make: Callable[[], nn.Module], times: int, before: Callable[[], None] = lambda: None
) -> tuple[Timing, dict[str, object]]:
    """Time one token of a peer's model, after a pass to warm up."""

    def measure() -> tuple[Timing, dict[str, object]]:
        model = make()
        details: dict[str, object] = {
            "peer's same bits": bench.same_bits(model),
            "peer's offloaded, GB": offloaded_bytes(model, bench.state) / GB,
        }
        samples: list[float] = []
        for _ in range(times):
            before()
            samples += repeat(bench.passes(model), 1, warm_up=0).samples
        return Timing(tuple(samples)), details

    try:
        return measure()
    finally:
        free()


# Rows.


def all_resident(bench: Bench) -> Row:
    """A model that fits costs nothing."""
    with loaded(bench, {0: int(bench.nbytes * 1.1)}) as ours:
        assert ours.plan.streamed_bytes == 0
        timing, plain = alternate(ours.run, bench.passes(bench.plain), 100)
    return Row(
        name="resident",
        what="one token, all resident",
        ours=timing,
        line=plain.median,
        line_is=f"the plain model, {plain}",
        targets=[
            Check.at_most("≤ 1.01 × the plain model", timing.median / plain.median, 1.01),
        ],
        checks=ours.checks(),
        details=ours.details,
    )


def load_warm(bench: Bench) -> Row:
    """From the page cache to the GPU."""
    cached = cached_rate(bench.files) + cached_rate(bench.files)  # the first time brings them there
    rate = bench.link.rate()
    budget: Budget = {0: int(bench.nbytes * 1.1)}
    with loaded(bench, budget) as ours:
        pass  # warms up, and checks bits and memory
    steps: dict[str, list[float]] = {"skeleton": [], "plan": [], "load": []}
    for _ in range(5):
        free()
        for step, seconds in load(bench, budget).seconds.items():
            steps[step].append(seconds)
    whole = Timing(tuple(map(sum, zip(*steps.values(), strict=True))))
    theirs = _load_times(bench, 3, warm_up=1)
    rate += bench.link.rate()
    return Row(
        name="load-warm",
        what="load to the GPU, warm",
        ours=whole,
        line=bench.nbytes / rate.best,
        line_is=f"link, {rate}",
        peer=theirs,
        peer_is="Transformers",
        targets=[
            Check.at_least("≥ 4 × from_pretrained", theirs.median / whole.median, 4),
        ],
        checks=ours.checks(),
        details=ours.details
        | {f"{step} alone, s": str(Timing(tuple(samples))) for step, samples in steps.items()}
        | {"page cache to memory": str(cached)},
    )


def _load_times(bench: Bench, times: int, *, warm_up: int, before: Callable[[], None] = lambda: None) -> Timing:
    """Seconds of Transformers' from_pretrained, straight to the GPU."""
    samples: list[float] = []
    for _ in range(warm_up + times):
        free()
        before()
        samples += repeat(lambda: pretrained(bench.folder, bench.shape, {"": 0}), 1, warm_up=0).samples
    free()
    return Timing(tuple(samples[warm_up:]))


def all_on_cpu(bench: Bench) -> Row:
    """Everything crosses the link for each token."""
    rate = bench.link.rate()
    with loaded(bench, {"cpu": HOST}) as ours:
        assert ours.plan.resident_bytes == ours.plan.disk_bytes == 0
        timing = repeat(ours.run, 15, warm_up=2)
    rate += bench.link.rate()
    line = ours.plan.streamed_bytes / rate.best
    theirs, details = peer(bench, lambda: accelerate_cpu_offload(bench.folder, bench.shape, DEVICE), 3)
    return Row(
        name="cpu",
        what="one token, all weights on the CPU",
        ours=timing,
        line=line,
        line_is=f"link, {rate}",
        peer=theirs,
        peer_is="Accelerate",
        targets=[
            Check.at_least("≥ 95 % of the line", line / timing.median, 0.95, "%"),
            Check.at_least("≥ 8 × Accelerate", theirs.median / timing.median, 8),
        ],
        checks=ours.checks(),
        details=ours.details | {"GB/s": ours.plan.streamed_bytes / timing.median / GB} | details,
    )


def half_resident(bench: Bench) -> Row:
    """The other half crosses the link."""
    budget: Budget = {0: bench.half(), "cpu": HOST}
    rate = bench.link.rate()
    with loaded(bench, budget) as ours:
        timing = repeat(ours.run, 20, warm_up=2)
    rate += bench.link.rate()
    line = ours.plan.streamed_bytes / rate.best
    theirs, details = peer(bench, lambda: accelerate_auto(bench.folder, bench.shape, budget), 3)
    return Row(
        name="half",
        what="one token, half resident",
        ours=timing,
        line=line,
        line_is=f"link, {rate}",
        peer=theirs,
        peer_is="Accelerate",
        targets=[Check.at_most("≤ 1.1 × the line", timing.median / line, 1.1)],
        checks=ours.checks(),
        details=ours.details | {"GB/s": ours.plan.streamed_bytes / timing.median / GB} | details,
    )


def adopted(bench: Bench) -> Row:
    """Accelerate's own model, half of it on the CPU, before and after it is adopted."""
    budget: Budget = {0: bench.half(), "cpu": HOST}
    rate = bench.link.rate()
    model = accelerate_auto(bench.folder, bench.shape, budget)
    moved = offloaded_bytes(model, bench.state)
    before = bench.same_bits(model)
    theirs = repeat(bench.passes(model), 3, warm_up=0)
    pinning = _pinning_times(moved)
    start = perf_counter()
    overspill.adopt(model)
    synchronize()
    adoption = perf_counter() - start
    same = bench.same_bits(model)
    timing = repeat(bench.passes(model), 20, warm_up=2)
    same &= bench.same_bits(model)
    overspill.restore(model)
    same &= bench.same_bits(model)
    del model
    free()
    rate += bench.link.rate()
    return Row(
        name="adopt",
        what="one token, half resident, adopted from Accelerate",
        ours=timing,
        line=moved / rate.best,
        line_is=f"link, {rate}",
        peer=theirs,
        peer_is="Accelerate",
        targets=[
            Check.at_least("≥ 7 × Accelerate", theirs.median / timing.median, 7),
            Check.at_most("adoption ≤ 1.5 × the time of pinning the same bytes", adoption / pinning.median, 1.5),
        ],
        checks=[Check("same bits as the plain model, also restored", "yes" if same else "no", same)],
        details={
            "offloaded, GB": moved / GB,
            "adoption, s": adoption,
            "pinning fresh memory of that size, s": str(pinning),
            "Accelerate's same bits": before,
        },
    )


def _pinning_times(nbytes: int) -> Timing:
    """Seconds to take and pin as much host memory, the way that a load does."""
    samples = []
    for _ in range(3):
        start = perf_counter()
        pages = pinned_bytes(nbytes, DEVICE)
        samples.append(perf_counter() - start)
        del pages
    return Timing(tuple(samples))


SERIES: Final = 4
"""Prompts that follow each other, timed as one. A pass ends by fetching the next one's first units: waiting for those
alone, with nothing left to compute, is no part of a series."""


def in_a_row(run: Callable[[], object]) -> Callable[[], None]:
    """Several passes without a pause."""

    def series() -> None:
        for _ in range(SERIES):
            run()

    return series


def of_one(timing: Timing) -> Timing:
    """Seconds of one pass, of a series."""
    return Timing(tuple(seconds / SERIES for seconds in timing.samples))


def prefill(bench: Bench) -> Row:
    """A prompt that computes for as long as the weights need to arrive."""
    rate = bench.link.rate()
    with loaded(bench, {"cpu": HOST}, PROMPT) as ours:
        ours_in_a_row, plain_in_a_row = in_a_row(ours.run), in_a_row(bench.passes(bench.plain, PROMPT))
        timing, plain = (of_one(each) for each in alternate(ours_in_a_row, plain_in_a_row, 6))
    rate += bench.link.rate()
    moving = ours.plan.streamed_bytes / rate.best
    return Row(
        name="prefill",
        what=f"{PROMPT:,}-token prefill, all weights on the CPU",
        ours=timing,
        line=max(plain.median, moving),
        line_is=f"the longer of the plain model, {plain} s, and the link, {moving:.3f} s at {rate}",
        peer=plain,
        peer_is="plain model",
        targets=[
            Check.at_most("≤ 1.03 × the plain model", timing.median / plain.median, 1.03),
        ],
        checks=ours.checks(),
        details=ours.details,
    )


def load_cold(bench: Bench) -> Row:
    """From the disk to the GPU."""
    budget: Budget = {0: int(bench.nbytes * 1.1)}
    drop = partial(drop_caches, bench.files)
    with loaded(bench, budget) as ours:
        pass  # warms up, and checks bits and memory
    drop()
    rate = direct_rate(bench.files)
    samples: list[float] = []
    read: list[float] = []
    for _ in range(3):
        free()
        drop()
        with _counted(read):
            samples.append(load(bench, budget).seconds["load"])
        free()
        rate += direct_rate(bench.files)
    timing, line = Timing(tuple(samples)), bench.nbytes / rate.best
    theirs = _load_times(bench, 1, warm_up=0, before=drop)
    return Row(
        name="load-cold",
        what="load to the GPU, cold",
        ours=timing,
        line=line,
        line_is=f"direct reads, {rate}",
        peer=theirs,
        peer_is="Transformers",
        targets=[
            Check.at_least("≥ 85 % of the line", line / timing.median, 0.85, "%"),
        ],
        checks=[*ours.checks(), _was_cold(read, bench.nbytes)],
        details=ours.details | {"GB/s": bench.nbytes / timing.median / GB, "disk read, GB": str(read)},
    )


def half_on_disk(bench: Bench) -> Row:
    """The other half comes from the disk, for each token."""
    budget: Budget = {0: bench.half()}
    drop = partial(drop_caches, bench.files)
    drop()
    rate = direct_rate(bench.files)
    read: list[float] = []
    with loaded(bench, budget) as ours:
        assert ours.plan.cpu_bytes == 0
        timing = _cold_passes(ours.run, drop, 5, read)
    rate += direct_rate(bench.files) + direct_rate(bench.files)
    line = ours.plan.streamed_bytes / rate.best
    theirs, details = peer(bench, lambda: accelerate_auto(bench.folder, bench.shape, budget), 2, before=drop)
    return Row(
        name="disk",
        what="one token, half on disk, cold",
        ours=timing,
        line=line,
        line_is=f"direct reads, {rate}",
        peer=theirs,
        peer_is="Accelerate",
        targets=[
            Check.at_least("≥ 80 % of the line", line / timing.median, 0.8, "%"),
        ],
        checks=[*ours.checks(), _was_cold(read, ours.plan.streamed_bytes)],
        details=ours.details
        | {"GB/s": ours.plan.streamed_bytes / timing.median / GB, "disk read, GB": str(read)}
        | details,
    )


def _cold_passes(run: Callable[[], object], drop: Callable[[], None], times: int, read: list[float]) -> Timing:
    """Passes one right after the other, the page cache dropped before each, all of it on the clock."""
    drop()
    run()
    samples = []
    synchronize()
    for _ in range(times):
        with _counted(read):
            start = perf_counter()
            drop()
            run()
            synchronize()
            samples.append(perf_counter() - start)
    return Timing(tuple(samples))


@contextmanager
def _counted(read: list[float]) -> Iterator[None]:
    """Append the gigabytes that came from the disk meanwhile."""
    before = storage_bytes()
    yield
    after = storage_bytes()
    if before is not None and after is not None:
        read.append(round((after - before) / GB, 3))


def _was_cold(read: list[float], nbytes: int) -> Check:
    """The page cache must not have helped. Where the kernel does not count, nobody can tell."""
    promise = "all of it read from the disk"
    if not read:
        return Check(promise, "not counted here", True)
    mean = sum(read) / len(read)  # a single pass may read some of the next one's bytes, or find them read
    return Check(promise, f"{mean:.2f} of {nbytes / GB:.2f} GB", mean * GB >= 0.95 * nbytes)


ROWS: Final[Mapping[str, Callable[[Bench], Row]]] = {
    "resident": all_resident,
    "load-warm": load_warm,
    "cpu": all_on_cpu,
    "half": half_resident,
    "adopt": adopted,
    "prefill": prefill,
    "load-cold": load_cold,
    "disk": half_on_disk,
}

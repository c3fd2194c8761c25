"""The rows that need a GPU: an 8B Llama, one token or a prompt, from host memory and from disk.

Note: what a repetition's time contains. A pass ends by fetching the first units of the next one, so in a series of
passes each moves exactly the streamed bytes. From host memory that is all waited for by the synchronisation that ends
a repetition. From disk it is not: there the repetitions follow each other without a pause, and the dropping of the page
cache is on the clock. Nothing is fetched off the clock.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Final

from common import GB, Check, Row, Timing, alternate, repeat, synchronize
from gpu_bench import (
    DEVICE,
    PROMPT,
    SHORT,
    Bench,
    Budget,
    Peer,
    at_most,
    free,
    load,
    loaded,
    of_line,
    peer,
    row,
    times_faster,
)
from lines import cached_rate, direct_rate, drop_caches, storage_bytes
from peers import accelerate_auto, accelerate_cpu_offload, diffusers_group_offload, offloaded_bytes, pretrained

import overspill
from overspill.devices import pinned_bytes

HOST: Final = 40 << 30
HALF: Final = 0.6
"""Of the model's bytes, as a budget for the GPU: with the window taken off, about half of them are resident."""
THREE_QUARTERS: Final = 0.85
"""The same for three quarters."""
QUARTER: Final = 0.35
"""The same for one quarter."""


def all_resident(bench: Bench) -> Row:
    """A model that fits costs nothing."""
    with loaded(bench, {0: int(bench.nbytes * 1.1)}) as ours:
        assert ours.plan.streamed_bytes == 0
        timing, plain = alternate(ours.run, bench.passes(bench.plain), 100)
    return row(
        "resident",
        "one token, all resident",
        ours,
        timing,
        line=plain.median,
        line_is=f"the plain model, {plain}",
        targets=[at_most(1.01, "the plain model", plain.median, timing)],
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
    return row(
        "load-warm",
        "load to the GPU, warm",
        ours,
        whole,
        line=bench.nbytes / rate.best,
        line_is=f"link, {rate}",
        targets=[times_faster(4, "from_pretrained", theirs, whole)],
        beside=Peer("Transformers", theirs),
        details={f"{step} alone, s": str(Timing(tuple(samples))) for step, samples in steps.items()}
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
    measured = _all_on_cpu(bench, 1, "cpu", "one token", at_least=8)
    return replace(measured, others={"Diffusers group offloading": _diffusers(bench)})


def _diffusers(bench: Bench) -> Timing | str:
    """Seconds a token with Diffusers' group offloading, or that it is not installed."""
    try:
        timing, _ = peer(bench, partial(diffusers_group_offload, bench.folder, bench.shape, DEVICE), 5)
    except ImportError as missing:
        return f"not here: {missing}"
    return timing


def short_prompt(bench: Bench) -> Row:
    """A prompt that computes for less time than the weights need to arrive."""
    return _all_on_cpu(bench, SHORT, "prompt", f"{SHORT}-token prompt", at_least=6)


def _all_on_cpu(bench: Bench, tokens: int, name: str, work: str, *, at_least: float) -> Row:
    rate = bench.link.rate()
    plain = repeat(bench.passes(bench.plain, tokens), 5)
    with loaded(bench, {"cpu": HOST}, tokens) as ours:
        assert ours.plan.resident_bytes == ours.plan.disk_bytes == 0
        timing = repeat(ours.run, 12, warm_up=2)
    rate += bench.link.rate()
    line = max(plain.median, ours.plan.streamed_bytes / rate.best)
    make = partial(accelerate_cpu_offload, bench.folder, bench.shape, DEVICE)
    theirs = Peer("Accelerate", *peer(bench, make, 3, tokens=tokens))
    return row(
        name,
        f"{work}, all weights on the CPU",
        ours,
        timing,
        line=line,
        line_is=f"the longer of the plain model, {plain} s, and the link, {rate}",
        targets=[of_line(0.95, line, timing), times_faster(at_least, "Accelerate", theirs.timing, timing)],
        beside=theirs,
        moved=ours.plan.streamed_bytes,
    )


def half_resident(bench: Bench) -> Row:
    """The other half crosses the link."""
    return _partly_resident(bench, HALF, "half", "half")


def three_quarters_resident(bench: Bench) -> Row:
    """A quarter crosses the link."""
    return _partly_resident(bench, THREE_QUARTERS, "three-quarters", "three quarters")


def _partly_resident(bench: Bench, share: float, name: str, part: str) -> Row:
    budget: Budget = {0: bench.share(share), "cpu": HOST}
    rate = bench.link.rate()
    with loaded(bench, budget) as ours:
        assert ours.plan.disk_bytes == 0
        timing = repeat(ours.run, 15, warm_up=2)
    rate += bench.link.rate()
    line = ours.plan.streamed_bytes / rate.best
    return row(
        name,
        f"one token, {part} resident",
        ours,
        timing,
        line=line,
        line_is=f"link, {rate}",
        targets=[at_most(1.1, "the line", line, timing)],
        beside=Peer.accelerate_auto(bench, budget, 3),
        moved=ours.plan.streamed_bytes,
    )


def adopted(bench: Bench) -> Row:
    """Accelerate's own model, half of it on the CPU, before and after it is adopted."""
    budget: Budget = {0: bench.share(HALF), "cpu": HOST}
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
            times_faster(7, "Accelerate", theirs, timing),
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
    return row(
        "prefill",
        f"{PROMPT:,}-token prefill, all weights on the CPU",
        ours,
        timing,
        line=max(plain.median, moving),
        line_is=f"the longer of the plain model, {plain} s, and the link, {moving:.3f} s at {rate}",
        targets=[at_most(1.03, "the plain model", plain.median, timing)],
        beside=Peer("plain model", plain),
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
    return row(
        "load-cold",
        "load to the GPU, cold",
        ours,
        timing,
        line=line,
        line_is=f"direct reads, {rate}",
        targets=[of_line(0.85, line, timing)],
        beside=Peer("Transformers", _load_times(bench, 1, warm_up=0, before=drop)),
        moved=bench.nbytes,
        checks=[_was_cold(read, bench.nbytes)],
        details={"disk read, GB": str(read)},
    )


def half_on_disk(bench: Bench) -> Row:
    """The other half comes from the disk, for each token."""
    budget: Budget = {0: bench.share(HALF)}
    drop = partial(drop_caches, bench.files)
    drop()
    rate = direct_rate(bench.files)
    read: list[float] = []
    with loaded(bench, budget) as ours:
        assert ours.plan.cpu_bytes == 0
        timing = _cold_passes(ours.run, drop, 5, read)
    rate += direct_rate(bench.files) + direct_rate(bench.files)
    line = ours.plan.streamed_bytes / rate.best
    return row(
        "disk",
        "one token, half on disk, cold",
        ours,
        timing,
        line=line,
        line_is=f"direct reads, {rate}",
        targets=[of_line(0.8, line, timing)],
        beside=Peer.accelerate_auto(bench, budget, 2, before=drop),
        moved=ours.plan.streamed_bytes,
        checks=[_was_cold(read, ours.plan.streamed_bytes)],
        details={"disk read, GB": str(read)},
    )


def half_on_disk_warm(bench: Bench) -> Row:
    """The same from the page cache: read with all threads, and copied on as it lands."""
    budget: Budget = {0: bench.share(HALF)}
    cached = cached_rate(bench.files) + cached_rate(bench.files)  # the first time brings them there
    rate = bench.link.rate()
    read: list[float] = []
    with loaded(bench, budget) as ours:
        assert ours.plan.cpu_bytes == 0
        with _counted(read):
            timing = of_one(repeat(in_a_row(ours.run), 4))
    cached += cached_rate(bench.files)
    rate += bench.link.rate()
    moved = ours.plan.streamed_bytes
    line = max(moved / rate.best, moved / cached.best)
    theirs = Peer.accelerate_auto(bench, budget, 3)
    return row(
        "disk-warm",
        "one token, half on disk, warm",
        ours,
        timing,
        line=line,
        line_is=f"the slower of the link, {rate}, and the page cache, {cached}",
        targets=[times_faster(3, "Accelerate", theirs.timing, timing)],
        beside=theirs,
        moved=moved,
        checks=[_was_warm(read)],
        details={"disk read, GB": str(read)},
    )


def mixed(bench: Bench) -> Row:
    """A quarter resident, half in host memory, a quarter on disk: the disk reads while the link copies."""
    budget: Budget = {0: bench.share(QUARTER), "cpu": bench.share(0.5)}
    drop = partial(drop_caches, bench.files)
    drop()
    direct, link = direct_rate(bench.files), bench.link.rate()
    read: list[float] = []
    with loaded(bench, budget) as ours:
        assert ours.plan.cpu_bytes
        assert ours.plan.disk_bytes
        timing = _cold_passes(ours.run, drop, 4, read)
        cached_rate(bench.files)  # direct reads leave nothing in the page cache
        warm = of_one(repeat(in_a_row(ours.run), 3))
    direct += direct_rate(bench.files)
    link += bench.link.rate()
    from_disk = ours.from_disk()
    line = max(from_disk / direct.best, ours.plan.streamed_bytes / link.best)
    return row(
        "mixed",
        "one token, a quarter resident, half on the CPU, a quarter on disk, cold",
        ours,
        timing,
        line=line,
        line_is=f"the slower of {from_disk / GB:.2f} GB of direct reads, {direct}, and all of it on the link, {link}",
        targets=[of_line(0.8, line, timing)],
        beside=Peer.accelerate_auto(bench, budget, 2, before=drop),
        checks=[_was_cold(read, from_disk)],
        details={"the same, warm, s": str(warm), "disk read, GB": str(read)},
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


def _was_warm(read: list[float]) -> Check:
    """The page cache must have had it all."""
    promise = "none of it read from the disk"
    if not read:
        return Check(promise, "not counted here", True)
    return Check(promise, f"{sum(read):.3f} GB", sum(read) < 0.1)


ROWS: Final[Mapping[str, Callable[[Bench], Row]]] = {
    "resident": all_resident,
    "load-warm": load_warm,
    "cpu": all_on_cpu,
    "prompt": short_prompt,
    "half": half_resident,
    "three-quarters": three_quarters_resident,
    "adopt": adopted,
    "prefill": prefill,
    "disk-warm": half_on_disk_warm,
    "load-cold": load_cold,
    "disk": half_on_disk,
    "mixed": mixed,
}

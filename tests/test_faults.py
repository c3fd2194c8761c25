"""Disks that fail, files that change, interrupts and full folders: a clear error, and a model that goes on."""

import contextlib
import errno
import gc
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.reader import FileReader
from overspill.devices import HostPages
from overspill.errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointReadError,
    OffloadFolderError,
    OverspillError,
)
from overspill.managed import managed
from overspill.streamed import StreamedUnit
from overspill.transfer import DEMANDED, PREFETCHED
from support import Net, aligned, drain, loaded, run_program, save_checkpoint, streamed_units, window_bytes_in_use

IDS = torch.arange(24).view(2, 12)
BLOCKS = 6


def build() -> nn.Module:
    return Net(blocks=BLOCKS)


@pytest.fixture
def reference() -> nn.Module:
    return aligned(build()).eval()


@pytest.fixture
def checkpoint(reference: nn.Module, tmp_path: Path) -> Path:
    return save_checkpoint(reference, tmp_path / "checkpoint")


@pytest.fixture
def model(checkpoint: Path) -> nn.Module:
    """All of it on disk."""
    return loaded(build, checkpoint, "disk")


class Disk:
    """Stands before every read of values: fails, waits or stops early where it is told to, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        self.reads = 0
        self._faults: list[tuple[int, int]] = []  # an offset, and how many reads of it are still to fail
        self._lock = threading.Lock()
        self.before: Callable[[int], None] = lambda offset: None
        self.most: int | None = None
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def fail(self, offset: int, times: int) -> None:
        """The next `times` reads of the byte at `offset` fail."""
        self._faults = [(offset, times)]

    def mend(self) -> None:
        self._faults = []

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        (target,) = buffers
        self.before(offset)
        with self._lock:
            self.reads += 1
            for position, (bad, times) in enumerate(self._faults):
                if times and offset <= bad < offset + len(target):
                    self._faults[position] = (bad, times - 1)
                    self.failures += 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._preadv(descriptor, [target[: self.most]], offset, *flags)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def offset_of(name: str, checkpoint: Path) -> int:
    return open_checkpoint(checkpoint)[name].offset


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(IDS)
    return output


def assert_right(model: nn.Module, reference: nn.Module, passes: int = 2) -> None:
    for _ in range(passes):
        assert torch.equal(run(model), run(reference))


def assert_idle(model: nn.Module, *, collect: bool = True) -> None:
    """No call holds anything, every home is shown, and all of the window can be had: at once, if not `collect`."""
    homes = {id(home) for unit in streamed_units(model) for home in unit.store.homes}
    shown = {id(parameter) for parameter in model.parameters()}
    drain()
    assert all(unit.users == 0 for unit in streamed_units(model))
    assert homes <= shown
    for unit in streamed_units(model):
        assert unit.drop() is None, "a fetch is still on its way"
    if collect:
        gc.collect()
    assert window_bytes_in_use(model) == 0


def assert_untouched(model: nn.Module) -> None:
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())
    assert managed(model) is None


def skeleton() -> nn.Module:
    with overspill.empty_weights():
        return build().eval()


def load_cast(model: nn.Module, checkpoint: Path, folder: Path) -> nn.Module:
    """All on disk, and all converted into `folder`."""
    return overspill.load(model, checkpoint, max_memory={}, dtype=torch.float64, offload_folder=folder, progress=False)


# ---------------------------------------------------------------- a checkpoint that changes while in use


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rewrite(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # whatever the clock's resolution


@pytest.mark.parametrize("change", [_truncate, _rewrite])
@pytest.mark.parametrize("passes_before", [0, 2])
def test_a_checkpoint_that_changes_while_in_use_is_told_at_the_forward_that_needs_it(
    change: Callable[[Path], None], passes_before: int, model: nn.Module, reference: nn.Module, checkpoint: Path
) -> None:
    for _ in range(passes_before):
        run(model)
    original, times = checkpoint.read_bytes(), checkpoint.stat()
    change(checkpoint)
    for _ in range(2):
        with pytest.raises(CheckpointChangedError, match=r"Load the model again") as caught:
            run(model)
        assert str(checkpoint) in str(caught.value)
        with pytest.raises(CheckpointChangedError):
            model.get_parameter("blocks.3.up.weight").sum()
    del caught
    assert_idle(model)
    with checkpoint.open("r+b") as file:  # its owner thinks better of it
        file.write(original)
    os.utime(checkpoint, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_right(model, reference)


def test_a_forward_that_needs_nothing_of_a_changed_checkpoint_goes_on(reference: nn.Module, checkpoint: Path) -> None:
    model = loaded(build, checkpoint, "mixed")
    _rewrite(checkpoint)
    x = torch.randn(2, 3, 32)
    streamed = {unit.name: unit.store.reads_disk for unit in streamed_units(model)}
    answers = []
    with torch.no_grad():
        for index in range(BLOCKS):
            ours, theirs = model.get_submodule(f"blocks.{index}"), reference.get_submodule(f"blocks.{index}")
            if streamed.get(f"blocks.{index}", False):
                with pytest.raises(CheckpointChangedError):
                    ours(x)
            else:
                assert torch.equal(ours(x), theirs(x))
            answers.append(streamed.get(f"blocks.{index}", False))
    assert set(answers) == {True, False}


def test_a_model_in_use_outlives_its_files(model: nn.Module, reference: nn.Module, checkpoint: Path) -> None:
    run(model)
    shutil.rmtree(checkpoint.parent)
    assert_right(model, reference, passes=3)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].clone(), value), name


def test_files_that_are_gone_before_their_first_use_are_named_and_may_come_back(
    reference: nn.Module, checkpoint: Path, tmp_path: Path
) -> None:
    plan = overspill.plan(skeleton(), {}, device="cpu")
    if plan.stays:  # reading what stays would open the file already
        plan = overspill.Plan.from_device_map(skeleton(), {"": "disk"})
    model = overspill.load(skeleton(), checkpoint, plan, progress=False)
    manager = managed(model)
    assert manager is not None
    for unit in streamed_units(model):
        unit.store._reader.close()  # type: ignore[attr-defined]
    aside = checkpoint.rename(tmp_path / "aside")
    with pytest.raises(CheckpointReadError, match=r"No such file.*Put the file back") as caught:
        run(model)
    assert str(checkpoint) in str(caught.value)
    aside.rename(checkpoint)
    assert_right(model, reference)


# ---------------------------------------------------------------- a read error in the middle of a forward


@pytest.mark.parametrize("name", ["blocks.0.norm.weight", "blocks.3.up.weight", "blocks.5.down.weight"])
@pytest.mark.parametrize("passes_before", [0, 2])
def test_a_read_error_names_the_file_and_the_next_forward_works_once_it_is_gone(
    name: str, passes_before: int, model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    for _ in range(passes_before):
        run(model)
    assert_idle(model)  # nothing of it is in the window, so the forward has to read it
    disk.fail(offset_of(name, checkpoint), times=1_000_000)
    for _ in range(3):
        with pytest.raises(CheckpointReadError, match="Input/output error") as caught:
            run(model)
        assert str(checkpoint) in str(caught.value)
        assert all(unit.users == 0 for unit in streamed_units(model))
    del caught
    assert_idle(model)
    disk.mend()
    assert_right(model, reference, passes=3)


def test_a_read_of_a_weight_that_fails_is_told_there_and_works_once_it_is_gone(
    model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    name = "blocks.3.up.weight"
    disk.fail(offset_of(name, checkpoint), times=1)
    with pytest.raises(CheckpointReadError, match=re.escape(str(checkpoint))):
        model.get_parameter(name).sum()
    assert torch.equal(model.get_parameter(name).detach(), reference.get_parameter(name).detach())


def test_a_read_error_in_backward_leaves_gradients_that_can_be_made_again(
    model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    output = model(IDS).square().mean()
    assert_idle(model)  # so backward has to read
    disk.fail(offset_of("blocks.3.up.weight", checkpoint), times=1_000_000)
    with pytest.raises(CheckpointReadError, match=re.escape(str(checkpoint))):
        output.backward()
    del output
    disk.mend()
    model.zero_grad()
    for net in (model, reference):
        net(IDS).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


def test_a_prefetch_that_fails_goes_unnoticed_if_the_demand_works(
    model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []
    start = StreamedUnit.start

    def noting(self: StreamedUnit, slab: Any, transfer: Any, priority: int) -> None:
        started.append((self.name, priority))
        start(self, slab, transfer, priority)

    run(model)
    assert_idle(model)
    monkeypatch.setattr(StreamedUnit, "start", noting)
    disk.fail(offset_of("blocks.4.up.weight", checkpoint), times=1)
    assert_right(model, reference, passes=1)
    assert disk.failures == 1
    assert [priority for name, priority in started if name == "blocks.4"][:2] == [PREFETCHED, DEMANDED]


def test_one_failure_of_what_is_needed_now_is_tried_once_more(
    model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    disk.fail(offset_of("blocks.0.up.weight", checkpoint), times=1)
    assert_right(model, reference)
    assert disk.failures == 1


@pytest.mark.parametrize("kept", [True, False])
def test_an_error_holds_no_room_in_the_window(
    kept: bool, model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fail(offset_of("blocks.3.up.weight", checkpoint), times=1_000_000)
    errors = []
    gc.disable()  # the room must not wait for a collection
    try:
        for _ in range(3):
            try:
                run(model)
            except CheckpointReadError as error:
                errors += [error.with_traceback(None)] if kept else []  # as a notebook does, with the last one
        assert_idle(model, collect=False)
    finally:
        gc.enable()
    disk.mend()
    assert_right(model, reference)
    assert "outside it" not in caplog.text


def test_threads_on_a_disk_that_fails_at_times_get_an_error_or_the_right_bits(
    model: nn.Module, reference: nn.Module, disk: Disk
) -> None:
    chance, lock, mended = random.Random(0), threading.Lock(), threading.Event()

    def sometimes(offset: int) -> None:
        with lock:
            bad = chance.random() < 0.05 and not mended.is_set()
        if bad:
            disk.failures += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    expected, outcomes = run(reference), []

    def work() -> None:
        for _ in range(25):
            try:
                outcomes.append("right" if torch.equal(run(model), expected) else "WRONG")
            except CheckpointReadError:
                outcomes.append("told")
            except BaseException as error:
                outcomes.append(repr(error))

    disk.before = sometimes
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert set(outcomes) <= {"right", "told"}
    assert "right" in outcomes
    assert disk.failures
    mended.set()
    assert_idle(model)
    assert_right(model, reference)


# ---------------------------------------------------------------- reads that stop early, wait, or are interrupted


def test_reads_that_stop_early_give_the_right_bits(model: nn.Module, reference: nn.Module, disk: Disk) -> None:
    disk.most = 1000
    assert_right(model, reference)
    streamed = sum(spec.nbytes for unit in streamed_units(model) for spec in unit.store.layout.specs)
    assert disk.reads > 2 * streamed / 1000


def test_signals_while_reading_and_waiting_give_the_right_bits(
    model: nn.Module, reference: nn.Module, disk: Disk
) -> None:
    disk.before = lambda offset: time.sleep(0.002)
    arrived = []
    before = signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        assert_right(model, reference, passes=4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) > 10


@pytest.mark.parametrize("tier", ["disk", "mixed"])
def test_slow_reads_give_the_right_bits(tier: str, reference: nn.Module, checkpoint: Path, disk: Disk) -> None:
    model, chance = loaded(build, checkpoint, tier), random.Random(0)
    disk.before = lambda offset: time.sleep(chance.choice([0, 0, 0.001, 0.02]))
    assert_right(model, reference, passes=4)


def test_a_signal_in_the_middle_of_a_forward_leaves_the_model_usable(model: nn.Module, reference: nn.Module) -> None:
    for module in (model.get_submodule("blocks.2.up"), model.get_submodule("blocks.5"), model.get_submodule("norm")):
        handle = module.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(model)
        handle.remove()
        assert all(unit.users == 0 for unit in streamed_units(model))
    assert_right(model, reference)
    assert_idle(model)


@pytest.mark.parametrize("passes_before", [0, 1])
def test_an_interrupt_while_waiting_for_a_fetch_arrives_at_once_and_leaves_the_model_usable(
    passes_before: int, model: nn.Module, reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    for _ in range(passes_before):
        run(model)
    assert_idle(model)
    stuck, go_on = threading.Event(), threading.Event()
    bad = offset_of("blocks.3.norm.weight", checkpoint)

    def hang(offset: int) -> None:
        if offset == bad:
            stuck.set()
            go_on.wait(timeout=30)

    def interrupt() -> None:
        stuck.wait(timeout=30)
        time.sleep(0.05)  # until the forward has come as far
        os.kill(os.getpid(), signal.SIGINT)

    disk.before = hang
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(model)
        assert not go_on.is_set(), "the interrupt waited for the disk"
        assert all(unit.users == 0 for unit in streamed_units(model))
    finally:
        go_on.set()
        helper.join(timeout=30)
    assert_right(model, reference)
    assert_idle(model)


def test_an_interrupt_in_the_middle_of_a_load_leaves_the_skeleton(
    reference: nn.Module, checkpoint: Path, disk: Disk
) -> None:
    model = skeleton()
    main, count = threading.get_ident(), itertools.count()

    def interrupt_once(offset: int) -> None:
        if next(count) == 5:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.005)

    disk.before = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        overspill.load(model, checkpoint, max_memory={"cpu": "1GiB"}, progress=False)
    assert_untouched(model)
    overspill.load(model, checkpoint, max_memory={"cpu": "1GiB"}, progress=False)
    assert_right(model, reference)


# ---------------------------------------------------------------- the offload folder


def assert_nothing_left(folder: Path, model: nn.Module, checkpoint: Path, reference: nn.Module) -> None:
    """Nothing in the folder, and a skeleton that can be loaded."""
    assert not folder.exists() or list(folder.iterdir()) == []
    assert_untouched(model)
    overspill.load(model, checkpoint, max_memory={}, progress=False)
    assert_right(model, reference)


def test_a_folder_without_space_is_refused_before_anything_is_read(
    checkpoint: Path, reference: nn.Module, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "offload", skeleton()
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(OffloadFolderError, match=r"need .* KiB in .*offload, where 1000 B are free.*Free some"):
            load_cast(model, checkpoint, folder)
    assert disk.reads == 0
    assert_nothing_left(folder, model, checkpoint, reference)


@contextlib.contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    """Within, the kernel refuses writes past `nbytes` of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_leaves_nothing_behind(checkpoint: Path, reference: nn.Module, tmp_path: Path) -> None:
    folder, model = tmp_path / "offload", skeleton()
    with _files_of_at_most(4096), pytest.raises(OffloadFolderError) as error:
        load_cast(model, checkpoint, folder)
    assert re.search(r"writing \S+ to .*offload.* failed \(File too large\)", str(error.value))
    assert_nothing_left(folder, model, checkpoint, reference)


@pytest.mark.parametrize("nth", [0, 1])
def test_a_disk_that_is_full_when_a_file_is_made_leaves_nothing_behind(
    nth: int, checkpoint: Path, reference: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, real, made = tmp_path / "offload", skeleton(), os.open, itertools.count()

    def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and str(folder) in str(path) and next(made) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OffloadFolderError, match="No space left on device"):
            load_cast(model, checkpoint, folder)
    assert_nothing_left(folder, model, checkpoint, reference)


def test_a_disk_that_is_full_when_the_mark_is_written_leaves_nothing_behind(
    checkpoint: Path, reference: nn.Module, tmp_path: Path
) -> None:
    folder, model = tmp_path / "offload", skeleton()
    with _files_of_at_most(0), pytest.raises(OffloadFolderError, match="File too large"):
        load_cast(model, checkpoint, folder)
    assert_nothing_left(folder, model, checkpoint, reference)


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_folder_that_cannot_be_made_is_named(
    below: str, checkpoint: Path, reference: nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    folder, model = tmp_path / "file" / below, skeleton()
    with pytest.raises(OffloadFolderError, match=r"offload_folder") as caught:
        load_cast(model, checkpoint, folder)
    assert str(folder) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert_untouched(model)
    overspill.load(model, checkpoint, max_memory={}, progress=False)
    assert_right(model, reference)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_named(checkpoint: Path, reference: nn.Module, tmp_path: Path) -> None:
    folder, model = tmp_path / "offload", skeleton()
    folder.mkdir(mode=0o500)
    with pytest.raises(OffloadFolderError, match="Permission denied"):
        load_cast(model, checkpoint, folder)
    assert_nothing_left(folder, model, checkpoint, reference)


def test_a_read_error_in_the_middle_of_a_conversion_leaves_nothing_behind(
    checkpoint: Path, reference: nn.Module, tmp_path: Path, disk: Disk
) -> None:
    folder, model = tmp_path / "offload", skeleton()
    disk.fail(offset_of("blocks.3.up.weight", checkpoint), times=1)
    with pytest.raises(CheckpointReadError, match=re.escape(str(checkpoint))):
        load_cast(model, checkpoint, folder)
    assert_nothing_left(folder, model, checkpoint, reference)


# ---------------------------------------------------------------- budgets and devices


@pytest.mark.parametrize(
    ("max_memory", "message"),
    [
        ({"cpu": -1}, "-1"),
        ({"cpu": "-3GiB"}, "-3GiB"),
        ({"cpu": "lots"}, "lots"),
        ({"cpu": ""}, "max_memory"),
        ({"cpu": "10 parsecs"}, "10 parsecs"),
        ({"cpu": 1.5}, "1.5"),
        ({"cpu": float("nan")}, "nan"),
        ({"cpu": True}, "True"),
        ({"cpu": None}, "None"),
        ({"cpu": "1"}, "too little"),
        ({"warp": "1GiB"}, "warp"),
        ({99: "1GiB"}, "99"),
        ({-1: "1GiB"}, "-1"),
        ({"cuda:99": "1GiB"}, "cuda:99"),
        ({"disk": "1GiB"}, "disk"),
        ({"meta": "1GiB"}, "meta"),
        ({1.5: "1GiB"}, "1.5"),
    ],
)
def test_a_budget_that_cannot_be_read_or_met_is_named(
    max_memory: dict[Any, Any], message: str, checkpoint: Path, reference: nn.Module, disk: Disk
) -> None:
    model, given = skeleton(), dict(max_memory)
    with pytest.raises(BudgetError, match=re.escape(message)):
        overspill.load(model, checkpoint, max_memory=max_memory, progress=False)
    assert repr(max_memory) == repr(given)
    assert disk.reads == 0
    assert_untouched(model)
    overspill.load(model, checkpoint, max_memory={}, progress=False)
    assert_right(model, reference)


@pytest.mark.parametrize("device", ["warp", "cuda:x", "disk", "meta", -1, 1.5])
def test_an_unknown_device_is_named(device: Any) -> None:
    with pytest.raises(BudgetError, match=re.escape(str(device))):
        overspill.plan(skeleton(), {}, device=device)


def test_a_plan_for_a_device_that_is_not_here_is_refused_when_it_is_loaded(
    checkpoint: Path, reference: nn.Module
) -> None:
    model = skeleton()
    plan = overspill.plan(model, {99: "1GiB"}, device="cuda:99")  # planning for another machine is fine
    with pytest.raises(OverspillError, match="cuda:99"):
        overspill.load(model, checkpoint, plan, progress=False)
    assert_untouched(model)
    overspill.load(model, checkpoint, max_memory={}, progress=False)
    assert_right(model, reference)


# ---------------------------------------------------------------- writes


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_home_that_is_edited_during_a_forward_that_writes_itself_is_seen_by_the_next(
    tier: str, tmp_path: Path
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.a.mul_(0.5)
            return x @ self.a + x @ self.b

    def three() -> nn.Module:
        return nn.Sequential(Writes(), Writes(), Writes())

    reference = aligned(three())
    model = loaded(three, save_checkpoint(reference, tmp_path), tier)
    outputs = []
    for net in (model, reference):
        held = dict(net.named_parameters())  # as an optimizer holds them

        def edit(*_: Any, weight: torch.Tensor = held["0.b"]) -> None:
            weight.mul_(3)

        handle = net.get_submodule("0").register_forward_hook(edit)
        with torch.no_grad():
            net(torch.ones(1, 8))
            handle.remove()
            outputs.append(net(torch.ones(1, 8)))
    assert torch.equal(*outputs)


# ---------------------------------------------------------------- nothing is left over


def pages() -> int:
    """How many pieces of page-aligned memory are alive."""
    for _ in range(2):  # what a cycle's finalizers let go of is free at the second
        gc.collect()
    return sum(type(thing) is HostPages for thing in gc.get_objects())


def held() -> tuple[int, int, int]:
    """Pieces of memory, descriptors and threads that this process holds."""
    return pages(), len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208  # closed at once


@pytest.fixture
def frozen() -> Iterator[None]:
    """What was there before is left out of collections: there are millions of objects, and many collections here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _forward(model: nn.Module, disk: Disk) -> None:
    run(model)


def _backward(model: nn.Module, disk: Disk) -> None:
    model(IDS).sum().backward()


def _forward_with_gradients(model: nn.Module, disk: Disk) -> None:
    """As many people compute who want no gradients."""
    model(IDS)


def _failed_forward(model: nn.Module, disk: Disk) -> None:
    disk.before = failing
    with pytest.raises(CheckpointReadError):
        run(model)
    disk.before = lambda offset: None


def failing(offset: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _never_run(model: nn.Module, disk: Disk) -> None:
    pass


def _block_only(model: nn.Module, disk: Disk) -> None:
    """Ends with prefetches on their way."""
    disk.before = lambda offset: time.sleep(0.002)
    block = model.get_submodule("blocks.0")
    with torch.no_grad():
        block(torch.randn(1, 32, dtype=block.get_parameter("up.weight").dtype))
    disk.before = lambda offset: None


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    "use", [_forward, _forward_with_gradients, _backward, _failed_forward, _never_run, _block_only]
)
@pytest.mark.parametrize("tier", ["disk", "mixed", "cast"])
def test_cycles_of_load_use_and_delete_leave_no_thread_descriptor_or_memory(
    use: Callable[[nn.Module, Disk], None], tier: str, checkpoint: Path, tmp_path: Path, disk: Disk
) -> None:
    seen = []
    for _ in range(6):
        if tier == "cast":
            model = load_cast(skeleton(), checkpoint, tmp_path / "offload")
        else:
            model = loaded(build, checkpoint, tier)
        use(model, disk)
        del model
        drain()
        seen.append(held())
    assert len(set(seen[2:])) == 1, seen
    assert not (tmp_path / "offload").exists() or list((tmp_path / "offload").iterdir()) == []


@pytest.mark.usefixtures("frozen")
def test_thirty_models_one_after_the_other_leave_nothing(checkpoint: Path, reference: nn.Module) -> None:
    seen = []
    for _ in range(30):
        model = loaded(build, checkpoint, "disk")
        assert_right(model, reference)
        del model
        drain()
        seen.append(held())
    assert len(set(seen[2:])) == 1, seen


@pytest.mark.usefixtures("frozen")
def test_failed_loads_leave_nothing(checkpoint: Path, tmp_path: Path, disk: Disk) -> None:
    disk.before = failing
    seen = []
    for _ in range(10):
        with pytest.raises(CheckpointReadError):
            overspill.load(skeleton(), checkpoint, max_memory={"cpu": "1GiB"}, progress=False)
        with pytest.raises(CheckpointReadError):
            load_cast(skeleton(), checkpoint, tmp_path / "offload")
        drain()
        seen.append(held())
    assert len(set(seen[2:])) == 1, seen


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("tier", ["cpu", "disk", "mixed"])
def test_a_forward_with_gradients_that_nobody_uses_leaves_no_tensor(tier: str, checkpoint: Path) -> None:
    model = loaded(build, checkpoint, tier)
    seen = []
    for _ in range(6):
        model(IDS)
        assert_idle(model)  # what was fetched ahead is some more tensors, or some less
        gc.collect()
        seen.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(set(seen[2:])) == 1, seen


@pytest.mark.usefixtures("frozen")
def test_a_model_deleted_in_the_middle_of_a_prefetch_leaves_no_error(
    checkpoint: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    failed: list[BaseException] = []
    read = FileReader.read

    def noting(self: FileReader, *args: Any) -> None:
        try:
            read(self, *args)
        except BaseException as error:
            failed.append(error)
            raise

    monkeypatch.setattr(FileReader, "read", noting)
    before = pages()
    go_on, reading = threading.Event(), threading.Semaphore(0)
    model = loaded(build, checkpoint, "disk")
    first = {offset_of(name, checkpoint) for name in open_checkpoint(checkpoint) if name.startswith("blocks.0.")}

    def hang(offset: int) -> None:
        if offset not in first:
            reading.release()
            go_on.wait(timeout=30)

    disk.before = hang
    with torch.no_grad():
        model.get_submodule("blocks.0")(torch.randn(1, 32))
    assert reading.acquire(timeout=30)
    del model
    alive = pages()
    go_on.set()
    drain()
    assert alive > before, "the memory was given back while a read was on its way into it"
    assert errors == []
    assert failed == []
    assert pages() == before


# ---------------------------------------------------------------- what outlives its model, and its process


def test_an_output_that_is_a_weight_outlives_its_model(tmp_path: Path) -> None:
    program = f"""
        import gc, torch
        from pathlib import Path
        from support import loaded, save_checkpoint
        from torch import nn

        class Returns(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(512, 512))

            def forward(self, kept):
                return [*kept, self.weight]

        class Collects(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Returns() for _ in range(2))

            def forward(self):
                kept = []
                for block in self.blocks:
                    kept = block(kept)
                return kept

        reference = Collects()
        model = loaded(Collects, save_checkpoint(reference, Path({str(tmp_path)!r})), "disk")
        with torch.no_grad():
            kept = model()
        del model
        gc.collect()
        for ours, theirs in zip(kept, reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    """
    run_program(program)


IN_CHILD = """
    import faulthandler, os, sys, torch

    def in_child(work):
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(10, exit=True)
            try:
                work()
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1]
"""

FORKS = """
    from pathlib import Path
    from support import Net, aligned, loaded, save_checkpoint

    torch.manual_seed(0)
    ids, x = torch.arange(24).view(2, 12), torch.randn(2, 32)
    reference = aligned(Net(blocks=6)).eval()
    model = loaded(lambda: Net(blocks=6), save_checkpoint(reference, Path(FOLDER)), TIER)
    torch.set_grad_enabled(False)
    assert torch.equal(model(ids), reference(ids))
"""


def run_forks(program: str, folder: Path, tier: str) -> None:
    head = textwrap.dedent(IN_CHILD + FORKS).replace("FOLDER", repr(str(folder))).replace("TIER", repr(tier))
    run_program(head + textwrap.dedent(program))


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_forked_child_computes_without_disturbing_its_parent(tier: str, tmp_path: Path) -> None:
    program = """
        def backwards():
            for index in (5, 3, 1, 4, 2, 0, 5):
                assert torch.equal(model.blocks[index](x), reference.blocks[index](x)), f"the child's block {index}"

        for _ in range(5):
            assert in_child(backwards) == 0
            assert torch.equal(model(ids), reference(ids)), "the child wrote to its parent's window"
    """
    run_forks(program, tmp_path, tier)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_forked_childs_edits_are_its_own(tier: str, tmp_path: Path) -> None:
    program = """
        def edit():
            model.blocks[0].up.weight.zero_()
            model.blocks[0].shift.zero_()

        assert in_child(edit) == 0
        assert torch.equal(model.blocks[0].up.weight.clone(), reference.blocks[0].up.weight)
        assert torch.equal(model(ids), reference(ids))
    """
    run_forks(program, tmp_path, tier)


def test_a_forked_childs_edits_of_trained_weights_on_disk_are_its_own() -> None:
    program = """
        import overspill
        from torch import nn

        def make():
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

        reference, model, x = make(), make(), torch.randn(8, 64)
        overspill.offload_training(model, weights="disk", activations=False)
        before = model(x).detach()

        def edit():
            with torch.no_grad():
                for net in (model, reference):
                    net[0][0].weight.mul_(2)
            assert not torch.equal(model(x), before)
            assert torch.equal(model(x), reference(x)), "the child does not compute with its own edits"

        assert in_child(edit) == 0
        assert torch.equal(model[0][0].weight, reference[0][0].weight)
        assert torch.equal(model(x), before)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        optimizer.step()
        assert not torch.equal(model(x), before)
        assert not torch.equal(model[0][0].weight, reference[0][0].weight)
    """
    run_program(textwrap.dedent(IN_CHILD) + textwrap.dedent(program))


def test_a_forked_child_does_not_disturb_what_its_parent_saved_on_disk() -> None:
    program = """
        from overspill.errors import StateError
        from overspill.training.activations import Activations, Limits

        activations = Activations(torch.device("cpu"), Limits(small=0, held=0, ahead=0), to_disk=True)
        with activations.saving():
            saved = [value.requires_grad_() for value in torch.randn(4, 64, 64).unbind()]
            results = [(value.exp() * 2).tanh() for value in saved]

            def train():
                for _ in range(3):
                    mine = torch.randn(64, 64, requires_grad=True)
                    loss = (mine.exp() * 2).tanh().sum()
                    loss.backward()
                    assert torch.equal(mine.grad, expected(mine))
                try:
                    results[0].sum().backward()
                except StateError as error:
                    assert "forked between a forward and its backward" in str(error)
                else:
                    raise AssertionError("what the parent saved may be gone")

            def expected(value):
                again = value.detach().requires_grad_()
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    (again.exp() * 2).tanh().sum().backward()
                return again.grad

            assert in_child(train) == 0
        for value, result in zip(saved, results, strict=True):
            result.sum().backward()
            assert torch.equal(value.grad, expected(value))
    """
    run_program(textwrap.dedent(IN_CHILD) + textwrap.dedent(program))


def test_a_child_forked_while_a_prefetch_is_on_its_way_does_not_wait_for_it(tmp_path: Path) -> None:
    program = """
        import threading
        from overspill.checkpoint.reader import FileReader

        read, parent, reading = FileReader.read, os.getpid(), threading.Event()

        def slow(self, *args):
            if os.getpid() == parent:
                reading.set()
                threading.Event().wait(0.5)
            read(self, *args)

        for residency in model._overspill.residencies:
            for unit in residency._units:
                unit.drop()
        FileReader.read = slow
        model.blocks[0](x)
        assert reading.wait(10)

        def whole():
            assert torch.equal(model(ids), reference(ids)), "the child's output"

        assert in_child(whole) == 0, "the child failed, or waited in vain"
        FileReader.read = read
        assert torch.equal(model(ids), reference(ids))
    """
    run_forks(program, tmp_path, "disk")


def test_a_program_that_ends_while_reads_are_under_way_ends_well(checkpoint: Path) -> None:
    run_program(f"""
        import os, sys, time, torch
        from pathlib import Path
        from support import Net, loaded

        for _ in range(6):  # without an orderly end, one in ten aborted
            child = os.fork()  # which ends as a program does, and need not import torch first
            if child == 0:
                break
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"a program ended with status {{status}}")
        else:
            sys.exit()

        preadv = os.preadv
        os.preadv = lambda *args: (time.sleep(0.002), preadv(*args))[1]
        model = loaded(lambda: Net(blocks={BLOCKS}), Path({str(checkpoint)!r}), "disk")
        with torch.no_grad():
            model(torch.arange(4))
    """)

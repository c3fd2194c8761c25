"""Units that are computed with where they lie in the page cache: the same bits, no copy, and no file changes meanwhile.

That the rest of the contract holds of them too is shown in test_contract.py, test_offload.py and others, which run with
the fixture `mapped`.
"""

import errno
import fcntl
import itertools
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overspill
import support
from overspill import mapping
from overspill.checkpoint import lease, pagecache
from overspill.checkpoint.index import FileSpan, SourceFile
from overspill.checkpoint.lease import Lease
from overspill.checkpoint.reader import FileReader
from overspill.config import KIB
from overspill.errors import CheckpointChangedError, CheckpointReadError
from overspill.mapping import MappedSlab, Mapping
from overspill.residency import Residency
from overspill.slab import Slab
from overspill.streamed import StreamedUnit
from overspill.tensors import TensorSpec
from support import Net, aligned, loaded, run, run_at_once, run_program, save_checkpoint, streamed_units

IDS = torch.arange(24).view(2, 12)
COUNTS_AS_MEMORY = mapping._counts_as_memory  # which the fixture `mapped` replaces

pytestmark = [
    pytest.mark.usefixtures("mapped"),
    pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="leases are Linux's"),
]


@pytest.fixture
def reference() -> Net:
    return aligned(Net()).eval()  # type: ignore[return-value]


@pytest.fixture
def file(reference: Net, tmp_path: Path) -> Path:
    return save_checkpoint(reference, tmp_path / "checkpoint")


@pytest.fixture
def model(file: Path) -> Net:
    return loaded(Net, file, "disk")  # type: ignore[return-value]


def is_mapped(model: nn.Module) -> bool:
    """Whether all units have slabs that show files; False if none does."""
    found = {unit.mapped is not None for unit in streamed_units(model) if unit.slab is not None}
    assert len(found) == 1, "some are and some are not"
    return found.pop()


def infer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(IDS)
        return output


def during(model: Net, act: Callable[[], object]) -> torch.Tensor:
    """What the model gives if `act` takes place in the midst of its second block."""

    def act_once(*_: object) -> None:
        hook.remove()  # calls of other threads come here too
        act()

    hook = model.blocks[1].norm.register_forward_hook(act_once)  # type: ignore[union-attr]
    try:
        return infer(model)
    finally:
        hook.remove()


# ---------------------------------------------------------------- no copy


def test_nothing_large_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the sizes that are used in earnest
    monkeypatch.setattr(mapping, "_counts_as_memory", lambda: False)
    copied: Counter[str] = Counter()
    read = FileReader.read

    def counting(self: FileReader, source: SourceFile, offset: int, target: memoryview) -> None:
        copied["bytes"] += len(target)
        read(self, source, offset, target)

    reference = aligned(Net(width=512)).eval()
    overspill.save(reference, tmp_path / "checkpoint", progress=False)
    model = loaded(lambda: Net(width=512), tmp_path / "checkpoint", "disk")
    monkeypatch.setattr(FileReader, "read", counting)
    for _ in range(3):
        assert torch.equal(infer(model), run(reference, IDS))
    assert is_mapped(model)
    assert copied["bytes"] < 0.02 * sum(unit.nbytes for unit in streamed_units(model))


def test_the_report_tells_of_it(model: Net) -> None:
    assert "page cache" not in str(overspill.report(model))
    infer(model)
    report = overspill.report(model)
    assert report.mapped == sum(unit.nbytes for unit in streamed_units(model))
    assert "are computed with in the page cache" in str(report)


def test_what_is_too_little_aligned_is_copied(
    reference: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: Counter[str]
) -> None:
    monkeypatch.setattr(support, "DATA_STARTS_AT", 8)
    model = loaded(Net, save_checkpoint(reference, tmp_path), "disk")
    assert torch.equal(infer(model), run(reference, IDS))
    assert moved["disk"] > 0
    assert not is_mapped(model)


def test_small_units_are_copied(model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_WORTH_A_RUN", 1 << 20)
    assert torch.equal(infer(model), run(reference, IDS))
    assert not is_mapped(model)


@pytest.mark.parametrize("what", ["lease", "system", "room", "mmap"])
def test_where_mapping_is_not_to_be_had_units_are_copied(
    model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no")

    if what == "lease":
        monkeypatch.setattr(Lease, "take", lambda *_: None)
    elif what == "system":
        monkeypatch.setattr(pagecache, "can_show", lambda: False)
    elif what == "room":
        monkeypatch.setattr(mapping, "_most_runs", lambda: -1)
    else:
        monkeypatch.setattr(pagecache, "show", fails)
    for _ in range(2):
        assert torch.equal(infer(model), run(reference, IDS))
    assert not is_mapped(model)


@pytest.mark.parametrize("what", ["nothing", "address space", "data", "all memory"])
def test_where_address_space_is_limited_units_are_copied(
    model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    limits = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}

    def limited(limit: int) -> tuple[int, int]:
        return (1 << 40 if limit == limits.get(what) else resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    monkeypatch.setattr(mapping, "_counts_as_memory", COUNTS_AS_MEMORY)
    monkeypatch.setattr(resource, "getrlimit", limited)
    monkeypatch.setattr(Path, "read_text", lambda path: "2\n" if what == "all memory" else "65530\n")
    assert torch.equal(infer(model), run(reference, IDS))
    assert is_mapped(model) == (what == "nothing")


@pytest.mark.parametrize("refused", [fcntl.F_SETLEASE, fcntl.F_SETSIG])
def test_a_refused_lease_leaves_no_file_open(
    model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    real = fcntl.fcntl

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == refused:
            raise OSError(errno.EACCES, "not your file")
        return real(descriptor, command, argument)

    infer(model)  # the checkpoint itself stays open
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(lease.fcntl, "fcntl", refusing)
    assert torch.equal(infer(model), run(reference, IDS))
    assert not is_mapped(model)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---------------------------------------------------------------- edits


def test_an_edit_reaches_the_model_and_not_the_file(model: Net, reference: Net, file: Path) -> None:
    before = file.read_bytes()
    infer(model)
    for net in (model, reference):
        with torch.no_grad():
            net.blocks[1].up.weight.mul_(2)  # type: ignore[union-attr, operator]
            net.blocks[2].down.weight.data[3] = 7  # type: ignore[union-attr, index]
    for _ in range(2):
        assert torch.equal(infer(model), run(reference, IDS))
    assert file.read_bytes() == before


def test_what_a_forward_writes_reaches_the_model_and_not_the_file(model: Net, reference: Net, file: Path) -> None:
    before = file.read_bytes()

    def write(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.shift.add_(1)  # type: ignore[operator, union-attr]
            module.up.weight.mul_(0.5)  # type: ignore[operator, union-attr]

    for net in (model, reference):
        net.blocks[1].register_forward_pre_hook(write)
    infer(model), run(reference, IDS)
    for _ in range(2):
        assert torch.equal(infer(model), run(reference, IDS))
    assert torch.equal(model.blocks[1].up.weight.detach(), reference.blocks[1].up.weight)  # type: ignore[union-attr]
    assert file.read_bytes() == before


def test_a_model_that_is_saved_over_its_source_is_computed_from_the_new_files(model: Net, reference: Net) -> None:
    infer(model)
    folder = Path(str(next(iter(streamed_units(model)[0].store.files())).path)).parent
    overspill.save(model, folder, progress=False)
    assert torch.equal(infer(model), run(reference, IDS))
    shown = {run.file for unit in streamed_units(model) if unit.mapped is not None for run in unit.mapped.mapping.runs}
    assert shown == {SourceFile.at(folder / "model.safetensors")}


# ---------------------------------------------------------------- gradients


def test_with_gradients_a_unit_is_copied_and_then_mapped_again(model: Net, reference: Net) -> None:
    for _ in range(2):
        assert torch.equal(infer(model), run(reference, IDS))
        model(IDS).square().mean().backward()
        run(reference, IDS).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    for unit in streamed_units(model):
        unit.drop()
    infer(model)
    assert is_mapped(model)


def test_a_call_with_gradients_may_come_while_another_is_under_way_without(model: Net, reference: Net) -> None:
    with torch.no_grad():
        expected = run(reference, IDS)

    def train() -> None:
        with torch.enable_grad():
            model.blocks[1](torch.ones(2, 32)).square().sum().backward()

    def in_thread() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    assert torch.equal(during(model, in_thread), expected)
    reference.blocks[1](torch.ones(2, 32)).square().sum().backward()
    assert torch.equal(model.blocks[1].up.weight.grad, reference.blocks[1].up.weight.grad)  # type: ignore[union-attr, arg-type]
    assert torch.equal(infer(model), expected)


# ---------------------------------------------------------------- files that others write to


def opened_for_writing(file: Path) -> bool:
    """Whether the file can be opened for writing now, without waiting."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


def test_whoever_writes_waits_while_a_unit_computes_and_no_longer(model: Net, reference: Net, file: Path) -> None:
    found: list[bool] = []
    assert torch.equal(during(model, lambda: found.append(opened_for_writing(file))), run(reference, IDS))
    assert found == [False]
    assert opened_for_writing(file)
    assert torch.equal(infer(model), run(reference, IDS))


@pytest.mark.parametrize("how", ["truncate", "write"])
def test_a_file_that_is_changed_in_the_midst_of_a_call_changes_behind_it(
    model: Net, reference: Net, file: Path, how: str
) -> None:
    threads: list[threading.Thread] = []

    def change() -> None:
        if how == "truncate":
            os.truncate(file, 100)
            return
        with file.open("r+b") as opened:
            opened.seek(-4096, os.SEEK_END)
            opened.write(bytes(4096))

    def begin() -> None:
        threads.append(threading.Thread(target=change))
        threads[-1].start()
        threads[-1].join(0.2)

    hook = model.blocks[1].norm.register_forward_hook(lambda *_: begin())  # type: ignore[union-attr]
    with torch.no_grad():
        output = model.blocks[1](torch.ones(2, 32))
        expected = reference.blocks[1](torch.ones(2, 32))
    hook.remove()
    threads[0].join(60)
    assert torch.equal(output, expected)
    with pytest.raises(CheckpointChangedError, match=r"model\.safetensors changed after it was opened"):
        infer(model)


def test_a_file_that_is_shortened_between_two_calls_is_an_error_and_no_signal(tmp_path: Path) -> None:
    printed = run_program(f"""
        import os, pytest, torch, support
        from pathlib import Path
        from overspill.errors import CheckpointChangedError
        from support import Net, loaded, save_checkpoint, streamed_units

        support.map_everything(pytest.MonkeyPatch())
        file = save_checkpoint(Net().eval(), Path({str(tmp_path)!r}))
        model = loaded(Net, file, "disk")
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
            assert all(unit.mapped for unit in streamed_units(model))
            os.truncate(file, 100)
            for _ in range(2):
                try:
                    model(torch.zeros(1, 3, dtype=torch.long))
                except CheckpointChangedError as error:
                    print("told:", error)
        """)
    assert printed.count("told:") == 2


def test_while_somebody_has_the_file_open_for_writing_units_are_copied(model: Net, reference: Net, file: Path) -> None:
    with file.open("r+b"):
        assert torch.equal(infer(model), run(reference, IDS))
        assert not is_mapped(model)
    for unit in streamed_units(model):
        unit.drop()
    assert torch.equal(infer(model), run(reference, IDS))
    assert is_mapped(model)


def test_a_lease_that_the_kernel_took_is_told_of_at_the_end_of_the_call(
    model: Net, reference: Net, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def without_leases(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            return 0
        return fcntl.F_UNLCK if command == fcntl.F_GETLEASE else real(descriptor, command, argument)

    def change() -> None:
        status = file.stat()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    monkeypatch.setattr(lease.fcntl, "fcntl", without_leases)
    assert torch.equal(infer(model), run(reference, IDS))
    model.blocks[1].norm.register_forward_hook(lambda *_: change())  # type: ignore[union-attr]
    with pytest.raises(CheckpointChangedError, match="it was written to"), torch.no_grad():
        model.blocks[1](torch.ones(2, 32))  # nothing else is fetched behind it that would find out


def test_a_file_that_is_written_to_between_two_calls_is_an_error_though_all_its_pages_are_there(
    model: Net, file: Path
) -> None:
    infer(model)
    infer(model)
    with file.open("r+b") as opened:
        opened.seek(-4096, os.SEEK_END)
        opened.write(bytes(4096))
    for _ in range(2):
        with pytest.raises(CheckpointChangedError, match="it was written to"):
            infer(model)


def test_two_calls_of_a_unit_share_its_pages_and_its_lease(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(MappedSlab, "make_own", made.append)
    shown: list[tuple[int, int]] = []

    def join() -> None:
        (slab,) = [unit.mapped for unit in streamed_units(model) if unit.name == "blocks.1"]
        assert slab is not None
        leases = len(slab._leases)
        with torch.no_grad():
            model.blocks[1](torch.ones(2, 32))
        shown.append((leases, len(slab._leases)))

    def in_thread() -> None:
        thread = threading.Thread(target=join)
        thread.start()
        thread.join()

    during(model, in_thread)
    assert made == []
    assert shown == [(1, 1)]


def test_a_second_call_does_not_join_a_lease_that_is_being_broken(model: Net, reference: Net, file: Path) -> None:
    outputs: list[torch.Tensor] = []
    found: list[bool] = []

    def join() -> None:
        with torch.no_grad():
            outputs.append(model.blocks[1](torch.ones(2, 32)))

    def break_and_join() -> None:
        assert not opened_for_writing(file)  # from now on the kernel wants the lease back
        thread = threading.Thread(target=join)
        thread.start()
        thread.join()
        found.append(opened_for_writing(file))  # both go on with a copy

    assert torch.equal(during(model, break_and_join), run(reference, IDS))
    with torch.no_grad():
        assert torch.equal(outputs[0], reference.blocks[1](torch.ones(2, 32)))
    assert found == [True]
    assert torch.equal(infer(model), run(reference, IDS))


# ---------------------------------------------------------------- what outlives a call


class Leaks(Net):
    """Keeps what its second block computed with: a view, the parameter itself, or a view in a view's place."""

    how = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hook = self.blocks[1].register_forward_hook(self._keep)
        try:
            return super().forward(ids)
        finally:
            hook.remove()

    def _keep(self, block: nn.Module, *_: Any) -> None:
        weight: torch.Tensor = block.up.weight  # type: ignore[union-attr, assignment]
        self.kept = {"view": lambda: weight[3:5], "parameter": lambda: weight, "detached": weight.detach}[self.how]()


def test_what_outlives_the_call_stays_when_the_file_is_shortened(tmp_path: Path) -> None:
    printed = run_program(f"""
        import os, pytest, torch, support
        from pathlib import Path
        from support import Net, loaded, save_checkpoint, streamed_units

        support.map_everything(pytest.MonkeyPatch())
        reference = Net().eval()
        file = save_checkpoint(reference, Path({str(tmp_path)!r}))
        model = loaded(Net, file, "disk")
        kept = []
        model.blocks[1].register_forward_hook(lambda block, *_: kept.append(block.up.weight))
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        os.truncate(file, 100)
        print(torch.equal(kept[0], reference.blocks[1].up.weight))
        """)
    assert printed == "True\n"


@pytest.mark.parametrize("how", ["view", "parameter", "detached"])
def test_what_outlives_the_call_depends_on_no_file(file: Path, reference: Net, how: str) -> None:
    model = loaded(Leaks, file, "disk")
    model.how = how
    infer(model)
    expected = reference.blocks[1].up.weight[3:5] if how == "view" else reference.blocks[1].up.weight  # type: ignore[union-attr, index]
    (unit,) = [unit for unit in streamed_units(model) if unit.name == "blocks.1"]
    # A copy that no window counts is kept by nobody else.
    assert unit.slab is None or unit.slab.memory.untyped_storage()._cdata != model.kept.untyped_storage()._cdata
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(model.kept, expected)


def test_what_nobody_keeps_is_not_copied(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(MappedSlab, "make_own", made.append)
    for _ in range(3):
        infer(model)
    assert made == []


# ---------------------------------------------------------------- faults


@pytest.fixture
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pages cannot be brought in while this holds True."""
    failing = [False]
    bring_in = pagecache.bring_in

    def failing_bring_in(address: int, nbytes: int) -> None:
        if failing[0]:
            raise OSError(errno.EFAULT, "Bad address")
        bring_in(address, nbytes)

    monkeypatch.setattr(pagecache, "bring_in", failing_bring_in)
    monkeypatch.setattr(pagecache, "are_in_memory", lambda *_: not failing[0])
    return failing


def test_pages_that_cannot_be_read_are_an_error_and_the_next_call_works(
    model: Net, reference: Net, failing_disk: list[bool], file: Path
) -> None:
    infer(model)
    failing_disk[0] = True
    for _ in range(2):
        with pytest.raises(CheckpointReadError, match=rf"{file}.*Check the disk"):
            infer(model)
    assert opened_for_writing(file), "a lease is left"
    failing_disk[0] = False
    assert torch.equal(infer(model), run(reference, IDS))
    assert is_mapped(model)


def test_no_memory_for_what_outlives_the_call_is_an_error(
    file: Path, reference: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model = loaded(Leaks, file, "disk")
    model.how = "view"
    with monkeypatch.context() as patch:
        patch.setattr(pagecache, "make_own", fails)
        with pytest.raises(CheckpointReadError, match="Free some memory"):
            infer(model)
    assert opened_for_writing(file), "a lease is left"
    assert torch.equal(infer(model), run(reference, IDS))


def test_an_interrupt_leaves_no_lease(model: Net, reference: Net, file: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        during(model, interrupt)
    assert opened_for_writing(file)
    assert torch.equal(infer(model), run(reference, IDS))


def test_a_forked_child_computes_too(tmp_path: Path) -> None:
    printed = run_program(f"""
        import os, pytest, torch, support
        from pathlib import Path
        from support import Net, loaded, run, save_checkpoint, aligned, streamed_units

        support.map_everything(pytest.MonkeyPatch())
        reference = aligned(Net()).eval()
        model = loaded(Net, save_checkpoint(reference, Path({str(tmp_path)!r})), "disk")
        ids = torch.zeros(1, 3, dtype=torch.long)
        with torch.no_grad():
            model(ids)
            child = os.fork()
            same = torch.equal(model(ids), run(reference, ids))
            assert all(unit.mapped for unit in streamed_units(model))
            os.write(1, f"{{'child' if child == 0 else 'parent'}} {{same}}\\n".encode())
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        """)
    assert sorted(printed.split("\n")[:2]) == ["child True", "parent True"]


# ---------------------------------------------------------------- several threads, forks and interrupts


def test_models_that_are_first_used_at_the_same_time_do_not_disturb_each_other(file: Path) -> None:
    source = SourceFile.at(file)
    whole = Mapping.of([TensorSpec((source.size,), torch.uint8)], [[FileSpan(source, 0, source.size)]])
    assert whole is not None
    before = set(mapping._runs_shown)

    def make_some() -> None:
        reader = FileReader()
        for _ in range(4):
            assert None not in [MappedSlab.of(whole, reader) for _ in range(300)]

    run_at_once([make_some] * 3)
    assert set(mapping._runs_shown) <= before, "what is gone counts for ever"


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_unit_that_another_thread_maps_while_this_one_waits_for_room_is_not_used_without_a_lease(
    model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch, with_grad: bool
) -> None:
    take, hold = Residency._take, MappedSlab.hold
    refused: list[MappedSlab] = []
    unit = streamed_units(model)[0]  # nothing is in front of it, so nobody fetches it ahead
    unguarded: list[bool] = []

    def take_slowly(self: Residency, unit: StreamedUnit, *, may_wait: bool) -> Slab:
        slab = take(self, unit, may_wait=may_wait)
        self._prefetch_mapped(unit)
        return slab

    def hold_later(self: MappedSlab) -> bool:
        refused.append(self)
        return len(refused) > 1 and hold(self)

    monkeypatch.setattr(Residency, "_take", take_slowly)
    if not with_grad:
        monkeypatch.setattr(MappedSlab, "hold", hold_later)
    model.blocks[0].norm.register_forward_hook(  # type: ignore[union-attr]
        lambda *_: unguarded.append(unit.mapped is not None and (with_grad or not unit.mapped.is_held))
    )
    with torch.set_grad_enabled(with_grad):
        assert torch.equal(model(IDS), run(reference, IDS))
    assert unguarded == [False]


def test_each_call_without_gradients_in_the_midst_of_a_backward_has_its_lease(model: Net, reference: Net) -> None:
    hidden = torch.randn(2, 12, reference.blocks[1].norm.weight.numel())
    unit = next(unit for unit in streamed_units(model) if unit.name == "blocks.1")
    outputs, guarded = list[torch.Tensor](), list[bool]()

    def call(_: torch.Tensor) -> None:
        with torch.no_grad():
            outputs.extend(model.blocks[1](hidden) for _ in range(2))

    model.blocks[1].norm.register_forward_hook(lambda *_: guarded.append(unit.mapped is None or unit.mapped.is_held))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(call)
    x.backward()
    with torch.no_grad():
        expected = reference.blocks[1](hidden)
    assert all(torch.equal(output, expected) for output in outputs)
    assert guarded == [True, True]


def test_a_call_with_gradients_takes_nothing_from_pages_that_nobody_guards(model: Net, reference: Net) -> None:
    infer(model)
    unit = streamed_units(model)[-1]
    assert unit.mapped is not None
    unit.users += 1  # a call of another thread, that waits for the room that another unit of its module takes
    model(IDS).square().mean().backward()
    unit.users -= 1
    run(reference, IDS).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_backward_that_outlasts_a_call_keeps_no_lease_of_it(
    model: Net, reference: Net, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for = Residency._wait_for
    is_lent, go_on = threading.Event(), threading.Event()

    def wait_longer(self: Residency, what: str, units: Sequence[StreamedUnit]) -> None:
        wait_for(self, what, units)
        if threading.current_thread() is backward:
            is_lent.set()
            go_on.wait(60)

    def begin() -> None:
        backward.start()
        assert is_lent.wait(60)

    loss = model.blocks[1](torch.ones(2, 32)).square().sum()
    for unit in streamed_units(model):
        unit.drop()
    backward = threading.Thread(target=loss.backward)
    monkeypatch.setattr(Residency, "_wait_for", wait_longer)
    try:
        assert torch.equal(during(model, begin), run(reference, IDS))
        assert opened_for_writing(file), "a lease is left"
    finally:
        go_on.set()
        backward.join()
    assert not any(isinstance(unit.slab, MappedSlab) and unit.slab.is_own for unit in streamed_units(model))
    reference.blocks[1](torch.ones(2, 32)).square().sum().backward()
    assert torch.equal(model.blocks[1].up.weight.grad, reference.blocks[1].up.weight.grad)  # type: ignore[union-attr, arg-type]


def test_threads_go_on_right_while_files_are_opened_and_stop_with_an_error_once_they_are_shortened(
    tmp_path: Path,
) -> None:
    printed = run_program(f"""
        import logging, os, pytest, threading, time, torch, support
        from collections import Counter
        from pathlib import Path
        from overspill.errors import CheckpointChangedError
        from support import Net, loaded, run, save_checkpoint, aligned

        logging.disable()  # calls with gradients take more room than the window has
        support.map_everything(pytest.MonkeyPatch())
        torch.set_num_threads(1)
        reference = aligned(Net()).eval()
        ids = torch.arange(12).view(1, 12)
        expected = run(reference, ids).detach()
        seen = Counter()

        def call(model, phase, with_grad):
            torch.set_grad_enabled(with_grad)
            while phase[0] < 2:
                try:
                    output = model(ids)
                    if with_grad:
                        output.sum().backward()
                    seen["right" if torch.equal(output, expected) else "wrong"] += 1
                except CheckpointChangedError:
                    seen["told" if phase[0] else "too early"] += 1
                except BaseException as error:
                    seen[repr(error)] += 1

        for attempt in range(4):
            file = save_checkpoint(reference, Path({str(tmp_path)!r}) / str(attempt))
            model = loaded(Net, file, "disk")
            phase, kinds = [0], (False, False, True)
            threads = [threading.Thread(target=call, args=(model, phase, with_grad)) for with_grad in kinds]
            for thread in threads:
                thread.start()
            for _ in range(10):
                time.sleep(0.01)
                os.close(os.open(file, os.O_WRONLY))
            phase[0] = 1
            os.truncate(file, 100)
            time.sleep(0.05)
            phase[0] = 2
            for thread in threads:
                thread.join()
        print(sorted(seen))
        """)
    assert printed == "['right', 'told']\n"


def test_a_fork_in_the_midst_of_a_call_ends_no_lease_of_the_parent(tmp_path: Path) -> None:
    printed = run_program(f"""
        import os, pytest, torch, support
        from pathlib import Path
        from support import Net, loaded, run, save_checkpoint, aligned, streamed_units

        support.map_everything(pytest.MonkeyPatch())
        reference = aligned(Net()).eval()
        file = save_checkpoint(reference, Path({str(tmp_path)!r}))
        model = loaded(Net, file, "disk")
        ids = torch.zeros(1, 3, dtype=torch.long)
        children = []

        def is_guarded():
            try:
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
            except BlockingIOError:
                return True
            return False

        def fork(*_):
            hook.remove()
            children.append(os.fork())
            if children[-1]:
                os.waitpid(children[-1], 0)
                os.write(1, f"parent guarded {{is_guarded()}}\\n".encode())
            else:
                same = torch.equal(model(ids), run(reference, ids))  # a call within the one that goes on
                os.write(1, f"within {{same}}\\n".encode())

        with torch.no_grad():
            hook = model.blocks[1].norm.register_forward_hook(fork)
            same = torch.equal(model(ids), run(reference, ids))
            os.write(1, f"{{'parent' if children[0] else 'child'}} {{same}} left {{is_guarded()}}\\n".encode())
            if not children[0]:
                os._exit(0)
        """)
    # While the child goes on, its parent guards the file.
    assert printed.splitlines() == [
        "within True",
        "child True left True",
        "parent guarded True",
        "parent True left False",
    ]


def test_an_interrupt_before_a_unit_is_fetched_first_leaves_the_model_usable(
    model: Net, reference: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MappedSlab, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            infer(model)
    assert torch.equal(infer(model), run(reference, IDS))


def test_a_lease_that_is_forgotten_ends(file: Path) -> None:
    source, reader = SourceFile.at(file), FileReader()
    taken = Lease.take(source, reader.descriptor(source))
    assert taken is not None
    assert not opened_for_writing(file)
    del taken
    assert opened_for_writing(file)


def test_a_fault_at_the_end_of_a_call_leaves_no_lease(
    model: Net, reference: Net, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamedUnit, "collect_writes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            infer(model)
    assert opened_for_writing(file), "a lease is left"
    assert torch.equal(infer(model), run(reference, IDS))


def test_a_file_cannot_change_while_bringing_it_in_begins(
    model: Net, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = StreamedUnit.start
    guarded: list[bool] = []

    def looking(self: StreamedUnit, slab: Slab, *args: Any) -> None:
        guarded.append(not isinstance(slab, MappedSlab) or not opened_for_writing(file))
        for unit in streamed_units(model):
            if unit.mapped is not None:
                unit.mapped.end_leases()  # the attempt has broken them
        start(self, slab, *args)

    monkeypatch.setattr(StreamedUnit, "start", looking)
    infer(model)
    assert len(guarded) >= 4
    assert all(guarded)


# ---------------------------------------------------------------- the layout


FILE, OTHER = (SourceFile(Path(f"/{name}"), 1 << 30, 0, 0, number) for number, name in enumerate(("a", "b")))


@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([(FILE, 4096, 8192), (FILE, 12288, 4096)], [(FILE, 4096, 12288)]),  # side by side: one run
        ([(FILE, 12288, 4096), (FILE, 4096, 8192)], [(FILE, 4096, 12288)]),
        ([(FILE, 0, 4096), (FILE, 8192, 4096)], [(FILE, 0, 4096), (FILE, 8192, 4096)]),  # a gap
        ([(FILE, 0, 4096), (OTHER, 4096, 4096)], [(FILE, 0, 4096), (OTHER, 4096, 4096)]),
        ([(FILE, 64, 100), (OTHER, 64, 100)], [(FILE, 0, 4096), (OTHER, 0, 4096)]),  # whole pages
        ([(FILE, 4032, 128)], [(FILE, 0, 8192)]),
        ([(FILE, 0, 4096), (FILE, 4100, 4096)], [(FILE, 0, 4096)]),  # too little aligned
        ([(FILE, 0, 64), (FILE, 64, 64), (FILE, 128, 64)], [(FILE, 0, 4096)]),
    ],
)
def test_what_is_mapped_is_whole_pages_in_few_runs(
    spans: list[tuple[SourceFile, int, int]], runs: list[tuple[SourceFile, int, int]]
) -> None:
    specs = [TensorSpec((nbytes,), torch.uint8) for _, _, nbytes in spans]
    found = Mapping.of(specs, [(FileSpan(*span),) for span in spans])
    assert found is not None
    assert [(run.file, run.offset, run.nbytes) for run in found.runs] == runs
    assert all((run.start - run.offset) % mapping._HUGE_PAGE == 0 for run in found.runs)
    ends = [run.start + run.nbytes for run in found.runs]
    assert all(end <= run.start for end, run in zip(ends, found.runs[1:], strict=False))


@pytest.mark.parametrize(
    ("sizes", "worth"), [((256 * KIB,), True), ((256 * KIB - 64,), True), ((252 * KIB,), False), ((), False)]
)
def test_what_is_worth_a_run(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], worth: bool) -> None:
    monkeypatch.undo()
    specs = [TensorSpec((nbytes,), torch.uint8) for nbytes in sizes]
    assert (Mapping.of(specs, [(FileSpan(FILE, 0, nbytes),) for nbytes in sizes]) is not None) == worth


@pytest.mark.parametrize(("copied", "worth"), [(100 * KIB, True), (120 * KIB, False)])
def test_a_unit_is_mapped_if_nine_tenths_of_it_can_be(
    monkeypatch: pytest.MonkeyPatch, copied: int, worth: bool
) -> None:
    monkeypatch.undo()
    specs = [TensorSpec((nbytes,), torch.uint8) for nbytes in (1000 * KIB, copied)]
    spans = [(FileSpan(FILE, 0, 1000 * KIB),), (FileSpan(FILE, 1000 * KIB + 8, copied),)]
    assert (Mapping.of(specs, spans) is not None) == worth


@pytest.mark.parametrize("cached", [True, False])
def test_pages_are_brought_in_piece_by_piece_at_once_if_no_disk_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    brought: list[tuple[int, int, bool]] = []
    bring_in = pagecache.bring_in

    def noting(address: int, nbytes: int) -> None:
        brought.append((address, nbytes, threading.current_thread() is threading.main_thread()))
        bring_in(address, nbytes)

    monkeypatch.setattr(pagecache, "bring_in", noting)
    monkeypatch.setattr(pagecache, "lies_in_page_cache", lambda *_: cached)
    monkeypatch.setattr(mapping, "_CHUNK", 8192)
    model = loaded(lambda: Net(width=64), save_checkpoint(Net(width=64), tmp_path), "disk")
    infer(model)
    slabs = [slab for unit in streamed_units(model) if (slab := unit.mapped) is not None]
    expected = {
        (slab.memory.data_ptr() + run.start + done, min(8192, run.nbytes - done), cached)
        for slab in slabs
        for run in slab.mapping.runs
        for done in range(0, run.nbytes, 8192)
    }
    assert set(brought) == expected
    assert len(expected) > 3
    brought.clear()
    infer(model)
    assert brought == [], "what is in memory was walked through again"


def test_how_much_is_mapped_is_counted_while_the_memory_is_there(model: Net) -> None:
    before = sum(mapping._runs_shown.values())
    infer(model)
    units = streamed_units(model)
    assert sum(mapping._runs_shown.values()) - before == sum(len(u.mapped.mapping.runs) for u in units if u.mapped)
    kept = units[0].slab
    for unit in units:
        unit.drop()
    assert sum(mapping._runs_shown.values()) - before > 0
    del kept
    assert sum(mapping._runs_shown.values()) == before


@given(st.data())
def test_every_tensor_lies_in_the_slab_as_in_its_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 4, 64, 100, 4096, 5000, 8192, 70_000]), min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("files")
    files, spans, expected = [], [], []
    for number in range(2):
        path = folder / f"{number}.bin"
        path.write_bytes(os.urandom(400_000))
        files.append(SourceFile.at(path))
    ends = [data.draw(st.sampled_from([0, 8, 64, 4096])) for _ in files]
    for size in sizes:
        number = data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            ends[number] += data.draw(st.sampled_from([4, 64, 4096]))  # a gap
        parts = [size] if size < 100 or data.draw(st.integers(0, 3)) else [size - 64, 64]
        spans.append(tuple(FileSpan(files[number], ends[number] + sum(parts[:i]), n) for i, n in enumerate(parts) if n))
        expected.append(b"".join(files[number].path.read_bytes()[s.offset : s.offset + s.nbytes] for s in spans[-1]))
        ends[number] += size
    specs = [TensorSpec((size,), torch.uint8) for size in sizes]
    mapping_ = Mapping.of(specs, spans)
    if mapping_ is None:
        could_be = sum(parts[0].nbytes for parts in spans if len(parts) == 1 and parts[0].offset % 64 == 0)
        assert could_be <= 0.01 * sum(sizes)
        return
    slab = MappedSlab.of(mapping_, FileReader())
    assert slab is not None
    offsets = mapping_.layout.offsets
    assert all(offset % 64 == 0 for offset in offsets)
    taken = sorted((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True) if size)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(taken))
    for index, values in enumerate(expected):
        if index not in mapping_.copied:
            start = offsets[index]
            assert bytes(slab.memory[start : start + len(values)].numpy()) == values
            if values:
                assert mapping_.layout.index_at(start + len(values) - 1) == index

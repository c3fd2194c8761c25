"""Threads that do everything at once, with transfers that take their time at random: right bits, and no deadlock."""

import copy
import faulthandler
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from faults.injection import delayed
from faults.test_random_sequences import bits, same, state_of, stored_in
from overspill.checkpoint.reader import FileReader
from overspill.homes import DiskTensor
from overspill.mapping import MappedSlab
from overspill.residency import Residency
from overspill.streamed import StreamedUnit
from overspill.transfer import Transfer
from support import Net, aligned, map_everything, run, run_program
from test_offload_threads import Crew

IDS = torch.arange(24).view(2, 12)
BLOCKS = 5
EDITED = "blocks.4.up.weight"
WATCHED = 60  # seconds after which each thread says where it stands
SOAK_SECONDS = float(os.environ.get("OVERSPILL_SOAK_SECONDS", "600"))


@contextmanager
def shaken(seed: int) -> Iterator[None]:
    """Within, threads meet in orders that they would not find by themselves, and a deadlock shows where it is."""
    chance = random.Random(seed)
    faulthandler.dump_traceback_later(WATCHED, repeat=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (FileReader, "read"),
                (FileReader, "read_aligned"),
                (Transfer, "from_host"),
                (Transfer, "from_disk"),
                (StreamedUnit, "start"),
                (StreamedUnit, "drop"),
                (MappedSlab, "hold"),
                (MappedSlab, "make_own"),
            ):
                patch.setattr(owner, name, delayed(getattr(owner, name), chance, 0.003))
            if seed % 2:
                map_everything(patch)
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Shallow(Net):
    """Given what is between blocks, in place of tokens, it goes through those that nobody edits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return through(self, ids) if ids.is_floating_point() else super().forward(ids)


def through(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for index in range(BLOCKS - 1):
        x = net.get_submodule(f"blocks.{index}")(x)
    return x


class Shared:
    """One model that several threads use at once, and its twin. The lock is for whoever needs both to stand still."""

    def __init__(self, device: str, folder: Path, turns: int) -> None:
        self.twin = aligned(Shallow(blocks=BLOCKS)).eval().to(device)
        self.model = copy.deepcopy(self.twin)
        self.truth = state_of(self.twin)
        self.device, self.folder, self.turns = device, folder, turns
        self.lock = threading.Lock()
        overspill.offload(self.model, to="disk", modules=["embed", "blocks.0", "blocks.4"], min_bytes=0)

    def forward(self) -> None:
        """Blocks that nobody edits, with others than this thread in them and some of them on the move."""
        x = torch.randn(2, 32, device=self.device)
        with torch.no_grad():
            expected = self._through(self.twin, x)
            for _ in range(2 * self.turns):
                assert torch.equal(self._through(self.model, x), expected)

    def edit(self) -> None:
        """Edits, and forwards of all that see them."""
        for turn in range(self.turns):
            with self.lock, torch.no_grad():
                for net in (self.model, self.twin):
                    net.get_parameter(EDITED)[turn % 32].mul_(0.5)
                assert torch.equal(bits(self.model(IDS)), bits(run(self.twin, IDS)))

    def read(self) -> None:
        for _ in range(self.turns):
            for name, value in self.model.state_dict().items():
                if name != EDITED:
                    assert torch.equal(bits(value.detach().clone()), bits(self.truth[name])), name

    def train(self) -> None:
        """Gradients of inputs: those of weights would be added up by several threads."""
        x = torch.randn(2, 32, device=self.device, requires_grad=True)
        (expected,) = torch.autograd.grad(self._through(self.twin, x).square().sum(), x)
        for _ in range(self.turns):
            (found,) = torch.autograd.grad(self._through(self.model, x).square().sum(), x)
            assert torch.equal(found, expected)

    def move(self, part: str) -> None:
        for turn in range(self.turns):
            overspill.offload(self.model, to="disk", modules=[part], folder=self.folder / "offload", min_bytes=0)
            overspill.restore(self.model, modules=[part], delete=turn % 2 == 0)

    def save(self) -> None:
        target = self.folder / "saved"
        for turn in range(max(self.turns // 3, 1)):
            with self.lock:
                overspill.save(self.model, target, max_shard_size=(6000, "1GB")[turn % 2], progress=False)
                assert same(stored_in(target), state_of(self.twin))

    def _through(self, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Block by block where each may be at home or not. A GPU has to have its blocks: only calls of models wait."""
        result: torch.Tensor = through(net, x) if self.device == "cpu" else net(x)
        return result

    def end(self) -> None:
        overspill.restore(self.model, delete=True)
        assert same(state_of(self.model), state_of(self.twin))
        assert all(type(p) is nn.Parameter for p in self.model.parameters())


def all_verbs_on_one_model(seed: int, device: str, folder: Path, turns: int) -> None:
    torch.manual_seed(seed)
    shared, crew = Shared(device, folder, turns), Crew()
    with shaken(seed):
        for work in (shared.forward, shared.forward, shared.edit, shared.read, shared.train, shared.save):
            crew.add(work)
        for part in ("blocks.1", "blocks.2"):
            crew.add(shared.move, part)
        crew.run()
    shared.end()


def all_verbs_on_models_of_their_own(seed: int, device: str, folder: Path, turns: int) -> None:
    """They share the threads that read, and nothing else."""
    torch.manual_seed(seed)
    sources = [aligned(Net(blocks=3)).eval().to(device) for _ in range(3)]
    crew = Crew()

    def work(number: int, twin: nn.Module) -> None:
        model = copy.deepcopy(twin)
        for turn in range(turns):
            overspill.offload(model, to="disk", folder=folder / f"offload {number}", min_bytes=0)
            with torch.no_grad():
                for net in (model, twin):
                    net.get_parameter("blocks.1.down.weight")[turn % 8].add_(number)
                assert torch.equal(bits(model(IDS)), bits(run(twin, IDS))), (number, turn)
            overspill.save(model, folder / f"saved {number}", progress=False)
            assert same(stored_in(folder / f"saved {number}"), state_of(twin)), (number, turn)
            overspill.restore(model, delete=turn % 2 == 0)
            assert same(state_of(model), state_of(twin)), (number, turn)

    with shaken(seed):
        for number, twin in enumerate(sources):
            crew.add(work, number, twin)
        crew.run()


def test_a_forward_that_ends_beside_a_backward_shows_the_homes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = aligned(Net())
    overspill.offload(model, to="disk", min_bytes=0)
    block, x = model.get_submodule("blocks.1"), torch.randn(2, 32, requires_grad=True)
    output, crew = block(x).sum(), Crew()
    inside, go_on, wait_for = threading.Event(), threading.Event(), Residency._wait_for

    def pausing(self: Residency, *args: Any) -> None:
        if threading.current_thread() is backward:
            inside.set()
            assert go_on.wait(WATCHED)
        wait_for(self, *args)

    monkeypatch.setattr(Residency, "_wait_for", pausing)
    backward = crew.add(lambda: output.backward())
    crew._go.set()
    assert inside.wait(WATCHED)
    block(x)
    shown = {name: type(parameter) for name, parameter in block.named_parameters()}
    go_on.set()
    crew.run()
    assert set(shown.values()) == {DiskTensor}, shown


SCENES = [all_verbs_on_one_model, all_verbs_on_models_of_their_own]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("seed", range(2))
def test_threads_do_everything_at_once(
    scene: Callable[[int, str, Path, int], None], seed: int, device: str, tmp_path: Path
) -> None:
    scene(seed, device, tmp_path, 10)


@pytest.mark.soak
@pytest.mark.parametrize("scene", SCENES)
def test_threads_do_everything_at_once_for_a_long_time(
    scene: Callable[[int, str, Path, int], None], device: str
) -> None:
    until, seed = time.monotonic() + SOAK_SECONDS / 2, random.SystemRandom().randrange(10**6, 10**9)
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            try:
                scene(seed, device, Path(folder), 12)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
        seed += 1


def test_threads_do_everything_at_once_in_development_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own checks of memory, of files that nobody closed and of threads that fail unseen."""
    monkeypatch.setenv("PYTHONDEVMODE", "1")  # as `python -X dev`
    program = f"""
        import faulthandler, gc, sys, threading, warnings
        from pathlib import Path

        unseen = []
        sys.unraisablehook = lambda args: unseen.append(repr(args.exc_value))
        threading.excepthook = lambda args: unseen.append(repr(args.exc_value))

        from faults.test_concurrency import SCENES

        assert sys.flags.dev_mode and faulthandler.is_enabled()
        warnings.simplefilter("error", ResourceWarning)
        for number, scene in enumerate(SCENES):
            scene(number, "cpu", Path({str(tmp_path)!r}) / str(number), 3)
        gc.collect()
        assert not unseen, unseen
    """
    run_program(program, timeout=120)

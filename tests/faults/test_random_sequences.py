"""Random steps on a disk that fails at random: an error of ours or the right bits, nothing lost, nothing left over."""

import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from faults.injection import HARD, Faults, descriptors, fill_ring, install, python_threads
from overspill.checkpoint import open_checkpoint
from overspill.checkpoint.publishing import INDEX
from overspill.devices import HostPages
from overspill.errors import OverspillError, StateError
from overspill.managed import managed, managers_of
from overspill.moving import tier_of
from support import Net, aligned, loaded, map_everything, narrow, placed, save_checkpoint

BLOCKS = 3
IDS = torch.arange(24).view(2, 12)
STEPS = 12
SEQUENCES = 6  # of each test that runs by default
OFTEN = 0.6  # the share of the steps that meet a fault
SOAK_SECONDS = float(os.environ.get("OVERSPILL_SOAK_SECONDS", "600"))
State = dict[str, torch.Tensor]


def build() -> nn.Module:
    return Net(blocks=BLOCKS)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(bits(found[name]), bits(tensor))
        for name, tensor in expected.items()
    )


def stored_in(folder: Path) -> State:
    """What a checkpoint holds by its index, the tie under both of its names."""
    files = {file: load_file(file.path) for file in open_checkpoint(folder).files}
    found = {name: files[stored.file][name] for name, stored in open_checkpoint(folder).items()}
    return {**found, "head.weight": found["embed.weight"]}


def pinned_bytes() -> int:
    """Of page-aligned memory that is alive, what is registered with a driver."""
    return sum(len(thing) for thing in gc.get_objects() if type(thing) is HostPages and thing._registered)


def held() -> tuple[int, int, int, int]:
    """Pieces of page-aligned memory, bytes of it that are pinned, open files, threads."""
    gc.collect()
    pages = sum(type(thing) is HostPages for thing in gc.get_objects())
    return pages, pinned_bytes(), len(descriptors()), len(python_threads())


def step_there(parameter: nn.Parameter, device: torch.device) -> None:
    """An optimizer's step on another device: where a home is, since not all of them round alike."""
    assert parameter.grad is not None
    there = nn.Parameter(parameter.detach().to(device))
    there.grad = parameter.grad.to(device)
    torch.optim.SGD([there], lr=0.01).step()
    with torch.no_grad():
        parameter.copy_(there)


class Sequence:
    """A model on a disk that fails, and a twin in memory that does what succeeded."""

    def __init__(self, seed: int, device: str, folder: Path, faults: Faults) -> None:
        self.chance = random.Random(seed)
        self.device, self.folder, self.faults = device, folder, faults
        self.ids = IDS.to(device)
        self.story: list[str] = []
        self.failures = 0
        self.models = 1
        torch.manual_seed(seed)
        self.twin = aligned(build()).eval().to(device)
        self.saved = {folder / "source": state_of(self.twin)}
        save_checkpoint(self.twin, folder / "source")
        self.model: nn.Module = loaded(build, folder / "source", self._tier(), device)
        self.steps: list[Callable[[], None]] = [
            self.plan,
            self.load,
            self.forward,
            self.forward,
            self.edit,
            self.edit,
            self.offload,
            self.offload,
            self.offload_by_plan,
            self.restore,
            self.save,
            self.save,
            self.train,
        ]

    def go(self, count: int) -> None:
        for _ in range(count):
            step = self.chance.choice(self.steps)
            self.story.append(step.__name__)
            step()
            self._look()

    def _tries(self, work: Callable[[], Any]) -> bool:
        """Whether `work`, maybe on a disk that fails, succeeded. If not, it was one of our errors, and for a reason."""
        kind = self.faults.arm_at_random(self.chance) if self.chance.random() < OFTEN else None
        self.story.append(f"    {kind or 'no fault'}")
        self.faults.calls = 0
        try:
            work()
        except StateError as error:  # refused, and no fault's doing: it is offloaded already, or is not
            self.story.append(f"    {error}")
            return False
        except OverspillError as error:
            self.story.append(f"    {type(error).__name__}: {error}")
            assert kind is not None, "an error without a fault"
            assert kind.split()[0] in HARD, "an error of what is none"
            assert self.faults.injected, "an error before the fault"
            self.failures += 1
            return False
        finally:
            self.faults.mend()
        return True

    # Steps.

    def plan(self) -> None:
        assert self._tries(lambda: overspill.plan(self.model, {}, device=self.device))
        assert self.faults.calls == 0, "a plan reads no file"

    def load(self) -> None:
        """Another model from one of the checkpoints, in the place of this one."""
        source = self.chance.choice(list(self.saved))
        dtype = self.chance.choice([None, torch.float64])
        with overspill.empty_weights():
            model = build().eval()
        plan = placed(narrow(overspill.plan(model, {}, device=self.device, dtype=dtype)), self._tier())

        def work() -> None:
            overspill.load(model, source, plan, offload_folder=self.folder / "converted", progress=False)

        if self._tries(work):
            self.model = model
            self.models += 1
            self.twin = aligned(build().to(dtype)).eval()
            self.twin.load_state_dict(self.saved[source])
            self.twin = self.twin.to(self.device)
        else:
            assert managed(model) is None, "a failed load manages nothing"
            assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())

    def forward(self) -> None:
        outputs: list[torch.Tensor] = []

        def work() -> None:
            with torch.no_grad():
                outputs.append(self.model(self.ids))

        if self._tries(work):
            with torch.no_grad():
                assert torch.equal(bits(outputs[0]), bits(self.twin(self.ids)))

    def edit(self) -> None:
        """One tensor, in one of the ways in which people edit them: it is edited, or it is not."""
        name, _ = self.chance.choice(list(self.twin.named_parameters()))
        value = self.chance.choice([-0.5, 0.25, 2.0])
        ways: list[Callable[[nn.Module], Any]] = [
            lambda net: net.get_parameter(name).mul_(value),
            lambda net: net.get_parameter(name).data.add_(value),
            lambda net: net.get_parameter(name)[0].fill_(value),
            lambda net: net.get_parameter(name).copy_(torch.full_like(self.twin.get_parameter(name), value)),
        ]
        way = self.chance.choice(ways)
        self.story.append(f"    way {ways.index(way)} of {name}, {value}")
        with torch.no_grad():
            if self._tries(lambda: way(self.model)):
                way(self.twin)

    def offload(self) -> None:
        self._bring_back_often()
        part = self.chance.choice([None, "embed", "blocks", *(f"blocks.{index}" for index in range(BLOCKS))])
        to = self.chance.choice(["disk", "disk", "disk", "cpu"])
        folder = self.folder / f"offload {self.models}" if to == "disk" and self.chance.random() < 0.7 else None
        before = self._tiers()
        if not self._tries(lambda: overspill.offload(self.model, to=to, modules=part, folder=folder, min_bytes=0)):
            assert self._tiers() == before, "all or nothing"

    def offload_by_plan(self) -> None:
        self._bring_back_often()
        plan = placed(narrow(overspill.plan(self.model, {}, device=self.device)), self._tier())
        before = self._tiers()
        if not self._tries(lambda: overspill.offload(self.model, plan)):
            assert self._tiers() == before, "all or nothing"

    def _bring_back_often(self) -> None:
        """What is offloaded cannot be offloaded again, so most offloads would be refused."""
        if self.chance.random() < 0.7 and managers_of(self.model):
            overspill.restore(self.model, delete=self.chance.random() < 0.5)

    def restore(self) -> None:
        part = self.chance.choice([None, None, "embed", *(f"blocks.{index}" for index in range(BLOCKS))])
        delete = self.chance.random() < 0.5
        before = self._tiers()
        if not self._tries(lambda: overspill.restore(self.model, modules=part, delete=delete)):
            assert self._tiers() == before, "all or nothing"

    def save(self) -> None:
        """Over the checkpoint that the model may read from, over another one, or to a new folder."""
        target = self.chance.choice([*self.saved, *(self.folder / name for name in ("second", "third"))])
        size = self.chance.choice(["1GB", 6000])
        new = state_of(self.twin)
        if self._tries(lambda: overspill.save(self.model, target, max_shard_size=size, progress=False)):
            self.saved[target] = new
            # Where files cannot be linked, shards keep the names that they were written under.
            shards = {file.path.name for file in open_checkpoint(target).files}
            assert {entry.name for entry in target.iterdir()} - {INDEX} == shards, "leftovers"
        elif target in self.saved:
            found = stored_in(target)
            assert same(found, self.saved[target]) or same(found, new), "neither the old checkpoint nor the new one"
            self.saved[target] = found
        elif target.exists() and any(entry.name.startswith("model.safetensors") for entry in target.iterdir()):
            self.saved[target] = stored_in(target)
            assert same(self.saved[target], new), "a new checkpoint that is not whole"

    def train(self) -> None:
        """A step of training. What fails on the way to the gradients is begun again by dropping them."""
        nets = [self.model, self.twin]
        if self._tries(lambda: self.model(self.ids).square().mean().backward()):
            self.twin(self.ids).square().mean().backward()
            for (name, ours), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
                assert ours.grad is not None, name
                assert theirs.grad is not None, name
                assert torch.equal(bits(ours.grad), bits(theirs.grad)), name
            for ours, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                step_there(theirs, ours.device)
            torch.optim.SGD(self.model.parameters(), lr=0.01).step()
        for net in nets:
            net.zero_grad()

    # What holds after each of them.

    def _look(self) -> None:
        with torch.no_grad():
            assert torch.equal(bits(self.model(self.ids)), bits(self.twin(self.ids)))
        if self.chance.random() < 0.5:  # reading every value may hide what forgets to
            assert same(state_of(self.model), state_of(self.twin))
        if self.chance.random() < 0.3:
            for folder, state in self.saved.items():
                assert same(stored_in(folder), state), folder

    def end(self) -> None:
        """Back to an ordinary model, with files that somebody asked for and no others."""
        if managers_of(self.model):
            overspill.restore(self.model, delete=True)
        assert all(type(p) is nn.Parameter for p in self.model.parameters())
        assert same(state_of(self.model), state_of(self.twin))
        for folder, state in self.saved.items():
            assert same(stored_in(folder), state), folder
        self.model = self.twin = nn.Module()
        gc.collect()
        left = [path for path in self.folder.rglob("*") if path.suffix in (".partial", ".old")]
        left += (self.folder / "converted").glob("*")
        left += (self.folder / "temporary").glob("overspill*")
        assert not left

    def _tier(self) -> Any:
        return self.chance.choice(["disk", "mixed", "cpu"])

    def _tiers(self) -> dict[str, Any]:
        named = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        return {name: tier_of(tensor) for name, tensor in named}


def play(seed: int, device: str, root: Path) -> int:
    """One sequence. Returns how many of its steps failed."""
    folder = root / str(seed)
    (folder / "temporary").mkdir(parents=True)
    faults = Faults(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        install(faults, patch)
        if seed % 2:
            map_everything(patch)
        sequence = Sequence(seed, device, folder, faults)
        try:
            sequence.go(STEPS)
            sequence.end()
        except BaseException as error:
            error.add_note(f"seed {seed}:\n" + "\n".join(sequence.story))
            raise
    return sequence.failures


@pytest.fixture
def frozen() -> Iterator[None]:
    """What was there before is left out of collections, of which there are many here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("first", range(0, 30, SEQUENCES))
def test_whatever_fails_the_model_equals_its_twin_and_nothing_is_left_over(
    first: int, device: str, tmp_path: Path
) -> None:
    fill_ring(device)
    play(10**6, device, tmp_path)  # threads that a process has once
    before = held()
    failures = sum(play(seed, device, tmp_path) for seed in range(first, first + SEQUENCES))
    assert held() == before
    assert failures >= SEQUENCES // 2, "hardly a fault reached anything"


@pytest.mark.soak
@pytest.mark.usefixtures("frozen")
def test_whatever_fails_for_a_long_time(device: str, tmp_path: Path) -> None:
    fill_ring(device)
    play(10**6, device, tmp_path)
    before, until = held(), time.monotonic() + SOAK_SECONDS
    first = random.SystemRandom().randrange(10**7, 10**9)  # others each time; one that fails is told with its seed
    for seed in itertools.count(first):
        play(seed, device, tmp_path)
        assert held() == before, f"seed {seed}"
        if time.monotonic() > until:
            break

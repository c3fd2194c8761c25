"""A thousand forwards, hundreds of loads and restores: memory, descriptors and threads stay as they were."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

import overspill
from faults.injection import anonymous_bytes, descriptors, fill_ring, python_threads
from overspill.devices import HostPages
from support import Net, aligned, loaded, run, save_checkpoint, streamed_units

IDS = torch.arange(8).view(1, 8)
WIDTH = 64
SLACK = 4 << 20  # what allocators keep, and where Python's own caches settle
SLOWER = 2.0
"""How many times as long the last rounds may take as the first: what remembers every round takes ever longer."""


def build() -> nn.Module:
    return Net(blocks=3, width=WIDTH)


@pytest.fixture
def reference(device: str) -> nn.Module:
    return aligned(build()).eval().to(device)


@pytest.fixture
def checkpoint(reference: nn.Module, tmp_path: Path) -> Path:
    return save_checkpoint(reference, tmp_path / "checkpoint")


@pytest.fixture(autouse=True)
def _frozen(device: str) -> Iterator[None]:
    """What was there before is left out of collections, of which there are many here."""
    fill_ring(device)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held() -> tuple[int, int, int]:
    gc.collect()
    pages = sum(type(thing) is HostPages for thing in gc.get_objects())
    return pages, len(descriptors()), len(python_threads())


def assert_flat(work: Callable[[], None], *, rounds: int, allowed: int) -> None:
    """`work`, done `rounds` times after a tenth as many to settle, leaves memory, files and threads as they were.

    Nor does it take longer in the end. Allocators may need some hundred rounds to settle, and the machine may be busy.
    What leaks goes on growing, so it grows each of three times.
    """
    for _ in range(max(rounds // 10, 5)):
        work()
    before = held()
    usual = median(_processor_time(work) for _ in range(rounds // 4))
    grown, slowed = [allowed + 1], [SLOWER + 1]
    while (grown[-1] > allowed or slowed[-1] > SLOWER) and len(grown) < 4:
        memory = anonymous_bytes()
        times = [_processor_time(work) for _ in range(rounds)]
        assert held() == before
        grown.append(anonymous_bytes() - memory)
        slowed.append(median(times[-rounds // 4 :]) / usual)
    assert grown[-1] <= allowed, f"{grown[1:]} bytes in {rounds} rounds each"
    assert slowed[-1] <= SLOWER, f"the last of {rounds} rounds took {slowed[1:]} times as long as the first ones"


def _processor_time(work: Callable[[], None]) -> float:
    """Of this thread: what others do, or wait for, is not in it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def forward_often(model: nn.Module, reference: nn.Module, rounds: int) -> None:
    with torch.no_grad():
        expected = run(reference, IDS)

    def work() -> None:
        with torch.no_grad():
            assert torch.equal(model(IDS), expected)

    assert_flat(work, rounds=rounds, allowed=SLACK)


@pytest.mark.parametrize("tier", ["disk", "mixed"])
def test_a_thousand_forwards(tier: str, device: str, checkpoint: Path, reference: nn.Module) -> None:
    forward_often(loaded(build, checkpoint, tier, device), reference, 1000)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.usefixtures("mapped")
def test_a_thousand_forwards_in_the_page_cache(device: str, reference: nn.Module, checkpoint: Path) -> None:
    model = loaded(build, checkpoint, "disk", device)
    forward_often(model, reference, 1000)
    assert all(unit.mapped is not None for unit in streamed_units(model))


@pytest.mark.soak
@pytest.mark.parametrize("tier", ["cpu", "disk", "mixed"])
def test_ten_thousand_forwards(tier: str, device: str, checkpoint: Path, reference: nn.Module) -> None:
    forward_often(loaded(build, checkpoint, tier, device), reference, 10_000)


def cycle_often(checkpoint: Path, reference: nn.Module, device: str, folder: Path, rounds: int) -> None:
    with torch.no_grad():
        expected = run(reference, IDS)

    def work() -> None:
        model = loaded(build, checkpoint, "mixed", device)
        with torch.no_grad():
            assert torch.equal(model(IDS), expected)
        overspill.restore(model)
        overspill.offload(model, to="disk", modules="blocks.1", folder=folder, device=device)
        with torch.no_grad():
            assert torch.equal(model(IDS), expected)
        overspill.restore(model, delete=True)

    assert_flat(work, rounds=rounds, allowed=SLACK)
    assert not folder.exists()


def test_sixty_cycles_of_load_restore_offload_restore(
    device: str, checkpoint: Path, reference: nn.Module, tmp_path: Path
) -> None:
    cycle_often(checkpoint, reference, device, tmp_path / "offload", 60)


@pytest.mark.soak
def test_a_thousand_cycles_of_load_restore_offload_restore(
    device: str, checkpoint: Path, reference: nn.Module, tmp_path: Path
) -> None:
    cycle_often(checkpoint, reference, device, tmp_path / "offload", 1000)


def test_two_hundred_cycles_of_load_and_restore(device: str, checkpoint: Path, reference: nn.Module) -> None:
    def work() -> None:
        model = overspill.restore(loaded(build, checkpoint, "disk", device))
        assert torch.equal(model.get_parameter("embed.weight"), reference.get_parameter("embed.weight"))

    assert_flat(work, rounds=200, allowed=SLACK)

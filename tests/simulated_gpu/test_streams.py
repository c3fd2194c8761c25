"""The simulated device's streams: what nobody waits for is not there yet, and what is waited for is."""

from collections.abc import Iterator

import pytest
import torch

from simulated_gpu.device import delayed

pytestmark = pytest.mark.gpu

LONG = 400_000_000
"""Cycles: a fifth of a second, in which the host does much."""


def busy(stream: torch.Stream) -> None:
    """Have `stream` do nothing else for a while."""
    with stream:
        torch.cuda._sleep(LONG)


def event_on(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device="cuda:0")
    event.record(stream)
    return event


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(device="cuda:0")


@pytest.fixture
def main() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def delays() -> Iterator[None]:
    with delayed(2000):
        yield
        torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_has_arrived_for_whoever_waits_for_it(waits: bool, side: torch.Stream, main: torch.Stream) -> None:
    source, target = torch.ones(1024).pin_memory(), torch.zeros(1024, device="cuda:0")
    busy(side)
    with side:
        target.copy_(source, non_blocking=True)
    if waits:
        main.wait_event(event_on(side))
    seen = target * 1
    assert seen.unique().tolist() == [float(waits)]
    torch.cuda.synchronize()
    assert target.unique().tolist() == [1]


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_reads_when_its_turn_comes(waits: bool, side: torch.Stream, main: torch.Stream) -> None:
    source, x = torch.full((64, 64), 7.0).pin_memory(), torch.ones(64, 64, device="cuda:0")
    busy(main)
    product = x @ x
    if waits:
        side.wait_event(event_on(main))
    with side:
        x.copy_(source, non_blocking=True)
    assert product.unique().tolist() == [64 if waits else 64 * 49], "overwritten while a kernel was to read it"


def test_the_host_goes_on_while_kernels_are_queued(main: torch.Stream) -> None:
    x = torch.randn(8, 8)
    on_device = x.cuda()
    busy(main)
    result = torch.nn.functional.gelu(on_device @ on_device).add_(1).softmax(-1)
    assert not event_on(main).query()
    assert torch.equal(result.cpu(), torch.nn.functional.gelu(x @ x).add_(1).softmax(-1))


@pytest.mark.parametrize("pinned", [False, True])
def test_pinned_memory_is_read_when_it_is_copied_and_other_memory_at_once(pinned: bool, main: torch.Stream) -> None:
    source = torch.ones(1024)
    source = source.pin_memory() if pinned else source
    target = torch.empty(1024, device="cuda:0")
    busy(main)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert target.unique().tolist() == [2 if pinned else 1]


def test_copies_to_pinned_memory_arrive_later(main: torch.Stream) -> None:
    source, target = torch.ones(1024, device="cuda:0"), torch.zeros(1024).pin_memory()
    busy(main)
    target.copy_(source, non_blocking=True)
    assert target.unique().tolist() == [0]
    torch.cuda.synchronize()
    assert target.unique().tolist() == [1]


def test_memory_that_is_half_pinned_is_refused() -> None:
    pages = torch.zeros(3 * 4096, dtype=torch.uint8)
    start = -pages.data_ptr() % 4096
    assert torch.cuda.cudart().cudaHostRegister(pages.data_ptr() + start, 4096, 0) == 0
    half = pages[start : start + 8192]
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.empty(8192, dtype=torch.uint8, device="cuda:0").copy_(half, non_blocking=True)
    assert torch.cuda.cudart().cudaHostRegister(half.data_ptr(), 8192, 0) == 712, "a part of it is"
    assert torch.cuda.cudart().cudaHostUnregister(half.data_ptr()) == 0
    assert torch.cuda.cudart().cudaHostUnregister(half.data_ptr()) == 713, "it is not any more"


def test_events_measure_the_time_of_their_stream(side: torch.Stream) -> None:
    marks = [torch.Event(device="cuda:0", enable_timing=True) for _ in range(3)]
    for mark, cycles in zip(marks, [0, LONG // 4, LONG], strict=True):
        with side:
            torch.cuda._sleep(cycles)
        mark.record(side)
    with pytest.raises(RuntimeError, match="must be completed"):
        marks[0].elapsed_time(marks[2])
    torch.cuda.synchronize()
    short, long = marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
    assert short >= 1000 * LONG / 4 / 1.7e9
    assert long >= 1000 * LONG / 1.7e9


def test_an_event_stands_for_what_was_queued_when_it_was_recorded(side: torch.Stream) -> None:
    event = event_on(side)
    busy(side)
    assert event.query()
    event.record(side)
    assert not event.query()
    event.synchronize()
    assert side.query()


def test_with_delays_things_begin_late_and_are_still_right(delays: None, main: torch.Stream) -> None:
    x, late = torch.zeros(8, device="cuda:0"), 0
    for _ in range(200):
        x.add_(1)
        late += not event_on(main).query()
    assert late > 20
    assert x.unique().tolist() == [200]


def test_what_goes_wrong_in_a_stream_is_told_to_whoever_waits_next(main: torch.Stream) -> None:
    x, index = torch.ones(4, device="cuda:0"), torch.tensor([9], device="cuda:0")
    busy(main)
    torch.gather(x, 0, index)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        torch.cuda.synchronize()
    assert x.sum() == 4, "once"

"""Trainings whose copies are slow at random, and whose freed memory is overwritten at once: still the same bits.

Whoever reads before a copy has ended, or frees too early, finds NaN.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from overspill import host_link, slab, transfer
from overspill.devices import CPU, HostPages, host_bytes, on_stream
from overspill.training.activations import Activations, Limits
from training.loops import STRATEGIES, Net, compare

POISON = 0xFF  # in each byte: a NaN of every floating-point dtype
Entered = Callable[[torch.Stream | None], contextlib.AbstractContextManager[object]]


def have_copies_begin(entered: Entered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy is made within `entered`, which is told its stream: to the device, from it, and back."""
    for module in (transfer, host_link):
        monkeypatch.setattr(module, "on_stream", entered)


@pytest.fixture(
    params=["fast", pytest.param("slow", marks=pytest.mark.gpu), pytest.param("mixed", marks=pytest.mark.gpu)]
)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How long the copies that follow take: each waits on its stream first."""
    chance = random.Random(5)
    cycles: Callable[[], int] = {
        "slow": lambda: 2_000_000,
        "fast": lambda: 0,
        "mixed": lambda: chance.choice([0, 100_000, 2_000_000]),
    }[request.param]

    @contextlib.contextmanager
    def slowly(stream: torch.Stream | None) -> Iterator[None]:
        with on_stream(stream):
            if stream is not None and (wait := cycles()):
                torch.cuda._sleep(wait)
            yield

    have_copies_begin(slowly, monkeypatch)
    return str(request.param)


@pytest.fixture(autouse=True)
def _ranges_are_poisoned_when_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = slab._Arena._collect

    def poisoning(self: Any) -> None:
        for gap in list(self._returned):
            if isinstance(self.memory, HostPages):
                for event in gap.events:
                    event.synchronize()
                host_bytes(self.memory)[gap.start : gap.end].fill_(POISON)
            else:
                self.memory[gap.start : gap.end].fill_(POISON)
        collect(self)

    monkeypatch.setattr(slab._Arena, "_collect", poisoning)


@pytest.fixture(autouse=True)
def _slabs_are_poisoned_when_they_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on = slab._Arena.pass_on

    def poisoning(self: Any, passed: slab.Slab) -> None:
        passed.memory.fill_(POISON)  # where the work that used it is queued, and in front of what is waited for
        pass_on(self, passed)

    monkeypatch.setattr(slab._Arena, "pass_on", poisoning)


@pytest.fixture(autouse=True)
def _device_memory_is_poisoned_when_a_departure_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, wait, let_go = host_link.Departure.ended, host_link.Departure.wait, host_link.Departure.let_go

    def letting_go(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def with_poison(self: Any) -> Any:
            had = [(source.nbytes, source.device) for source in self._sources]
            result = call(self)
            for nbytes, device in () if self._sources else had:
                if device.type == "cuda":
                    torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
            return result

        return with_poison

    monkeypatch.setattr(host_link.Departure, "ended", letting_go(ended))
    monkeypatch.setattr(host_link.Departure, "wait", letting_go(wait))
    monkeypatch.setattr(host_link.Departure, "let_go", letting_go(let_go))


def test_each_copy_begins_where_it_is_made_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.Stream | None] = []

    def noting(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
        streams.append(stream)
        return on_stream(stream)

    have_copies_begin(noting, monkeypatch)
    source, way = torch.arange(64, dtype=torch.uint8), transfer.Transfer(CPU)
    window = slab.Window(4096, CPU)
    target = window.take(64)
    assert target is not None
    way.from_host([(0, source)], target).wait()
    assert len(streams) == 1
    departure, _ = way.host_link.send([source])
    assert len(streams) == 2
    back, _ = way.host_link.bring_back(departure.host, 64, departure.left)
    assert len(streams) == 3
    assert torch.equal(back, source)


@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "parameters-alone"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_training_has_the_same_bits(device: str, strategy: str, copies: str, buffers: bool) -> None:
    compare(lambda: Net(buffers=buffers), device, STRATEGIES[strategy], steps=5)


@pytest.mark.gpu
def test_whoever_does_not_wait_for_what_came_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The amplifier itself: without that wait, gradients are wrong."""
    have_copies_begin(_slowly, monkeypatch)
    monkeypatch.setattr("overspill.training.stored.current_stream_waits", lambda device, event: None)
    x = torch.randn(64, 64, device="cuda:0", requires_grad=True)

    def compute() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = y.sigmoid().exp()
        return y.sum()

    (expected,) = torch.autograd.grad(compute(), x)
    activations = Activations(x.device, Limits(small=0, held=0, ahead=1 << 20))
    with activations.saving():
        loss = compute()
    (found,) = torch.autograd.grad(loss, x)
    torch.cuda.synchronize()  # before what was not waited for is overwritten by others
    assert not torch.equal(found, expected)


@contextlib.contextmanager
def _slowly(stream: torch.Stream | None) -> Iterator[None]:
    with on_stream(stream):
        if stream is not None:
            torch.cuda._sleep(2_000_000)
        yield

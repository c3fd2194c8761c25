"""Bytes that leave a device: together in one slab, and no more at once than may be."""

import weakref

import pytest
import torch

from overspill import host_link
from overspill.host_link import ONE_BY_ONE, HostLink, Landing, Pace

CPU = torch.device("cpu")


class Mark:
    """What stands for an event of a device that has done nothing yet."""

    def __init__(self) -> None:
        self.passed = self.waited_for = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = self.waited_for = True


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Mark]:
    """Of the departures, in order: the host runs ahead of the device."""
    made: list[Mark] = []

    def record(device: torch.device, stream: torch.Stream | None = None) -> Mark:
        made.append(Mark())
        return made[-1]

    monkeypatch.setattr(host_link, "record_event", record)
    monkeypatch.setattr(host_link, "stream_waits", lambda stream, events: None)
    return made


def test_tensors_that_leave_together_share_a_slab_and_keep_their_layout() -> None:
    link = HostLink(CPU)
    sources = [torch.randn(3, 5).t(), torch.arange(7, dtype=torch.int8), torch.empty(0), torch.randn(2, 2, 2)]
    departure, copies = link.send(sources)
    assert departure.ended()
    for source, copy in zip(sources, copies, strict=True):
        assert torch.equal(copy, source)
        assert copy.dtype == source.dtype
        assert copy.stride() == source.stride()
        assert copy.data_ptr() % 64 == 0 or not copy.numel()
        assert copy.data_ptr() != source.data_ptr() or not copy.numel()
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    taken = link.pool.nbytes - link.pool.free_bytes()
    assert taken <= 4 * 4096
    del departure, copies, copy
    assert link.pool.free_bytes() == link.pool.nbytes, "the slab is free when the last copy in it is gone"


def test_what_leaves_is_held_until_its_copy_has_ended(marks: list[Mark]) -> None:
    link, source = HostLink(CPU), torch.randn(64)
    alive = weakref.ref(source)
    departure, _ = link.send([source])
    del source
    assert not departure.ended()
    assert alive() is not None, "the device still reads it"
    marks[-1].passed = True
    assert departure.ended()
    assert alive() is None


@pytest.mark.parametrize(
    ("pace", "under_way"),
    [(Pace(in_flight=4096, departures=2), 4), (Pace(in_flight=1, departures=2), 2), (ONE_BY_ONE, 1)],
    ids=["four fit", "two however large", "one by one"],
)
@pytest.mark.parametrize("stream", ["the same stream", "another stream"])
def test_what_is_computed_next_waits_while_too_much_is_under_way(
    pace: Pace, under_way: int, stream: str, marks: list[Mark], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for_on_the_device, alive = list[Mark](), []
    monkeypatch.setattr(host_link, "current_stream_waits", lambda device, mark: waited_for_on_the_device.append(mark))
    link, sent, numbers = HostLink(CPU), list[Mark](), iter(range(99))
    if stream == "another stream":
        link._stream = lambda: next(numbers)
    link.pace = pace
    for _ in range(6):
        source = torch.zeros(1024, dtype=torch.uint8)
        alive.append(weakref.ref(source))
        departure, _ = link.send([source])
        sent.append(marks[-1])
        del source
    through, rest = sent[: 6 - under_way], sent[6 - under_way :]
    if stream == "the same stream":
        assert waited_for_on_the_device == through
        assert not any(mark.waited_for for mark in sent), "the host went on"
    else:
        assert [mark.waited_for for mark in sent] == [True] * len(through) + [False] * len(rest)
        assert not waited_for_on_the_device, "torch would give the memory to a stream that has not waited"
    assert [reference() is None for reference in alive] == [True] * len(through) + [False] * len(rest)
    assert not departure.ended()


def test_what_was_let_go_of_has_not_arrived(marks: list[Mark], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "current_stream_waits", lambda device, mark: None)
    link = HostLink(CPU)
    link.pace = ONE_BY_ONE
    first, _ = link.send([torch.zeros(64)])
    left = marks[-1]
    link.send([torch.zeros(64)])
    assert not first.ended(), "its memory is free, but nobody may read the copy yet"
    first.wait()
    assert left.waited_for
    assert first.ended()


def test_to_edit_one_copy_is_not_to_edit_the_others(device: str) -> None:
    sources = [torch.randn(8, 8, device=device), torch.randn(4, device=device)]
    departure, copies = HostLink(torch.device(device)).send(sources)
    departure.wait()
    before = copies[1]._version
    copies[0].zero_()
    assert copies[1]._version == before
    assert copies[1]._base is None
    assert torch.equal(copies[1], sources[1].cpu())


# Tensors that leave again and again.


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_what_leaves_again_lands_where_it_did_before_once_nobody_has_that_any_more() -> None:
    link = HostLink(CPU)
    landing = Landing(link)
    sources = [torch.randn(3, 5), torch.randn(64)]
    _, first = link.send(sources, landing)
    before = addresses(first)
    _, second = link.send(sources, landing)
    assert addresses(second) != before, "somebody has the first"
    sources = [source + 1 for source in sources]
    kept = first[1][:4]
    expected = kept.clone()
    del first, second
    _, third = link.send(sources, landing)
    assert addresses(third) != before, "somebody has a part of the first"
    assert torch.equal(kept, expected)
    del kept, third
    _, fourth = link.send(sources, landing)
    assert addresses(fourth) == before
    assert all(map(torch.equal, fourth, sources))
    versions = [copy._version for copy in fourth]
    fourth[0].zero_()
    assert [copy._version for copy in fourth] == [versions[0] + 1, versions[1]], "they are tensors of their own"


@pytest.mark.parametrize(
    "sources",
    [[torch.randn(3, 5).t(), torch.randn(64)], [torch.randn(5, 3)], [torch.randn(5, 3), torch.randn(64).double()]],
    ids=["strides", "fewer", "dtype"],
)
def test_what_is_laid_out_otherwise_lands_elsewhere(sources: list[torch.Tensor]) -> None:
    link = HostLink(CPU)
    landing = Landing(link)
    link.send([torch.randn(5, 3), torch.randn(64)], landing)
    _, copies = link.send(sources, landing)
    for source, copy in zip(sources, copies, strict=True):
        assert torch.equal(copy, source)
        assert copy.dtype == source.dtype
        assert copy.stride() == source.stride()


def test_landing_takes_no_more_memory_than_is_in_use() -> None:
    link = HostLink(CPU)
    landings = [Landing(link) for _ in range(3)]
    sources = [torch.randn(1 << 20)]
    for _ in range(5):
        held = [link.send(sources, landing)[1] for landing in landings]  # gradients
        taken = link.pool.nbytes - link.pool.free_bytes()
        assert taken == 3 * sources[0].nbytes
        more = link.send(sources, landings[0])[1]  # those that are added to them
        assert link.pool.nbytes - link.pool.free_bytes() == 4 * sources[0].nbytes
        del more
        assert link.pool.nbytes - link.pool.free_bytes() == taken
        del held

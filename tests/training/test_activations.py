"""Saved tensors that leave and come back: which bytes, how often, and as what."""

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import PlanError, StateError
from overspill.slab import Layout, Window
from overspill.tensors import TensorSpec
from overspill.training.activations import Activations, Limits
from overspill.training.stored import Saved

SMALL = Limits(small=0, held=0, ahead=0)


@pytest.fixture(params=[False, True], ids=["host", "disk"])
def activations(request: pytest.FixtureRequest, device: str) -> Activations:
    return Activations(torch.device(device), SMALL, to_disk=request.param)


def gone(packed: Any) -> Any:
    """`packed`, once its tensor is free: another thread may be the one that frees it."""
    while not packed.stored._storage.expired():
        time.sleep(0.001)
    return packed


def computed(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is no parameter."""
    return torch.randn(shape, device=device).to(dtype)


VIEWS = {
    "itself": lambda x: x,
    "transpose": lambda x: x.t(),
    "part": lambda x: x[1:3],
    "column": lambda x: x[:, 2],
    "steps": lambda x: x[::2, ::3],
    "broadcast": lambda x: x[0].expand(5, -1),
    "other shape": lambda x: x.view(-1),
    "other dtype": lambda x: x.view(torch.int32),
    "diagonal": lambda x: x.diagonal(),
    "overlapping windows": lambda x: x.view(-1).unfold(0, 4, 1),
    "scalar": lambda x: x[2, 3],
    "channels last": lambda x: x.view(2, 2, 2, 3).contiguous(memory_format=torch.channels_last),
}


def test_what_is_on_its_way_is_held_once(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=1 << 20, ahead=0))
    packed = activations.pack(computed((64,), device))
    assert isinstance(packed, Saved)
    assert packed.stored._held is not None
    assert packed.stored._departure is not None
    assert not packed.stored._departure._sources, "what nobody needs any more would stay until the link is asked again"


@pytest.mark.parametrize("view", list(VIEWS))
def test_every_kind_of_view_comes_back_as_it_was(view: str, device: str, activations: Activations) -> None:
    tensor = VIEWS[view](computed((4, 6), device))
    values, stride = tensor.clone(), tensor.stride()
    packed = activations.pack(tensor)
    del tensor
    assert isinstance(packed, Saved)
    back = activations.unpack(gone(packed))
    assert torch.equal(back, values)
    assert back.stride() == stride
    assert back.dtype == values.dtype
    assert back.device == values.device


def test_a_tensor_comes_back_with_the_alignment_it_had(device: str, activations: Activations) -> None:
    tensor = computed((64,), device)[5:60]
    remainder = tensor.data_ptr() % 64
    packed = activations.pack(tensor)
    del tensor
    assert activations.unpack(packed).data_ptr() % 64 == remainder


def test_tensors_that_share_a_storage_leave_once_and_come_back_sharing(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    tensor = computed((8, 8), device)
    packed = [activations.pack(each) for each in (tensor, tensor.t(), tensor[2:], tensor.detach())]
    expected = [tensor.clone(), tensor.t().clone(), tensor[2:].clone(), tensor.clone()]
    assert activations.nbytes_sent == tensor.nbytes
    del tensor
    back = [activations.unpack(each) for each in packed]
    assert len({each.untyped_storage().data_ptr() for each in back}) == 1
    for ours, theirs in zip(back, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_of_a_large_storage_only_what_is_used_leaves(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    tensor = computed((100, 1024), device)
    activations.pack(tensor[3])
    assert 4096 <= activations.nbytes_sent <= 4096 + 512


def test_a_storage_that_was_edited_is_another_one(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    tensor = computed((8, 8), device)
    before = activations.pack(tensor)
    tensor.add_(1)
    after = activations.pack(tensor)
    expected = tensor.clone()
    del tensor
    assert torch.equal(activations.unpack(after), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        activations.unpack(before)


def test_chunks_that_count_their_edits_one_by_one_leave_one_by_one(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    whole = computed((8, 12), device)
    chunks = whole.unsafe_chunk(3, 1)  # as in recurrent cells
    expected, packed = [], []
    for number, chunk in enumerate(chunks):
        chunk.add_(number)  # the first edit of each
        packed.append(activations.pack(chunk))
        expected.append(chunk.clone())
    del whole, chunks, chunk
    for each, values in zip(packed, expected, strict=True):
        assert torch.equal(activations.unpack(each), values)


def test_a_view_beyond_what_it_is_a_view_of_leaves_whole(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    part = computed((8, 64), device)[2:4].detach()
    view = part.as_strided((6, 64), (64, 1), 64)
    expected = view.clone()
    packed = activations.pack(view)
    del part, view
    assert torch.equal(activations.unpack(packed), expected)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one(device: str) -> None:
    activations = Activations(torch.device(device), SMALL)
    packed = []
    for value in range(20):  # each is freed before the next is made, so addresses repeat
        tensor = torch.full((64, 64), float(value), device=device)
        packed.append(activations.pack(tensor))
        del tensor
    for value, each in enumerate(packed):
        assert (activations.unpack(each) == value).all()


def test_small_tensors_parameters_and_views_of_them_stay(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=1024, held=0, ahead=0))
    weight = nn.Parameter(torch.randn(32, 32, device=device))
    frozen = nn.Parameter(torch.randn(32, 32, device=device), requires_grad=False)
    leaf = torch.randn(32, 32, device=device, requires_grad=True)
    for tensor in (weight, weight.t(), frozen, frozen.t(), frozen[3:], leaf, leaf.view(-1), computed((8, 8), device)):
        activations.pack(tensor)
    buffer = computed((32, 32), device)
    activations.pack(buffer.t(), stays=[buffer.untyped_storage()._cdata])
    assert activations.nbytes_sent == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 4).to_sparse(),
        lambda: torch.empty(0, 4),
        lambda: torch.randn(4, 4, dtype=torch.complex64).conj(),
        lambda: torch.empty(4, 4, device="meta"),
    ],
    ids=["sparse", "empty", "conjugate", "meta"],
)
def test_what_is_no_plain_memory_stays(make: Any, activations: Activations) -> None:
    tensor = make()
    assert activations.unpack(activations.pack(tensor)).shape == tensor.shape
    assert activations.nbytes_sent == 0


def test_what_somebody_else_keeps_on_the_device_is_not_brought_again(device: str, activations: Activations) -> None:
    tensor = computed((8, 8), device)
    packed = activations.pack(tensor)
    assert activations.unpack(packed).data_ptr() == tensor.data_ptr()


def test_unpacking_twice_gives_the_same(device: str, activations: Activations) -> None:
    tensor = computed((8, 8), device)
    expected = tensor.clone()
    packed = activations.pack(tensor)
    del tensor
    for _ in range(3):
        assert torch.equal(activations.unpack(gone(packed)), expected)


def test_editing_what_came_back_does_not_edit_what_is_stored(device: str, activations: Activations) -> None:
    tensor = computed((8, 8), device)
    expected = tensor.clone()
    packed = activations.pack(tensor)
    del tensor
    activations.unpack(gone(packed)).zero_()
    assert torch.equal(activations.unpack(packed), expected)


def _edited_after_it_was_saved(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    z = y.exp()
    y.mul_(2)
    return z


def _edited_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    z = y.exp() * 2
    part = y[1:]
    del y
    part.add_(1)
    return z


@pytest.mark.parametrize("edit", [_edited_after_it_was_saved, _edited_through_a_view])
def test_an_edit_of_a_saved_tensor_raises_as_in_eager(edit: Any, device: str) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edit(x).sum().backward()
    with overspill.offload_activations(min_bytes=0):
        loss = edit(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_last_tensors_are_held_and_the_others_come_back_ahead_of_need(device: str) -> None:
    one = 64 * 64 * 4
    activations = Activations(torch.device(device), Limits(small=0, held=2 * one, ahead=2 * one))
    packed = [activations.pack(computed((64, 64), device)) for _ in range(8)]
    assert [each.stored.on_device() for each in packed] == [False] * 6 + [True] * 2
    activations.unpack(packed[7])
    assert [each.stored.on_device() for each in packed] == [False] * 5 + [True] * 3
    activations.unpack(packed[6])
    assert [each.stored.on_device() for each in packed][4:6] == [True, True]
    assert not packed[3].stored.on_device()


def test_what_is_known_of_graphs_that_are_gone_does_not_pile_up_behind_one_that_is_not(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=0, ahead=1 << 20))
    before: list[Any] = []
    for step in range(50):
        tensors = [torch.full((64,), 8.0 * step + index, device=device) for index in range(8)]
        packed = [activations.pack(tensor) for tensor in tensors]
        del tensors
        assert len(activations._order) <= 16
        for index in reversed(range(8)):
            values = activations.unpack(gone(packed[index]))
            assert values.tolist() == [8.0 * step + index] * 64
            assert index == 0 or packed[index - 1].stored.on_device(), "what comes next is brought ahead"
        before = packed  # as a loop does that keeps its last loss
    assert before


def test_what_graphs_held_that_are_gone_does_not_pile_up(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=1 << 20, ahead=1 << 20))
    first = activations.pack(torch.randn(64, device=device))
    for _ in range(50):
        packed = [activations.pack(torch.randn(64, device=device)) for _ in range(8)]
        assert len(activations._held) <= 1 + 2 * 8
        del packed
    assert first.stored.on_device()


def test_what_is_saved_of_a_streamed_unit_is_not_what_its_memory_holds_by_then(device: str) -> None:
    window = Window(1 << 12, torch.device(device))
    slab = window.take(256)
    assert slab is not None
    slab.layout = Layout.of([TensorSpec((8, 8), torch.float32)])
    values = slab.tensors()[0].copy_(torch.arange(64, device=device).view(8, 8)).clone()
    activations = Activations(torch.device(device), SMALL)
    packed = activations.pack(slab.tensors()[0].t())
    assert isinstance(packed, Saved)
    assert not packed.stored.on_device()
    assert not window.pass_on(slab), "another unit's bytes would be taken for those that were saved"
    slab.memory.zero_()  # as where it shows a file that somebody writes to
    assert torch.equal(activations.unpack(packed), values.t())
    del packed
    assert window.pass_on(slab)


def test_one_tensor_larger_than_all_limits_still_comes_ahead(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=1, ahead=1))
    packed = [activations.pack(computed((64, 64), device)) for _ in range(4)]
    assert [each.stored.on_device() for each in packed] == [False, False, False, True]
    activations.unpack(packed[3])
    assert [each.stored.on_device() for each in packed] == [False, False, True, True]


def test_as_much_as_the_largest_tensor_has_may_be_ahead(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=0, ahead=1))
    packed = [activations.pack(computed((64 * size, 64), device)) for size in (4, 2, 2, 1, 1)]
    activations.unpack(gone(packed[4]))
    assert [each.stored.on_device() for each in packed[:4]] == [False, False, True, True], "the next has twice as much"


def test_where_there_is_no_room_ahead_each_tensor_comes_back_when_it_is_asked_for(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=0, ahead=0))
    originals = [torch.randn(64, 64, device=device) for _ in range(4)]
    expected = [original.clone() for original in originals]
    packed = [activations.pack(original) for original in originals]
    del originals
    for place in (3, 2, 1, 0):
        assert not any(each.stored.on_device() for each in packed)
        values = activations.unpack(packed[place])
        assert torch.equal(values, expected[place])
    assert activations.nbytes_sent == 4 * 64 * 64 * 4


def test_two_that_leave_one_by_one_may_wait_however_large_they_are(device: str) -> None:
    activations = Activations(torch.device(device), Limits(small=0, held=1, ahead=1))
    packed = [activations.pack(computed((64, 64), device), waiting=2) for _ in range(4)]
    assert [each.stored.on_device() for each in packed] == [False, False, True, True]
    assert activations.held_bytes == 2 * 64 * 64 * 4


def test_at_the_end_of_a_forward_no_more_is_held_than_the_limit(device: str) -> None:
    one = 64 * 64 * 4
    activations = Activations(torch.device(device), Limits(small=0, held=one, ahead=one))
    packed = [activations.pack(computed((64 * size, 64), device)) for size in (1, 1, 3)]
    assert packed[2].stored.on_device()
    activations.end_forward()
    assert not any(each.stored.on_device() for each in packed)
    packed.append(activations.pack(computed((64, 64), device)))
    activations.end_forward()
    assert packed[3].stored.on_device()


def test_what_belongs_to_another_block_comes_back_when_it_is_asked_for_and_not_before(device: str) -> None:
    one = 64 * 64 * 4
    activations = Activations(torch.device(device), Limits(small=0, held=0, ahead=one))
    packed = [activations.pack(computed((64, 64), device)) for _ in range(6)]
    for place in (5, 4):
        activations.unpack(packed[place], back_to=packed[4].place)
        assert [each.stored.on_device() for each in packed[:4]] == [False] * 4
    activations.bring_back_before(packed[4].place, 2 * one, 0)
    assert [each.stored.on_device() for each in packed[:4]] == [False, False, True, True]


def test_memory_is_free_when_the_graph_is_gone(device: str, activations: Activations) -> None:
    for _ in range(10):
        packed = [activations.pack(computed((64, 64), device)) for _ in range(8)]
        activations.unpack(packed[3])
        del packed
        for spilled in [] if activations.file is None else list(activations.file._writing):
            spilled.wait()
    gc.collect()
    activations.pack(computed((64, 64), device))  # finished copies are forgotten when the next one comes
    if device != "cpu":
        torch.cuda.synchronize()
    pools = [link.pool for link in activations._links.values()]
    assert sum(pool.nbytes - pool.free_bytes() for pool in pools) <= 4 * 64 * 64 * 4
    assert len(activations._order) <= 9
    if activations.file is not None:
        assert activations.file.nbytes <= 16 * 64 * 64 * 4  # of 81: four threads may have what they wrote last yet


@pytest.mark.gpu
def test_a_host_that_is_ahead_of_its_device_does_not_hold_what_nobody_needs() -> None:
    activations = Activations(torch.device("cuda:0"), Limits(small=0, held=1 << 30, ahead=0))
    needed = activations.pack(computed((512, 512), "cuda:0"))
    torch.cuda._sleep(200_000_000)
    dropped = activations.pack(computed((512, 512), "cuda:0"))
    assert not dropped.stored._departure.ended()
    before = torch.cuda.memory_allocated()
    del dropped
    activations.unpack(needed)
    assert torch.cuda.memory_allocated() == before - 512 * 512 * 4


def test_a_full_disk_is_told_when_the_bytes_are_needed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    activations = Activations(torch.device(device), SMALL, to_disk=True)
    monkeypatch.setattr("overspill.unnamed_file.os.pwrite", full)
    packed = activations.pack(computed((8, 8), device))
    with pytest.raises(overspill.errors.OffloadFolderError, match="No space left on device"):
        activations.unpack(gone(packed))


def test_too_little_host_memory_is_told_before_it_is_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.slab.free_memory", lambda device: 100)
    activations = Activations(torch.device(device), SMALL)
    with pytest.raises(overspill.errors.BudgetError, match="Offload fewer layers"):
        activations.pack(computed((64, 64), device))


def test_the_context_manager_has_no_place_in_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(StateError, match="inference_mode"), overspill.offload_activations():
        pass


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(PlanError, match="to='cpu' or to='disk'"), overspill.offload_activations(to="gpu"):  # type: ignore[arg-type]
        pass


def test_a_forward_without_gradients_moves_nothing(device: str) -> None:
    linear = nn.Linear(8, 8).to(device)
    activations = Activations(torch.device(device), SMALL)
    with torch.no_grad(), activations.saving():
        linear(torch.randn(4, 8, device=device)).relu()
    assert activations.nbytes_sent == 0

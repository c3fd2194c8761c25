"""The verb: what it chooses, what it refuses, and that nothing is left of it in the end."""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import psutil
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import overspill
from memory_watch import held_in_use
from overspill.devices import RandomState, on_stream
from overspill.errors import BudgetError, OffloadFolderError, PlanError, StateError
from overspill.file_store import FileStore
from overspill.homes import HostTensor
from overspill.host_link import USUAL, HostLink
from overspill.managed import managed
from overspill.residency import Residency
from overspill.training.activations import Activations, Limits
from overspill.training.blocks import set_modes
from overspill.training.choosing import Choice, StepCost, choose
from overspill.training.modes import Mode
from overspill.training.recompute import Frame
from overspill.training.stored import Saved, _unfinished
from overspill.unnamed_file import UnnamedFile
from support import streamed_units, window_bytes_in_use
from training.loops import (
    STRATEGIES,
    Block,
    Net,
    activations_of,
    assert_same,
    batches,
    compare,
    loss_of,
    pair,
    plainly,
    train,
)


def chosen(model: nn.Module) -> list[str]:
    manager = managed(model)
    assert manager is not None
    assert manager.training is not None
    return [block.name for block in manager.training.blocks]  # type: ignore[attr-defined]


def taken_on_demand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the names of units that were not there, nor on their way, when a call or a backward needed them."""
    names: list[str] = []
    take = Residency._take

    def noting(self: Residency, unit: Any, **options: Any) -> Any:
        names.append(unit.name)
        return take(self, unit, **options)

    monkeypatch.setattr(Residency, "_take", noting)
    return names


# What is chosen.


@pytest.mark.parametrize(("layers", "expected"), [(0, 0), (1, 1), (5, 5), (None, 5)])
def test_layers_count_from_the_first(layers: int | None, expected: int) -> None:
    model = Net()
    assert overspill.offload_training(model, layers=layers) is model
    assert chosen(model) == [f"blocks.{index}" for index in range(expected)]


def test_layers_may_be_named(device: str) -> None:
    model = compare(Net, device, {"layers": ["blocks.5", "blocks.1"], "weights": True})
    assert chosen(model) == ["blocks.1", "blocks.5"]
    assert {unit.name for unit in streamed_units(model)} == {"blocks.1", "blocks.5"}


def test_no_layers_change_nothing_but_can_be_restored(device: str) -> None:
    reference, model = pair(Net, device)
    overspill.offload_training(model, layers=0, weights=True)
    assert_same(train(model, device, steps=2), train(reference, device, steps=2))
    overspill.restore(model)


@pytest.mark.parametrize("double_buffering", [True, False])
def test_weights_live_in_host_memory_and_stream_through_a_window(device: str, double_buffering: bool) -> None:
    model = Net(8).to(device)
    whole = sum(p.nbytes for p in model.blocks.parameters())
    overspill.offload_training(model, weights=True, activations=False, double_buffering=double_buffering)
    assert all(isinstance(p, HostTensor) for block in model.blocks[:-1] for p in block.parameters())
    assert not any(isinstance(p, HostTensor) for p in model.blocks[-1].parameters())
    manager = managed(model)
    assert manager is not None
    (window,) = manager.windows.values()
    assert window.nbytes < whole * (0.6 if double_buffering else 0.4)
    (transfer,) = manager.transfers.values()
    assert transfer.host_link.pace.departures == (2 if double_buffering else 1)
    loss = loss_of(model, next(batches(1, device)))
    assert window_bytes_in_use(model) <= window.nbytes
    loss.backward()
    assert window_bytes_in_use(model) <= window.nbytes
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in model.blocks[0].parameters())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_comes_once_for_its_forward_and_once_for_its_backward(
    device: str, recompute: bool, moved: dict[str, int]
) -> None:
    model = Net(12).to(device)
    overspill.offload_training(model, weights=True, activations=False, recompute=recompute)
    units = streamed_units(model)
    streamed = sum(unit.nbytes for unit in units)
    for batch in batches(2, device):  # learns the order
        loss_of(model, batch).backward()
    moved.clear()
    for batch in batches(4, device):
        loss_of(model, batch).backward()
    # Twice a step, less what is still in the window when the direction turns, or when the next step begins.
    assert moved["cpu"] <= 4 * 2 * streamed
    assert moved["cpu"] >= 4 * 2 * (streamed - 4 * max(unit.nbytes for unit in units))


def test_a_backward_finds_its_units_fetched_ahead(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(12).to(device)
    overspill.offload_training(model, weights=True, activations=False)
    for batch in batches(2, device):
        loss_of(model, batch).backward()
    demanded = taken_on_demand(monkeypatch)
    for batch in batches(3, device):
        loss_of(model, batch).backward()
    assert len(demanded) <= 3, "one a step at most: the rest was on its way when it was needed"


def test_a_pass_without_gradients_leaves_the_learned_order_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(12).to(device)
    overspill.offload_training(model, weights=True, activations=False)
    for batch in batches(3, device):
        loss_of(model, batch).backward()
        with torch.no_grad():
            model(batch[0])
    demanded = taken_on_demand(monkeypatch)
    for batch in batches(3, device):
        loss_of(model, batch).backward()
        with torch.no_grad():
            model(batch[0])
    assert len(demanded) <= 6


def test_gradients_leave_a_block_at_once_but_for_those_that_are_computed_last(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.host_link.USUAL", replace(USUAL, last_together=1))
    model, nodes = Net().to(device), dict[str, int]()

    def count(name: str, block: nn.Module) -> None:
        nodes[name] = len(
            {each.grad_fn for part in block.modules() for each in part._parameters.values() if each is not None}
        )

    for name, block in model.blocks.named_children():
        block.norm2.register_forward_pre_hook(lambda *_, name=name, block=block: count(name, block))
    overspill.offload_training(model, activations=False, weights=True, layers=3)
    weights = len(list(model.blocks[0].parameters()))
    for batch in batches(2, device):
        nodes.clear()
        loss_of(model, batch).backward()
        assert [nodes["0"], nodes["1"], nodes["2"]] == [weights, 1, 1]


@pytest.mark.gpu
def test_with_one_buffer_the_gradients_of_one_block_are_on_their_way_at_most() -> None:
    block, peaks = 4 * 2048 * 2048 * 4, {}
    for double_buffering in (True, False):
        blocks = [nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))) for _ in range(10)]
        model = nn.Sequential(*blocks).cuda()
        names = [name for name, _ in model.named_children()]
        overspill.offload_training(
            model, layers=names, activations=False, weights=True, double_buffering=double_buffering
        )
        manager = managed(model)
        assert manager is not None
        (transfer,) = manager.transfers.values()
        x = torch.randn(8, 2048, device="cuda:0")
        for turn in range(3):
            model.zero_grad()
            loss = model(x).square().mean()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with on_stream(transfer.host_link._departures):
                # A second, in which the host goes on as far as it may: that is long also for one that is busy.
                torch.cuda._sleep(2_000_000_000 if turn == 2 else 1)
            loss.backward()
        peaks[double_buffering] = torch.cuda.max_memory_allocated() - before
        overspill.restore(model, device="cpu")
    assert peaks[False] < 2.2 * block, "one that is computed, and one on its way"
    assert peaks[True] > 4 * block


@pytest.mark.gpu
def test_gradients_are_where_they_were_a_step_ago() -> None:
    model, places = Net().cuda(), []
    overspill.offload_training(model, activations=False, weights=True)
    for batch in batches(3, "cuda:0"):
        model.zero_grad()
        loss_of(model, batch).backward()
        places.append([each.grad.data_ptr() for each in model.blocks[:-1].parameters() if each.grad is not None])
    assert places[0] == places[1] == places[2], "host memory was taken anew, or copied"
    assert len(set(places[0])) == len(list(model.blocks[:-1].parameters()))


def test_hooks_of_a_weight_that_gets_no_gradient_are_not_called(device: str) -> None:
    model, called = Net().to(device), list[Any]()
    for block in model.blocks:
        block.unused = nn.Parameter(torch.ones(3, device=device))
        block.unused.register_hook(called.append)
        block.unused.register_post_accumulate_grad_hook(called.append)
    overspill.offload_training(model, weights=True, activations=False)
    assert isinstance(model.blocks[0].unused, HostTensor)
    loss_of(model, next(batches(1, device))).backward()
    assert not called
    assert all(p.grad is not None for name, p in model.named_parameters() if "unused" not in name)


def test_what_a_replay_needs_is_there_when_it_begins_and_no_sooner_than_half_a_block_before(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(small=0, held=0, ahead=1)
    monkeypatch.setattr(Limits, "usual", classmethod(lambda cls, *args, **kwargs: limits))
    model = Net().to(device)
    overspill.offload_training(model, recompute=True)
    seen: list[str] = []
    replay, unpack, bring_back = Frame._replay, Frame._unpack, HostLink.bring_back

    def noting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            seen.append(what)
            return call(*args)

        return noted

    def replaying(self: Frame) -> None:
        seen.append("(")
        replay(self)
        seen.append(")")

    monkeypatch.setattr(Frame, "_replay", replaying)
    monkeypatch.setattr(Frame, "_unpack", noting(".", unpack))
    monkeypatch.setattr(HostLink, "bring_back", noting("b", bring_back))
    loss_of(model, next(batches(1, device))).backward()
    replays = re.findall(r"\((.*?)\)(.*?)(?=\(|$)", "".join(seen))
    assert len(replays) == 5
    for inside, _ in replays[1:]:
        assert "b" not in inside, "it waited for what had left"
    for _, behind in replays[:-1]:
        first = behind.index("b")
        assert first >= behind.count(".") // 3, "most of its block's memory is still needed"


@pytest.mark.parametrize("recompute", [False, True])
def test_each_step_has_what_left_brought_back_ahead(
    device: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, waits, steps = Net().to(device), list[bool](), list[tuple[int, int]]()
    overspill.offload_training(model, recompute=recompute)
    unpack = Activations.unpack

    def noting(self: Activations, packed: Any, **options: Any) -> torch.Tensor:
        if isinstance(packed, Saved):
            waits.append(not packed.stored.on_device())
        return unpack(self, packed, **options)

    monkeypatch.setattr(Activations, "unpack", noting)
    batch = next(batches(1, device))
    for _ in range(4):
        waits.clear()
        loss_of(model, batch).backward()
        steps.append((len(waits), sum(waits)))
    asked, waited = steps[0]
    assert asked > 5
    assert waited <= asked // 3
    assert steps == [steps[0]] * 4


@pytest.mark.parametrize("modes", ["ORORO", "OORBK", "BRBOR", "OKROB"])
def test_what_blocks_before_it_have_sent_is_not_on_the_device_while_a_block_is_replayed(
    device: str, modes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"K": Mode.KEEP, "O": Mode.OFFLOAD, "R": Mode.RECOMPUTE, "B": Mode.RECOMPUTE_OFFLOAD}
    reference, model = pair(lambda: WithoutMask(5), device)
    overspill.offload_training(model, layers=[f"blocks.{index}" for index in range(5)], recompute=True)
    manager = managed(model)
    assert manager is not None
    assert manager.training is not None
    set_modes(manager.training.blocks, [names[mode] for mode in modes])  # type: ignore[attr-defined]
    activations, replay, there = activations_of(model), Frame._replay, list[tuple[str, int]]()

    def looking(self: Frame) -> None:
        replay(self)
        own = {id(packed.stored) for packed in (_packed(each) for each in self._inputs.values()) if packed is not None}
        alive = [stored for reference in activations._order if (stored := reference()) is not None]
        brought = [stored for stored in alive if stored._comes and id(stored) not in own]
        there.append((self._name, len(brought)))

    monkeypatch.setattr(Frame, "_replay", looking)
    assert_same(train(model, device, steps=2), train(reference, device, steps=2))
    assert len(there) == 2 * sum(mode in "RB" for mode in modes)
    assert not [name for name, brought in there if brought], "none of it is needed before this block is through"
    assert activations.nbytes_sent > 0


class WithoutMask(Net):
    """Its blocks share nothing: what one has back stays there while others need it too."""

    def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = block(x)
        return output


def _packed(given: Any) -> Saved | None:
    """What an input of a frame was packed as, if it has left."""
    cells = [cell.cell_contents for cell in getattr(given._kept, "__closure__", None) or ()]
    return next((each for each in cells if isinstance(each, Saved)), None)


def test_a_replay_finds_no_memory_held_for_copies_that_nobody_needs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().to(device)
    overspill.offload_training(model, activations=False, weights=True, recompute=True)
    loss = loss_of(model, next(batches(1, device)))
    waited = list[bool]()
    _unfinished.append((lambda: waited.append(True), torch.empty(1, device=device)))
    replay = Frame._replay

    def looking(self: Frame) -> None:
        replay(self)
        assert not _unfinished

    monkeypatch.setattr(Frame, "_replay", looking)
    loss.backward()
    assert waited == [True]


def test_a_replay_that_draws_nothing_leaves_random_numbers_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[bool] = []
    was = RandomState.again

    def noting(self: RandomState) -> Any:
        again.append(True)
        return was(self)

    monkeypatch.setattr(RandomState, "again", noting)
    for dropout, replays in ((0.0, 0), (0.1, 5)):
        model = Net(dropout=dropout).to(device)
        overspill.offload_training(model, recompute=True)
        loss_of(model, next(batches(1, device))).backward()
        assert len(again) == replays


def test_disk_takes_activations_too(device: str) -> None:
    for options in ({"activations": "disk"}, {"activations": "disk", "recompute": True, "weights": True}):
        model = compare(Net, device, options, steps=4)
        file = activations_of(model).file
        assert file is not None
        assert file.nbytes > 0


def test_trained_weights_on_disk_are_read_and_edited_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = UnnamedFile.read

    def counting(self: UnnamedFile, target: memoryview, offset: int) -> None:
        reads.append(len(target))
        read(self, target, offset)

    monkeypatch.setattr(UnnamedFile, "read", counting)
    reference, model = pair(Net, device)
    overspill.offload_training(model, weights="disk")
    units = streamed_units(model)
    assert all(isinstance(unit.store, FileStore) for unit in units)
    assert_same(train(model, device, steps=3), train(reference, device, steps=3))
    assert sum(reads) >= 3 * 2 * (sum(unit.nbytes for unit in units) - 4 * units[0].nbytes)
    manager = managed(model)
    assert manager is not None
    assert manager.plan.disk_bytes == sum(unit.nbytes for unit in units)
    # What an optimizer edits is in the file.
    home = model.blocks[0].qkv.weight
    with torch.no_grad():
        home.fill_(3.0)
    file = bytearray(units[0].nbytes)
    cast(FileStore, units[0].store)._file.read(memoryview(file), 0)
    assert file.count(torch.tensor(3.0).numpy().tobytes()) == home.numel()


def test_trained_weights_on_disk_take_no_memory_of_the_process() -> None:
    model = nn.Sequential(*(nn.Linear(2944, 2944, bias=False) for _ in range(5)))
    moved = sum(p.nbytes for p in model[:-1].parameters())
    before = held_in_use()
    overspill.offload_training(model, weights="disk", activations=False)
    with torch.no_grad():  # as an optimizer would: the pages are the file's
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert held_in_use() < before - 0.5 * moved, "a window of three blocks is what is left of it"


def test_a_disk_without_room_is_told_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("overspill.unnamed_file.os.posix_fallocate", full)
    model = Net()
    with pytest.raises(OffloadFolderError, match=r"make room for .* of trained weights .* set TMPDIR"):
        overspill.offload_training(model, weights="disk")
    assert managed(model) is None
    plainly(model, next(batches(1, "cpu")), 0)


# The budget.


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": True}, {"weights": True, "double_buffering": False}, {"weights": "disk"}],
    ids=["activations", "weights", "one buffer", "weights on disk"],
)
def test_a_budget_is_met_with_what_one_step_showed(
    device: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    compare(Net, device, {"memory": "8GiB", **options}, steps=4)
    assert "blocks.0 to blocks.5" in capsys.readouterr().out


def test_the_host_s_part_of_a_step_is_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[StepCost] = []

    def watched(step: StepCost, budget: int, allowed: list[Mode]) -> Choice:
        measured.append(step)
        return choose(step, budget, allowed)

    monkeypatch.setattr("overspill.training.measuring.choose", watched)
    model = Net().to(device)
    overspill.offload_training(model, memory="8GiB")
    for turn, batch in enumerate(batches(3, device)):
        plainly(model, batch, turn)
    (step,) = measured
    for block in step.blocks:
        assert block.host > 0
        assert block.largest * block.tensors >= block.saved > block.largest, "all of them are counted"
    assert 0 < step.host_a_tensor < 0.1
    alike = [block for block in step.blocks if block.saved == step.blocks[2].saved]
    assert len(alike) >= 3
    times = {(block.host, block.forward, block.backward, block.replay) for block in alike}
    assert len(times) == 1, "one that was held up must not be taken for another kind of block"
    ((_, forward, backward, replay),) = times
    assert forward > 0
    assert backward is not None
    assert backward > 0
    assert replay is not None
    assert replay > 0


def test_within_a_budget_no_block_keeps_its_weights(device: str) -> None:
    model = Net().to(device)
    overspill.offload_training(model, memory="8GiB", weights=True)
    assert all(isinstance(weight, HostTensor) for weight in model.blocks.parameters())


def test_a_budget_is_measured_in_one_step_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    overspill.offload_training(model, memory="100KB")
    for step, batch in enumerate(batches(4, "cpu")):
        with torch.no_grad():
            model(batch[0])
        plainly(model, batch, step)
        assert capsys.readouterr().out.count("expected") == (step == 2)


def test_in_the_smallest_budget_nothing_comes_back_ahead_and_the_results_are_the_same(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offload_without_ahead(step: StepCost, budget: int, allowed: list[Mode]) -> Choice:
        return Choice(replace(step, ahead=False), (Mode.OFFLOAD,) * len(step.blocks))

    monkeypatch.setattr("overspill.training.measuring.choose", offload_without_ahead)
    model = compare(Net, device, {"memory": "8GiB"}, steps=6)
    assert activations_of(model).limits.ahead == 0


def test_when_only_inputs_follow_nothing_larger_waits_for_its_copy_any_more(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offload_all_but_the_last(step: StepCost, budget: int, allowed: list[Mode]) -> Choice:
        return Choice(step, (*[Mode.OFFLOAD] * (len(step.blocks) - 1), Mode.RECOMPUTE_OFFLOAD))

    limits = Limits(small=0, held=64, ahead=1 << 13)
    monkeypatch.setattr(Limits, "usual", classmethod(lambda cls, *args, **kwargs: limits))
    monkeypatch.setattr("overspill.training.measuring.choose", offload_all_but_the_last)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)]  # wide, narrow outside
    model = nn.Sequential(*blocks).to(device)
    overspill.offload_training(model, memory="8GiB")
    x = torch.randn(16, 8, device=device)
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    assert 0 < activations_of(model).held_bytes <= 2 * x.nbytes
    loss.backward()


def test_a_budget_too_small_is_told_after_it_was_measured() -> None:
    model = Net()
    overspill.offload_training(model, memory=100)
    batch = next(batches(1, "cpu"))
    plainly(model, batch, 0)
    plainly(model, batch, 1)
    with pytest.raises(BudgetError, match="at the least"):
        plainly(model, batch, 2)
    overspill.restore(model)
    plainly(model, batch, 3)


def test_what_a_block_was_replayed_from_is_gone_with_its_graph(device: str) -> None:
    model = Net().to(device)
    overspill.offload_training(model, recompute=True)
    alive: list[int] = []
    model.embed.weight.register_hook(lambda _: alive.append(len(activations_of(model)._known)))  # the last gradient
    plainly(model, next(batches(1, device)), 0)
    assert alive[0] <= 2, "inputs of blocks whose backward is over"


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": -1}, "6 blocks, so it can be 0 to 5"),
        ({"layers": 6}, "6 blocks, so it can be 0 to 5"),
        ({"layers": True}, "out of range"),
        ({"layers": "blocks.1"}, r"write \['blocks.1'\]"),
        ({"layers": ["blocks.9"]}, "Near: blocks"),
        ({"layers": []}, "empty list"),
        ({"layers": ["blocks.1", "blocks.1.up"]}, "Name one of the two"),
        ({"activations": False}, "both off"),
        ({"activations": False, "recompute": True}, "both off"),
        ({"memory": "1GiB", "layers": 2}, "layers has no effect"),
        ({"memory": "1GiB", "recompute": True}, "recompute has no effect"),
        ({"weights": "cpu"}, "True for host memory"),
        ({"activations": "host"}, "True for host memory"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    model = Net()
    with pytest.raises(PlanError, match=message):
        overspill.offload_training(model, **options)
    assert managed(model) is None


def test_without_blocks_it_says_what_to_pass() -> None:
    model = nn.Sequential()
    model.add_module("one", Block())
    with pytest.raises(PlanError, match=r"layers=\[...\] with dotted paths of its modules \(at the top: 'one'\)"):
        overspill.offload_training(model)


def test_a_model_that_is_offloaded_for_inference_is_refused() -> None:
    model = Net()
    overspill.offload(model, to="disk", modules=["blocks.0"], min_bytes=0)
    with pytest.raises(StateError, match="Restore them first"):
        overspill.offload_training(model)


def test_a_model_in_training_is_not_set_up_again_nor_in_parts() -> None:
    model = Net()
    overspill.offload_training(model, weights=True)
    for refused in (
        lambda: overspill.offload_training(model),
        lambda: overspill.offload(model, to="disk", modules=["blocks.5"], min_bytes=0),
        lambda: overspill.restore(model, modules=["blocks.1"]),
    ):
        with pytest.raises(StateError, match="End that first"):
            refused()
    plainly(model, next(batches(1, "cpu")), 0)


def test_an_optimizer_of_a_copy_is_found_out_at_its_step() -> None:
    gc.collect()  # models of other tests, which may look like a twin of this one
    model = Net()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    overspill.offload_training(model, weights=True)
    optimizer.step()
    plainly(model, next(batches(1, "cpu")), 0)
    optimizer.step()  # once may be
    with pytest.raises(StateError, match=r"Make it anew from model.parameters\(\)"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    overspill.restore(model)
    plainly(model, next(batches(1, "cpu")), 0)
    optimizer.step()


@pytest.mark.parametrize("ends", ["restored", "dropped", "begun"])
def test_a_training_may_begin_and_end_within_another_optimizers_step(ends: str) -> None:
    models = [Net()]

    def end(*_: object) -> None:
        if ends == "restored":
            overspill.restore(models[0])
        elif ends == "dropped":
            models.clear()
            gc.collect()  # as happens by itself at any allocation
        else:
            models.append(Net())
            overspill.offload_training(models[1], weights=True)

    hook = register_optimizer_step_pre_hook(end)
    overspill.offload_training(models[0], weights=True)
    try:
        torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1).step()
    finally:
        hook.remove()


def test_optimizers_of_other_models_are_left_alone() -> None:
    model, other = Net(), Net()
    overspill.offload_training(model, weights=True)
    batch = next(batches(1, "cpu"))
    plainly(model, batch, 0)
    plainly(other, batch, 0)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1).step()


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_optimizer_remembers_follows_the_weights_there_and_back(device: str, fused: bool) -> None:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    def step() -> None:
        plainly(model, next(batches(1, device)), 0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    overspill.offload_training(model, weights=True)
    step()
    overspill.restore(model)
    step()
    assert all(state["exp_avg"].device.type == torch.device(device).type for state in optimizer.state.values())
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(StateError, match="inference_mode"):
        overspill.offload_training(Net())


def test_a_model_without_values_is_refused() -> None:
    with overspill.empty_weights():
        model = Net()
    with pytest.raises(StateError, match="meta device"):
        overspill.offload_training(model)


@pytest.mark.gpu
def test_too_little_host_memory_is_told_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().to("cuda:0")
    monkeypatch.setattr("overspill.training.offload.free_memory", lambda device: 100)
    with pytest.raises(BudgetError, match="of host memory"):
        overspill.offload_training(model, weights=True)
    assert managed(model) is None


def test_activations_that_will_not_fit_in_host_memory_are_told_by_the_first_block(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Net(8).to(device), next(batches(1, device))
    overspill.offload_training(model)
    called: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: called.append(index))
    free = [10**9]
    monkeypatch.setattr("overspill.training.host_room.free_memory", lambda device: free[0])
    before = activations_of(model).nbytes_sent
    loss_of(model, batch).backward()
    each = (activations_of(model).nbytes_sent - before) // 7
    overspill.restore(model)
    called.clear()
    overspill.offload_training(model)  # with no memory that an earlier step has left
    free[0] = 3 * each
    monkeypatch.setattr(Activations, "unused_bytes", 0)
    with pytest.raises(
        BudgetError, match=r"activations of 7 blocks .* blocks\.0 left .* the 6 like it behind it .* layers=4"
    ):
        loss_of(model, batch)
    assert called == [0], "nothing was computed in vain"
    free[0] = 10**9
    plainly(model, batch, 0)


def test_a_block_says_nothing_of_blocks_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)) for width in (512, 64, 64))
    )
    overspill.offload_training(model, layers=["0", "1"])
    monkeypatch.setattr("overspill.training.host_room.free_memory", lambda device: 0)
    model(torch.randn(128, 64)).sum().backward()
    assert activations_of(model).nbytes_sent > 0


def test_a_block_that_does_another_thing_when_recomputed_is_named(device: str) -> None:
    class Fickle(Block):
        calls = 0

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            self.calls += 1
            return super().forward(x[:, :3] if self.calls > 1 else x, mask=None).sum(1, keepdim=True) + x

    model = Net().to(device)
    model.blocks[2] = Fickle().to(device)
    overspill.offload_training(model, recompute=True)
    with pytest.raises(StateError, match=r"blocks\.2 saved other tensors"):
        plainly(model, next(batches(1, device)), 0)


@pytest.mark.parametrize("strategy", ["recompute", "all"])
def test_a_weight_edited_before_its_block_is_recomputed_raises(device: str, strategy: str) -> None:
    model = Net().to(device)
    overspill.offload_training(model, **STRATEGIES[strategy])
    loss = loss_of(model, next(batches(1, device)))
    with torch.no_grad():
        model.get_parameter("blocks.1.up.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_tensor_edited_inside_a_block_raises_as_in_eager(device: str, strategy: str) -> None:
    class Edits(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            y = torch.sigmoid(self.norm(x))
            z = y.exp() + super().forward(x, mask)
            y.mul_(2)
            return z

    model = Net().to(device)
    model.blocks[2] = Edits().to(device)
    overspill.offload_training(model, **STRATEGIES[strategy])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plainly(model, next(batches(1, device)), 0)


# The end.


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_restore_leaves_an_ordinary_model(device: str, strategy: str) -> None:
    reference, model = pair(Net, device)
    parameters = list(model.parameters())
    overspill.offload_training(model, **STRATEGIES[strategy])
    train(model, device, steps=2)
    train(reference, device, steps=2)
    overspill.restore(model)
    assert all(ours is before for ours, before in zip(model.parameters(), parameters, strict=True))
    for module in model.modules():
        assert module._compiled_call_impl is None
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in module.__dict__
        assert "_overspill" not in module.__dict__
        assert "__reduce_ex__" not in module.__dict__
    assert all(type(p) is nn.Parameter and p.device.type == torch.device(device).type for p in model.parameters())
    assert_same(train(model, device, steps=2), train(reference, device, steps=2))
    pickle.loads(pickle.dumps(model))


def test_copies_of_a_model_in_training_are_ordinary(device: str) -> None:
    model = Net().to(device)
    overspill.offload_training(model, weights=True, recompute=True)
    plainly(model, next(batches(1, device)), 0)
    twin = copy.deepcopy(model)
    assert managed(twin) is None
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert managed(model) is not None


def test_a_graph_may_outlive_the_end(device: str) -> None:
    reference, model = pair(Net, device)
    batch = next(batches(1, device))
    overspill.offload_training(model, recompute=True)
    torch.manual_seed(3)
    loss = loss_of(model, batch)
    overspill.restore(model)
    loss.backward()
    torch.manual_seed(3)
    plainly(reference, batch, 0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# Two hundred steps.


@pytest.mark.parametrize("strategy", ["activations", "weights", "all"])
def test_memory_is_flat_over_two_hundred_steps(device: str, strategy: str) -> None:
    model = Net(3).to(device)
    overspill.offload_training(model, **STRATEGIES[strategy])
    pinned, process, on_device = [], [], []
    for step, batch in enumerate(batches(200, device)):
        plainly(model, batch, step)
        model.zero_grad()
        if step in (60, 199):
            gc.collect()
            pinned.append(activations_of(model).pinned_bytes)
            process.append(psutil.Process().memory_info().rss)
            on_device.append(torch.cuda.memory_allocated() if device != "cpu" else 0)
    assert pinned[1] == pinned[0]
    assert on_device[1] <= on_device[0]
    assert process[1] <= process[0] + (8 << 20)
    assert len(activations_of(model)._order) < 100

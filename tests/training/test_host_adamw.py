"""HostAdamW: torch's AdamW bit for bit, whatever is done of a step while backward is still under way."""

import copy
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.errors import StateError
from overspill.homes import HostParameter
from overspill.training import early as early_work
from overspill.training import gradient_workers, host_adamw
from overspill.training.host_adamw import HostAdamW
from support import Net, Where, aligned, run_program


@pytest.fixture(autouse=True)
def _host_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs: where it is short, nothing is updated early."""
    monkeypatch.setattr(early_work, "free_memory", early_work.total_memory)


STEPS = 22
WIDTH = 37  # no multiple of what the kernels take at once


class Here(torch.autograd.Function):
    """Calls `then` when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.then()
        return gradient, None


class Model(nn.Module):
    """Two linear layers. Backward calls `between` when it is done with the second and has not begun the first."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.unused = nn.Linear(3, 3)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Here.apply(torch.tanh(self.first(x)), lambda: self.between())  # type: ignore[no-untyped-call]
        return self.second(hidden).square().mean()


def fresh() -> Model:
    return cast(Model, aligned(Model()))


def twins(model: nn.Module) -> tuple[Any, Any]:
    return aligned(model), aligned(copy.deepcopy(model))


def batches(count: int = STEPS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        yield torch.randn(5, width, generator=generator).to(dtype) * 10 ** (index % 3 - 1)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.detach(), other.detach()), name
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad), f"gradient of {name}"


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    one, other = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert state.keys() == other[index].keys()
        for name, values in state.items():
            assert torch.equal(values, other[index][name]), f"{name} of parameter {index}"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def steps_done(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    return int(optimizer.state.get(parameter, {}).get("step", 0))


def finish_early_work() -> None:
    for count in {1, torch.get_num_threads()}:
        barrier = threading.Barrier(count)
        for future in [gradient_workers.workers(count).submit(barrier.wait, 20) for _ in range(count)]:
            future.result()


def updated(optimizer: HostAdamW, parameter: torch.Tensor, update: int = 1) -> Callable[[], None]:
    """Waits until a parameter has had so many updates: all of that update, and not just its count."""

    def wait() -> None:
        early = optimizer._early
        assert isinstance(early, early_work.EarlyUpdates)
        until(lambda: parameter in early._updates and early._updates[parameter].version >= 0)
        assert steps_done(optimizer, parameter) == update

    return wait


# ---------------------------------------------------------------- same bits


OPTIONS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "betas": (0.5, 0.7), "eps": 1e-3},
    {"lr": torch.tensor(2e-3)},
]


@pytest.mark.parametrize("undo", [None, True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_gives_the_bits_of_torch(options: dict[str, Any], fused: bool, undo: bool | None) -> None:
    ours, theirs = twins(Model())
    options = {"lr": 3e-3, **options}
    host = HostAdamW(ours.parameters(), fused=fused, **options)
    usual = torch.optim.AdamW(theirs.parameters(), fused=fused or None, **options)
    for x in batches():
        host.zero_grad()
        usual.zero_grad()
        loss = ours(x)
        if undo is None:
            loss.backward()
        else:
            with host.overlap(undo=undo):
                loss.backward()
            finish_early_work()
        host.step()
        expected = theirs(x)
        expected.backward()
        usual.step()
        assert torch.equal(loss, expected)
        assert_same(ours, theirs)
    assert_same_state(host, usual)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_too(dtype: torch.dtype, fused: bool) -> None:
    ours, theirs = twins(Model().to(dtype))
    host = HostAdamW(ours.parameters(), fused=fused, eps=1e-4)
    usual = torch.optim.AdamW(theirs.parameters(), fused=fused or None, eps=1e-4)
    for x in batches(dtype=dtype):
        train(ours, host, x)
        train(theirs, usual, x)
    assert_same(ours, theirs)
    assert_same_state(host, usual)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One usual step. A HostAdamW has updated all parameters, or taken all norms, before it is called."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(x)
    if isinstance(optimizer, HostAdamW):
        with optimizer.overlap():
            loss.backward()
        finish_early_work()
    else:
        loss.backward()
    optimizer.step()
    return loss


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)  # moves a beta too


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def by_lambda(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 1.1**step])


@pytest.mark.parametrize("schedule", [one_cycle, cosine, by_lambda])
def test_schedules_and_groups_count_as_they_stand_at_the_step(
    schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
) -> None:
    ours, theirs = twins(Model())
    groups = lambda model: [  # noqa: E731
        {"params": model.first.parameters(), "lr": 1e-2},
        {"params": model.second.parameters(), "weight_decay": 0.5, "betas": (0.8, 0.9)},
    ]
    host, usual = HostAdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    scheduled = [schedule(host), schedule(usual)]
    for x in batches():
        train(ours, host, x)
        train(theirs, usual, x)
        for one in scheduled:
            one.step()
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_schedule_that_moves_between_backward_and_step_counts_in_that_step() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    scheduled = [cosine(host), cosine(usual)]
    for index, x in enumerate(batches()):
        ours.between = updated(host, ours.second.weight, index + 1)
        for model, optimizer, schedule in zip((ours, theirs), (host, usual), scheduled, strict=True):
            optimizer.zero_grad()
            loss = model(x)
            if model is ours:
                with host.overlap():
                    loss.backward()
            else:
                loss.backward()
            schedule.step()
            optimizer.step()
    assert_same(ours, theirs)


def test_a_group_can_be_added_later() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.first.parameters()), torch.optim.AdamW(theirs.first.parameters(), fused=True)
    for index, x in enumerate(batches(6)):
        if index == 3:
            host.add_param_group({"params": ours.second.parameters(), "lr": 0.1})
            usual.add_param_group({"params": theirs.second.parameters(), "lr": 0.1})
        train(ours, host, x)
        train(theirs, usual, x)
    assert_same(ours, theirs)


def test_a_closure_is_called_and_its_loss_returned() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for x in batches(4):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            host.zero_grad()
            loss: torch.Tensor = ours(x)
            with host.overlap():
                loss.backward()
            return loss

        assert torch.equal(host.step(closure), train(theirs, usual, x))
    assert_same(ours, theirs)


# ---------------------------------------------------------------- state dicts and copies


@pytest.mark.parametrize("fused", [True, None])
def test_state_dicts_go_both_ways_and_training_goes_on_with_the_same_bits(fused: bool | None) -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters(), lr=1.0), torch.optim.AdamW(theirs.parameters(), fused=fused)
    data = list(batches(18))
    for x in data[:6]:
        train(theirs, usual, x)
    ours.load_state_dict(theirs.state_dict())
    host.load_state_dict(copy.deepcopy(usual.state_dict()))
    for x in data[6:12]:
        train(ours, host, x)
        train(theirs, usual, x)
    assert_same(ours, theirs)
    assert_same_state(host, usual)

    other = copy.deepcopy(theirs)
    back = torch.optim.AdamW(other.parameters())
    back.load_state_dict(copy.deepcopy(host.state_dict()))
    for x in data[12:]:
        train(other, back, x)
        train(theirs, usual, x)
    assert_same(other, theirs)
    assert_same_state(back, usual)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_or_pickled_optimizer_goes_on_with_the_copied_model(how: Callable[[Any], Any]) -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    data = list(batches(12))
    for x in data[:6]:
        train(model, optimizer, x)
    del model.between  # a lambda cannot be pickled
    copied: tuple[Model, HostAdamW] = how((model, optimizer))
    model.between = copied[0].between = lambda: None
    aligned(copied[0])
    for x in data[6:]:
        train(model, optimizer, x)
        train(*copied, x)
    assert_same(*(model, copied[0]))
    assert_same_state(optimizer, copied[1])
    assert copied[1].max_grad_norm == 0.1


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, math.inf])
def test_clipping_gives_the_bits_of_clip_grad_norm(max_norm: float, overlapped: bool) -> None:
    ours, theirs = twins(Model(200))
    ours.first.double()  # torch sums norms by dtype
    theirs.first.double()
    forward = lambda model, x: model.second(model.first(x.double()).float()).square().mean()  # noqa: E731
    host = HostAdamW(ours.parameters(), lr=1e-2, max_grad_norm=max_norm)
    usual = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for x in batches(width=200):
        host.zero_grad()
        usual.zero_grad()
        if overlapped:
            with host.overlap():
                forward(ours, x).backward()
        else:
            forward(ours, x).backward()
        host.step()
        forward(theirs, x).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        usual.step()
        assert host.grad_norm is not None
        assert torch.equal(host.grad_norm, norm)
        assert_same(ours, theirs)


def test_norms_are_taken_in_backward_and_nothing_changes_before_the_last_is_known() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters(), max_grad_norm=0.1), torch.optim.AdamW(theirs.parameters(), fused=True)
    measured = []

    def between() -> None:
        early = host._early
        assert isinstance(early, early_work.EarlyNorms)
        until(lambda: ours.second.weight in early._norms)
        measured.append(early._norms[ours.second.weight][2])
        assert torch.equal(ours.second.weight, theirs.second.weight)

    ours.between = between
    for x in batches(3):
        host.zero_grad()
        with host.overlap():
            ours(x).backward()
        assert_weights_are(ours, theirs)
        host.step()
        usual.zero_grad()
        theirs(x).backward()
        assert torch.equal(measured[-1], torch.linalg.vector_norm(theirs.second.weight.grad))
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        usual.step()
        assert_same(ours, theirs)


def assert_weights_are(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.detach(), two.detach())


def test_clipping_counts_all_that_was_accumulated() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters(), max_grad_norm=0.2), torch.optim.AdamW(theirs.parameters(), fused=True)
    for pair in pairs():
        host.zero_grad()
        usual.zero_grad()
        for x in pair:
            with host.overlap():
                ours(x).backward()
            theirs(x).backward()
        host.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        usual.step()
        assert_same(ours, theirs)


def test_a_norm_that_was_taken_of_half_a_gradient_does_not_count() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters(), max_grad_norm=0.2), torch.optim.AdamW(theirs.parameters(), fused=True)
    for pair in pairs():
        host.zero_grad()
        usual.zero_grad()
        with host.overlap():
            ours(pair[0]).backward()
        finish_early_work()
        early = host._early
        assert isinstance(early, early_work.EarlyNorms)
        assert early._norms
        early._arrivals.close()  # no worker measures again
        ours(pair[1]).backward()
        for x in pair:
            theirs(x).backward()
        host.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        usual.step()
        assert_same(ours, theirs)


def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    every = batches()
    return zip(every, every, strict=True)


def test_a_step_without_any_gradient_has_norm_zero_and_changes_nothing() -> None:
    ours, theirs = twins(Model())
    host = HostAdamW(ours.parameters(), max_grad_norm=1.0)
    host.step()
    assert host.grad_norm == 0
    assert_same(ours, theirs)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_a_norm_that_nothing_can_have_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        HostAdamW(Model().parameters(), max_grad_norm=norm)


# ---------------------------------------------------------------- while backward goes on


@pytest.mark.parametrize("undo", [True, False])
def test_a_block_is_updated_before_the_gradient_of_the_block_before_it_exists(undo: bool) -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    before = model.second.weight.detach().clone()
    seen = []

    def between() -> None:
        updated(optimizer, model.second.weight)()
        assert not torch.equal(model.second.weight, before)
        assert model.first.weight.grad is None
        seen.append(True)

    model.between = between
    with optimizer.overlap(undo=undo):
        model(next(batches())).backward()
    optimizer.step()
    assert seen == [True]
    assert all(steps_done(optimizer, p) == (p.grad is not None) for p in model.parameters())


def test_accumulated_gradients_count_when_the_last_backward_is_overlapped() -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for first, second in pairs():
        host.zero_grad()
        ours(first).backward()
        loss = ours(second)
        with host.overlap():
            loss.backward()
        host.step()
        usual.zero_grad()
        theirs(first).backward()
        theirs(second).backward()
        usual.step()
        assert_same(ours, theirs)


def test_a_backward_that_saw_parameters_ahead_of_their_step_is_an_error() -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    first, second = batches(2)
    with optimizer.overlap():
        model(first).backward()
    finish_early_work()
    with pytest.raises(StateError, match=r"parameter \d of group 0 .* between overlap\(\) and step\(\)"):
        model(second).backward()
    with pytest.raises(StateError, match="twice"), optimizer.overlap():
        pass
    optimizer.zero_grad()
    train(model, optimizer, second)


def test_two_backwards_within_one_overlap_are_an_error_and_change_nothing() -> None:
    ours, theirs = twins(Model())
    optimizer = HostAdamW(ours.parameters())
    first, second = batches(2)

    def accumulate() -> None:
        with optimizer.overlap():
            ours(first).backward()
            finish_early_work()
            ours(second).backward()

    with pytest.raises(StateError, match="second gradient of parameter"):
        accumulate()
    optimizer.zero_grad()
    assert_same(ours, theirs)
    assert not optimizer.state


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_share_a_parameter_are_exact_or_an_error(reentrant: bool) -> None:
    ours, theirs = (nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model[1].weight = model[0].weight
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=reentrant)
        return x.sum()

    for x in batches(5, width=8):
        x.requires_grad_()
        usual.zero_grad()
        forward(theirs, x).backward()
        usual.step()
        host.zero_grad()
        loss = forward(ours, x)
        if reentrant:
            # Whichever is first to notice: we, or autograd, which needs the weight that was updated too soon.
            either = pytest.raises(RuntimeError, match=r"use_reentrant=False|modified by an inplace operation")
            with either, host.overlap():
                loss.backward()
            return
        with host.overlap():
            loss.backward()
        host.step()
        assert_same(ours, theirs)


def test_a_use_of_a_weight_that_its_gradient_does_not_wait_for_is_an_error_not_a_race() -> None:
    weight = nn.Parameter(torch.randn(8))
    x = nn.Parameter(torch.randn(8))
    optimizer = HostAdamW([weight])
    y = Here.apply(x * weight.detach(), lambda: None)  # type: ignore[no-untyped-call]
    loss = (y + weight).sum()
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="inplace"), optimizer.overlap():
        loss.backward()
    assert torch.equal(weight, before)


def test_a_parameter_used_twice_a_frozen_one_and_one_without_gradient() -> None:
    def build() -> Model:
        model = Model()
        model.second.weight = model.first.weight
        model.first.bias.requires_grad_(False)
        return model

    torch.manual_seed(0)
    ours = build()
    theirs = build()
    theirs.load_state_dict(ours.state_dict())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for x in batches():
        train(ours, host, x)
        train(theirs, usual, x)
    assert_same(ours, theirs)
    assert_same_state(host, usual)
    assert ours.unused.weight not in host.state


# ---------------------------------------------------------------- the way back


@pytest.fixture
def trained() -> tuple[Model, HostAdamW, Model, torch.optim.Optimizer]:
    """Twins after three steps, the first of which waits in each backward until its second layer is updated."""
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for x in batches(3):
        train(ours, host, x)
        train(theirs, usual, x)
    host.zero_grad()
    usual.zero_grad()
    ours.between = updated(host, ours.second.weight, 4)
    return ours, host, theirs, usual


Trained = tuple[Model, HostAdamW, Model, torch.optim.Optimizer]


def goes_on_as_if_nothing_had_been(trained: Trained) -> None:
    ours, host, theirs, usual = trained
    ours.between = lambda: None
    host.zero_grad()
    usual.zero_grad()
    assert_same(ours, theirs)
    assert_same_state(host, usual)
    for x in batches(3):
        train(ours, host, x)
        train(theirs, usual, x)
    assert_same(ours, theirs)
    assert_same_state(host, usual)


def test_a_step_that_is_skipped_leaves_no_trace(trained: Trained) -> None:
    ours, host, *_ = trained
    with host.overlap():
        ours(next(batches())).backward()
    goes_on_as_if_nothing_had_been(trained)


def test_nor_does_the_very_first_step_when_it_is_skipped() -> None:
    ours, theirs = twins(Model())
    host = HostAdamW(ours.parameters())
    ours.between = updated(host, ours.second.weight)
    with host.overlap():
        ours(next(batches())).backward()
    host.zero_grad()
    assert_same(ours, theirs)
    assert not host.state


def test_an_exception_in_backward_leaves_parameters_and_state_as_they_were(trained: Trained) -> None:
    ours, host, *_ = trained
    wait = ours.between

    def fail() -> None:
        wait()
        raise ArithmeticError("of the user")

    ours.between = fail
    with pytest.raises(ArithmeticError), host.overlap():
        ours(next(batches())).backward()
    goes_on_as_if_nothing_had_been(trained)


@pytest.mark.parametrize("look", [HostAdamW.state_dict, copy.deepcopy, pickle.dumps])
def test_who_looks_at_the_state_before_the_step_sees_it_before_the_step(
    trained: Trained, look: Callable[[HostAdamW], Any]
) -> None:
    ours, host, theirs, usual = trained
    x = next(batches())
    with host.overlap():
        ours(x).backward()
    look(host)
    assert_weights_are(ours, theirs)
    assert_same_state(host, usual)
    host.step()
    theirs(x).backward()
    usual.step()
    goes_on_as_if_nothing_had_been(trained)


def clip(model: Model) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def scale(model: Model) -> None:
    assert model.second.weight.grad is not None
    model.second.weight.grad.mul_(3)


def drop(model: Model) -> None:
    model.second.weight.grad = None


def replace(model: Model) -> None:
    model.second.weight.grad = torch.ones_like(model.second.weight)


@pytest.mark.parametrize("change", [clip, scale, drop, replace])
def test_gradients_that_change_before_the_step_count_as_they_are_then(
    trained: Trained, change: Callable[[Model], None]
) -> None:
    ours, host, theirs, usual = trained
    x = next(batches())
    with host.overlap():
        ours(x).backward()
    theirs(x).backward()
    for model in (ours, theirs):
        change(model)
    host.step()
    usual.step()
    goes_on_as_if_nothing_had_been(trained)


def test_an_edit_of_a_parameter_that_is_ahead_of_its_step_is_an_error(trained: Trained) -> None:
    ours, host, *_ = trained
    with host.overlap():
        ours(next(batches())).backward()
    with torch.no_grad():
        ours.second.weight.zero_()
    with pytest.raises(StateError, match=r"parameter 2 of group 0 .* edited"):
        host.step()
    goes_on_as_if_nothing_had_been(trained)


def test_without_undo_an_exception_says_what_was_updated() -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    wait = updated(optimizer, model.second.weight)

    def fail() -> None:
        wait()
        raise ArithmeticError("of the user")

    model.between = fail
    with pytest.raises(ArithmeticError) as caught, optimizer.overlap(undo=False):
        model(next(batches())).backward()
    assert "2 parameters were updated in backward" in caught.value.__notes__[0]
    model.between = lambda: None
    train(model, optimizer, next(batches()))


@pytest.mark.parametrize("skip", [HostAdamW.zero_grad, HostAdamW.state_dict])
def test_without_undo_a_step_that_does_not_follow_is_an_error(skip: Callable[[HostAdamW], None]) -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    model.between = updated(optimizer, model.second.weight)
    with optimizer.overlap(undo=False):
        model(next(batches())).backward()
    with pytest.raises(StateError, match="undo=False"):
        skip(optimizer)


@pytest.mark.parametrize("change", [clip, scale, drop, replace])
def test_without_undo_a_gradient_that_changes_is_an_error(change: Callable[[Model], None]) -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    model.between = updated(optimizer, model.second.weight)
    with optimizer.overlap(undo=False):
        model(next(batches())).backward()
    change(model)
    with pytest.raises(StateError, match=r"the gradient of parameter [23] .*max_grad_norm"):
        optimizer.step()


def test_copies_for_the_way_back_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    allocated = []

    def much(device: torch.device) -> int:
        allocated.append(device)
        return 1 << 50

    monkeypatch.setattr(early_work, "free_memory", much)  # asked before each allocation
    for x in batches(8):
        with optimizer.overlap():
            model(x).backward()
        finish_early_work()
        optimizer.zero_grad()  # takes all of it back
        train(model, optimizer, x)
    # Of each parameter, of its two averages and of its count, one copy, however many steps there were.
    assert len(allocated) == 4 * sum(parameter.grad is not None for parameter in model.parameters())


def test_where_there_is_no_memory_to_go_back_updates_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins(Model())
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    monkeypatch.setattr(early_work, "free_memory", lambda device: 0)
    for x in batches(4):
        before = ours.second.weight.detach().clone()
        host.zero_grad()
        with host.overlap():
            ours(x).backward()
        finish_early_work()
        assert torch.equal(ours.second.weight, before)
        host.step()
        train(theirs, usual, x)
        assert_same(ours, theirs)


def test_nothing_is_left_on_parameters() -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    for x in batches(2):
        train(model, optimizer, x)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


# ---------------------------------------------------------------- what the kernel does not see


def test_autograd_notices_the_update() -> None:
    model = fresh()
    optimizer = HostAdamW(model.parameters())
    x = next(batches())
    stale = model(x)
    model(x).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize("overlapped", [True, False])
def test_gradients_and_state_in_another_order_of_elements(overlapped: bool) -> None:
    ours = nn.Parameter(torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last))
    theirs = nn.Parameter(ours.detach().clone(memory_format=torch.contiguous_format))
    host, usual = HostAdamW([ours]), torch.optim.AdamW([theirs], fused=True)
    for index in range(6):
        gradient = torch.randn(6, 3, 5, 5)
        if overlapped:
            host.zero_grad()
            with host.overlap():
                (ours * gradient).sum().backward()
            host.step()
        else:
            ours.grad = gradient
            host.step()
        theirs.grad = gradient.clone()
        usual.step()
        if index == 2:
            host.load_state_dict(copy.deepcopy(usual.state_dict()))  # laid out as `theirs`
    assert torch.equal(ours, theirs)
    assert torch.equal(host.state[ours]["exp_avg_sq"], usual.state[theirs]["exp_avg_sq"])


def test_a_parameter_with_gaps_is_refused_by_name_unless_the_kernel_can() -> None:
    whole = torch.randn(8, 4)
    parameter = nn.Parameter(whole[::2])
    parameter.grad = torch.randn(4, 4)
    with pytest.raises(StateError, match=r"weight \(float32\[4, 4\]\) has gaps"):
        HostAdamW([("weight", parameter)]).step()
    twin = nn.Parameter(parameter.detach().clone())
    twin.grad = parameter.grad
    HostAdamW([parameter], fused=False).step()
    torch.optim.AdamW([twin]).step()
    assert torch.equal(parameter, twin)


@pytest.mark.parametrize("overlapped", [True, False])
def test_sparse_gradients_are_refused_by_name(overlapped: bool) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = HostAdamW(embedding.named_parameters())

    def train() -> None:
        loss = embedding(torch.tensor([1, 2])).sum()
        if overlapped:
            with optimizer.overlap():
                loss.backward()
        loss.backward()
        optimizer.step()

    with pytest.raises(StateError, match=r"weight \(float32\[10, 4\]\) is sparse"):
        train()
    assert torch.equal(embedding.weight, before)


# ---------------------------------------------------------------- workers that fail


def before_each_early_update(monkeypatch: pytest.MonkeyPatch, call: Callable[[torch.Tensor], None]) -> None:
    update = early_work.EarlyUpdates._update

    def called(self: Any, parameter: torch.Tensor) -> None:
        call(parameter)
        update(self, parameter)

    monkeypatch.setattr(early_work.EarlyUpdates, "_update", called)


def test_what_fails_in_a_worker_is_raised_by_the_step_with_the_name_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = twins(Model())
    optimizer = HostAdamW(ours.named_parameters())
    failed = threading.Event()

    def fail(parameter: torch.Tensor) -> None:
        if parameter is ours.second.weight and not failed.is_set():
            failed.set()
            raise OSError("the link is down")

    before_each_early_update(monkeypatch, fail)
    ours.between = lambda: until(failed.is_set)
    with optimizer.overlap():
        ours(next(batches())).backward()
    with pytest.raises(StateError, match=r"second.weight .* failed during backward: the link is down") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, OSError)
    optimizer.zero_grad()
    assert_same(ours, theirs)
    train(ours, optimizer, next(batches()))


def test_an_update_that_fails_half_way_is_taken_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins(Model())
    optimizer = HostAdamW(ours.named_parameters())
    failed = threading.Event()

    def fail(parameters: list[torch.Tensor], *args: Any, **options: Any) -> None:
        for parameter in parameters:
            parameter[:1] = math.nan
        failed.set()
        raise MemoryError("no room")

    ours.between = lambda: until(failed.is_set)
    with monkeypatch.context() as patched:
        patched.setattr(host_adamw, "adam", fail)
        with optimizer.overlap():
            ours(next(batches())).backward()
        with pytest.raises(StateError, match=r"second\.\w+ .* failed during backward: no room"):
            optimizer.step()
    optimizer.zero_grad()
    assert_same(ours, theirs)
    assert not optimizer.state


# ---------------------------------------------------------------- options without effect, scalers


def test_overlap_without_effect_is_refused() -> None:
    parameter = nn.Parameter(torch.randn(3))
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    with pytest.raises(StateError, match="no parameter"), HostAdamW([frozen]).overlap():
        pass
    with pytest.raises(StateError, match="undo=False"), HostAdamW([parameter], max_grad_norm=1.0).overlap(undo=False):
        pass


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_grad_scaler_gives_the_bits_that_it_gives_with_torch(unscaled: bool) -> None:
    ours, theirs = twins(Model())
    max_norm = 0.1 if unscaled else None
    host = HostAdamW(ours.parameters(), max_grad_norm=max_norm)
    usual = torch.optim.AdamW(theirs.parameters(), fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for index, x in enumerate(batches(8)):
        if index == 3:
            x[0, 0] = math.inf  # a step that is skipped
        for model, optimizer, scaler in zip((ours, theirs), (host, usual), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(x)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
                if model is theirs:
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert_weights_are(ours, theirs)
    assert_same_state(host, usual)


def test_a_grad_scaler_is_refused_where_it_would_come_too_late() -> None:
    x = next(batches())

    def step(optimizer: HostAdamW, model: Model, overlapped: bool = False) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        loss = scaler.scale(model(x))
        if overlapped:
            with optimizer.overlap():
                loss.backward()
        else:
            loss.backward()
        scaler.step(optimizer)

    for options, overlapped, remedy in (
        ({}, True, "cannot be used with a GradScaler"),
        ({"max_grad_norm": 1.0}, False, "unscale_"),
        ({"fused": False}, False, "fused=True"),
    ):
        ours, theirs = twins(Model())
        with pytest.raises(StateError, match=remedy):
            step(HostAdamW(ours.parameters(), **options), ours, overlapped)  # type: ignore[arg-type]
        assert_weights_are(ours, theirs)


# ---------------------------------------------------------------- threads and processes


def test_two_threads_train_two_models() -> None:
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        ours, theirs = twins(Model())
        host = HostAdamW(ours.parameters(), max_grad_norm=0.1 if seed else None)
        usual = torch.optim.AdamW(theirs.parameters(), fused=True)
        for x in batches(60):
            train(ours, host, x)
            usual.zero_grad()
            theirs(x).backward()
            if seed:
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            usual.step()
        assert_same(ours, theirs)
        results[seed] = True

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {0: True, 1: True}


def test_workers_compute_with_as_many_threads_as_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    model = Model()
    optimizer = HostAdamW(model.parameters())
    before_each_early_update(monkeypatch, lambda parameter: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for count in (3, 2):
            torch.set_num_threads(count)
            seen.clear()
            model.between = updated(optimizer, model.second.weight, 4 - count)
            train(model, optimizer, next(batches()))
            assert set(seen) == {count}
    finally:
        torch.set_num_threads(before)


def test_a_forked_child_has_workers_of_its_own_and_a_fork_within_overlap_is_an_error() -> None:
    out = run_program(
        """
        import os, sys, torch
        from overspill.errors import StateError
        from overspill.training.gradient_workers import workers
        from overspill.training.host_adamw import HostAdamW
        torch.set_num_threads(1)
        model = torch.nn.Linear(8, 8)
        optimizer = HostAdamW(model.parameters())
        def train():
            optimizer.zero_grad()
            with optimizer.overlap():
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        train()
        def in_child(work):
            sys.stdout.flush()
            if os.fork() == 0:
                work()
                sys.stdout.flush()
                os._exit(0)
            os.wait()
        def go_on():
            optimizer.zero_grad()
            with optimizer.overlap():
                model(torch.ones(2, 8)).sum().backward()
            workers(1).submit(lambda: None).result(timeout=20)  # behind the updates
            print("child", int(optimizer.state[model.weight]["step"]))
        in_child(go_on)
        def step():
            try:
                optimizer.step()
            except StateError as error:
                print("forked" in str(error))
        optimizer.zero_grad()
        with optimizer.overlap():
            model(torch.ones(2, 8)).sum().backward()
            in_child(step)
        optimizer.step()
        print("parent", int(optimizer.state[model.weight]["step"]))
        """
    )
    assert out.split("\n")[:3] == ["child 2", "True", "parent 2"]


def test_a_program_may_end_while_a_worker_is_at_work() -> None:
    run_program(
        """
        import torch
        from overspill.training.host_adamw import HostAdamW
        parameters = [torch.nn.Parameter(torch.ones(1 << 21)) for _ in range(8)]
        optimizer = HostAdamW(parameters)
        with optimizer.overlap():
            sum((parameter * 2).sum() for parameter in parameters).backward()
        """
    )


# ---------------------------------------------------------------- offloaded models


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_an_offloaded_model_trains_with_the_bits_of_its_twin(max_norm: float | None, tmp_path: Path) -> None:
    ours, theirs = twins(Net())
    Where("cpu", "cpu").offload(ours, folder=tmp_path / "offload")
    assert any(isinstance(parameter, HostParameter) for parameter in ours.parameters())
    host = HostAdamW(ours.parameters(), lr=1e-2, max_grad_norm=max_norm)
    usual = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        ids = torch.randint(0, 64, (2, 6), generator=generator)
        losses = []
        for model, optimizer in ((ours, host), (theirs, usual)):
            optimizer.zero_grad()
            loss = model(ids).square().mean()
            if model is ours:
                with host.overlap():
                    loss.backward()
                finish_early_work()
                early = host._early
                done = early._updates if isinstance(early, early_work.EarlyUpdates) else early._norms  # type: ignore[union-attr]
                assert done.keys() == set(ours.parameters())
            else:
                loss.backward()
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert_same(ours, theirs)
    assert_same_state(host, usual)
    overspill.restore(ours)
    assert_same(ours, theirs)


def test_a_model_on_disk_trains_too(tmp_path: Path) -> None:
    ours, theirs = twins(Net(blocks=2))
    overspill.offload(ours, to="disk", folder=tmp_path / "offload", modules=["blocks.0"])
    host, usual = HostAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for index in range(4):
        ids = torch.arange(6)[None] + index
        for model, optimizer in ((ours, host), (theirs, usual)):
            optimizer.zero_grad()
            loss = model(ids).square().mean()
            if model is ours:
                with host.overlap():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
        assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_parameters_on_a_gpu_are_updated_there_beside_those_in_host_memory(max_norm: float | None) -> None:
    ours, theirs = twins(Model())
    for model in (ours, theirs):
        model.second.cuda()
    host = HostAdamW(ours.parameters(), max_grad_norm=max_norm)
    usual = torch.optim.AdamW(theirs.parameters(), fused=True)
    for x in batches():
        for model, optimizer in ((ours, host), (theirs, usual)):
            optimizer.zero_grad()
            loss = model.second(torch.tanh(model.first(x)).cuda()).square().mean()
            if model is ours:
                with host.overlap():
                    loss.backward()
            else:
                loss.backward()
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            optimizer.step()
        assert_same(ours, theirs)

"""The contract of an offloaded model, promise by promise, on every tier."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import overspill
from overspill.errors import StateError
from overspill.homes import DiskTensor, HostTensor
from overspill.managed import managed
from support import TIERS, Block, Net, aligned, loaded, run, save_checkpoint, streamed_units, window_bytes_in_use

CASES = [
    *(pytest.param((tier, "cpu"), id=f"{tier}-cpu") for tier in [*TIERS, "mapped"]),
    *(pytest.param((tier, "cuda:0"), id=f"{tier}-cuda", marks=pytest.mark.gpu) for tier in TIERS),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    tier, device = request.param
    if tier == "mapped":
        request.getfixturevalue("mapped")
        tier = "disk"
    return tier, device


@pytest.fixture
def tier(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture
def device(case: tuple[str, str]) -> str:
    return case[1]


@pytest.fixture
def reference(device: str) -> Net:
    return aligned(Net()).eval().to(device)  # type: ignore[return-value]


@pytest.fixture
def model(tier: str, device: str, reference: Net, tmp_path: Path) -> Net:
    return loaded(Net, save_checkpoint(reference, tmp_path / "checkpoint"), tier, device)  # type: ignore[return-value]


IDS = torch.arange(24).view(2, 12)


def bytes_moved(moved: dict[str, int]) -> int:
    return moved["disk"] + moved["cpu"]


# 1. Same bits.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_have_the_same_bits_and_the_bytes_really_moved(
    mode: Callable[[], Any], tier: str, model: Net, reference: Net, moved: dict[str, int]
) -> None:
    streamed = sum(spec.nbytes for unit in streamed_units(model) for spec in unit.store.layout.specs)
    assert streamed > 0
    for _ in range(3):
        with mode():
            assert torch.equal(model(IDS), run(reference, IDS))
    assert bytes_moved(moved) >= streamed
    assert (moved["cpu"] > 0) == (tier in ("cpu", "mixed"))
    assert (moved["disk"] > 0) == (tier in ("disk", "mixed"))


def test_gradients_have_the_same_bits_and_arrive_at_the_homes(model: Net, reference: Net) -> None:
    for _ in range(2):
        model(IDS).square().mean().backward()
        run(reference, IDS).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None, name
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu()), name


def test_an_optimizer_step_has_the_same_bits_and_the_next_forward_sees_it(model: Net, reference: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    expected = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.5)
    for _ in range(3):
        model(IDS).square().mean().backward()
        run(reference, IDS).square().mean().backward()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    assert torch.equal(model(IDS), run(reference, IDS))


def test_backward_holds_no_slab(model: Net) -> None:
    output = model(IDS)
    for unit in streamed_units(model):
        under_way = unit.drop()
        if under_way is not None:
            under_way.wait_host()
    assert window_bytes_in_use(model) == 0, "the graph keeps weights alive"
    output.sum().backward()


def test_a_weight_edited_between_forward_and_backward_raises_as_in_eager(tier: str, model: Net) -> None:
    index = 0 if tier != "mixed" else next(i for i, b in enumerate(model.blocks) if _is_streamed(model, i))
    output = model(IDS).sum()
    with torch.no_grad():
        model.blocks[index].up.weight.mul_(2)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def _is_streamed(model: Net, index: int) -> bool:
    return any(unit.name == f"blocks.{index}" for unit in streamed_units(model))


def test_an_activation_edited_in_place_raises_as_in_eager(tmp_path: Path, device: str, tier: str) -> None:
    class Edits(Block):
        def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
            y = torch.relu(self.up(x))
            z = self.down(y)
            y.add_(1)  # relu and down saved it
            return z

    def build() -> nn.Module:
        return nn.Sequential(Edits(), Edits(), Edits())

    model = loaded(build, save_checkpoint(build(), tmp_path), tier, device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 32)).sum().backward()


# 2. Never silently wrong.


def test_shape_dtype_and_requires_grad_are_told_without_reading(
    model: Net, reference: Net, moved: dict[str, int]
) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, theirs.requires_grad), name
        assert isinstance(ours, nn.Parameter)
        assert not ours.is_meta
        assert ours.numel() == theirs.numel()
    assert bytes_moved(moved) == 0


def test_every_way_to_read_gives_the_true_values(model: Net, reference: Net) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        truth = theirs.detach().cpu()
        assert torch.equal(ours.detach().cpu(), truth), name
        assert torch.equal((ours + 0).cpu(), truth), name
        assert ours.tolist() == truth.tolist(), name
        assert (ours.detach().cpu().numpy() == truth.numpy()).all(), name
        assert torch.equal(ours.data.cpu(), truth), name
        assert torch.equal(ours[0].cpu(), truth[0]), name
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name


def test_a_weight_used_without_its_module_being_called_is_right(model: Net, reference: Net, device: str) -> None:
    x = torch.randn(3, 32, device=device)
    for ours, theirs in ((model.embed, reference.embed), (model.blocks[1].up, reference.blocks[1].up)):
        assert torch.equal(functional.linear(x, ours.weight), functional.linear(x, theirs.weight))
    assert torch.equal(model.blocks[2].up.forward(x), reference.blocks[2].up.forward(x))


def test_a_weight_that_is_assigned_what_it_is_stays_right(model: Net, reference: Net, device: str) -> None:
    """Trainer calls `model.to(device)` whatever the device is, and that assigns every parameter its own data."""
    for parameter in model.parameters():
        parameter.data = parameter.data
    homes = {name: type(parameter) for name, parameter in model.named_parameters()}
    assert nn.ModuleList([model]).to(device)[0] is model
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == homes
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(ours.detach().cpu(), theirs.detach().cpu()), name
    assert torch.equal(model(IDS), run(reference, IDS))


@pytest.mark.parametrize(
    ("convert", "become"),
    [(nn.Module.half, "float16"), (nn.Module.double, "float64"), (lambda m: m.to("meta"), "meta")],
)
def test_a_model_that_cannot_become_another_in_place_says_so_and_runs_on(
    model: Net, reference: Net, convert: Callable[[nn.Module], nn.Module], become: str
) -> None:
    with pytest.raises(StateError, match=rf"become .*{become}.*overspill\.restore"):
        convert(model)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in reference.parameters()}
    assert torch.equal(model(IDS), run(reference, IDS))


def test_addresses_tell_ties_from_equal_weights(device: str, tmp_path: Path) -> None:
    """PEFT asks for them when it merges an adapter."""
    model = loaded(Net, save_checkpoint(Net(), tmp_path), "disk", device)
    assert isinstance(model, Net)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr() != 0
    assert model.blocks[0].up.weight.data_ptr() != model.blocks[1].up.weight.data_ptr()  # type: ignore[union-attr, operator]


def test_reading_a_weight_in_functions_takes_no_memory_for_good(device: str, tmp_path: Path) -> None:
    reference = Net()
    model = loaded(Net, save_checkpoint(reference, tmp_path), "disk", device)
    model.embed(IDS.to(device))
    functional.linear(torch.randn(3, 32, device=device), model.blocks[0].up.weight)  # type: ignore[union-attr, arg-type]
    promoted = [unit for unit in streamed_units(model) for values in unit.store._values if values.memory is not None]  # type: ignore[attr-defined]
    assert promoted == []


def test_copies_and_pickles_are_ordinary_models(model: Net, reference: Net, device: str) -> None:
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
        assert twin.head.weight is twin.embed.weight
        assert torch.equal(run(aligned(twin).to(device), IDS), run(reference, IDS))
        assert streamed_units(model), "the original stays managed"
    assert torch.equal(model(IDS), run(reference, IDS))


def test_an_output_that_is_a_weight_stays_right_when_its_slab_is_reused(tier: str, device: str, tmp_path: Path) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, kept: list[torch.Tensor]) -> list[torch.Tensor]:
            return [*kept, self.weight, self.weight[:3].t()]

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Returns() for _ in range(8))

        def forward(self) -> list[torch.Tensor]:
            kept: list[torch.Tensor] = []
            for block in self.blocks:
                kept = block(kept)
            return kept

    reference = Collects()
    model = loaded(Collects, save_checkpoint(reference, tmp_path), tier, device)
    with torch.no_grad():
        for _ in range(2):
            for ours, theirs in zip(model(), reference(), strict=True):
                assert torch.equal(ours.cpu(), theirs)


# 3. No write is lost.


def _in_place(net: Net) -> None:
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)
        net.blocks[3].norm.bias.add_(1)


def _through_data(net: Net) -> None:
    net.blocks[0].up.weight.data[0].add_(1)
    net.blocks[1].down.weight.data.copy_(torch.ones(32, 64))


def _data_replaced(net: Net) -> None:
    weight = net.blocks[0].up.weight
    weight.data = torch.full((64, 32), 0.5, device=weight.device)


def _load_state_dict(net: Net) -> None:
    net.load_state_dict({name: value * 3 for name, value in net.state_dict().items()})


def _new_parameter(net: Net) -> None:
    first, third = net.blocks[0].up, net.blocks[2]
    first.weight = nn.Parameter(torch.full((64, 32), 0.25, device=first.weight.device))
    third.down = nn.Linear(64, 32, bias=False, device=third.down.weight.device)
    nn.init.constant_(net.blocks[2].down.weight, 0.125)


def _through_numpy(net: Net) -> None:
    weight = net.blocks[0].up.weight.detach()
    if weight.is_cuda:
        weight.fill_(0.5)
    else:
        weight.numpy()[:] = 0.5


def _buffer(net: Net) -> None:
    net.blocks[0].shift.add_(1)


def _tied(net: Net) -> None:
    with torch.no_grad():
        net.head.weight[3] = 7


EDITS = [
    _in_place,
    _through_data,
    _data_replaced,
    _load_state_dict,
    _new_parameter,
    _through_numpy,
    _buffer,
    _tied,
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("passes_before", [0, 2])
def test_the_next_forward_and_the_next_state_dict_see_an_edit(
    edit: Callable[[Net], None], passes_before: int, model: Net, reference: Net
) -> None:
    with torch.no_grad():
        for _ in range(passes_before):  # the next pass's first units are on the device already
            model(IDS)
    edit(model)
    edit(reference)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), run(reference, IDS))
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


def test_a_write_through_an_alias_that_was_kept_is_seen(model: Net, reference: Net) -> None:
    for make in (lambda p: p.data, lambda p: p.detach(), lambda p: p.detach()[1], lambda p: p.detach().view(-1)):
        ours, theirs = make(model.blocks[0].up.weight), make(reference.blocks[0].up.weight)
        with torch.no_grad():
            for value in (0.5, 0.25):
                model(IDS)
                ours[:] = value
                theirs[:] = value
                assert torch.equal(model(IDS), run(reference, IDS))


def test_a_write_through_a_view_that_is_gone_is_seen_also_the_second_time(model: Net, reference: Net) -> None:
    for value in (0.5, 0.25, 0.125):  # the first one brings a weight from disk into memory, where the others meet it
        for write in (lambda p, value: p[1].fill_(value), lambda p, value: p.view(-1)[:5].mul_(value)):
            with torch.no_grad():
                model(IDS)
                for block in (*model.blocks, *reference.blocks):  # whichever of them the window has kept
                    write(block.up.weight, value)
                assert torch.equal(model(IDS), run(reference, IDS))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_what_a_forward_writes_to_its_own_weights_is_kept(
    mode: Callable[[], Any], tier: str, device: str, tmp_path: Path
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.a.mul_(0.5)
                self.calls += 1
            self.b.data.add_(1)
            return x @ self.a + x @ self.b

    def build() -> nn.Module:
        return nn.Sequential(*(Writes() for _ in range(6)))

    reference = aligned(build()).to(device)
    model = loaded(build, save_checkpoint(reference, tmp_path), tier, device)
    x = torch.randn(2, 8)
    with mode():
        for _ in range(4):
            ours, theirs = model(x), run(reference, x)
            assert torch.equal(ours, theirs)
            if ours.requires_grad:
                ours.sum().backward()
                theirs.sum().backward()
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (mode is torch.no_grad)
        assert ours.grad is None or torch.equal(ours.grad.cpu(), theirs.grad.cpu())


def test_a_weight_that_a_forward_gives_other_memory_is_kept(tier: str, device: str, tmp_path: Path) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.replaces = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.replaces:
                self.weight.data = self.weight.data * 0.5
            return x @ self.weight

    def build() -> nn.Module:
        return nn.Sequential(*(Replaces() for _ in range(6)))

    reference = aligned(build()).to(device)
    model = loaded(build, save_checkpoint(reference, tmp_path), tier, device)
    x = torch.randn(2, 8)
    for replaces, with_grad in itertools.product((False, True), repeat=2):
        for module in (*model.children(), *reference.children()):
            module.replaces = replaces  # type: ignore[assignment]
        with torch.set_grad_enabled(with_grad):
            for _ in range(2):
                assert torch.equal(model(x), run(reference, x)), (replaces, with_grad)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


def test_a_weight_that_a_forward_writes_to_after_using_it_has_no_gradients(
    tier: str, device: str, tmp_path: Path
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            y = x @ self.weight
            with torch.no_grad():
                self.weight.mul_(0.5)
            return y

    def build() -> nn.Module:
        return nn.Sequential(*(Writes() for _ in range(6)))

    reference = aligned(build()).to(device)
    model = loaded(build, save_checkpoint(reference, tmp_path), tier, device)
    x = torch.randn(2, 8)
    for each in (reference, model):
        output = each(x.to(device))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_gradients_that_a_forward_turns_on_by_itself_arrive_at_the_homes(
    tier: str, device: str, tmp_path: Path
) -> None:
    class Adapts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                (x @ self.weight).square().sum().backward()
            return x @ self.weight

    def build() -> nn.Module:
        return nn.Sequential(*(Adapts() for _ in range(6)))

    reference = aligned(build()).to(device)
    model = loaded(build, save_checkpoint(reference, tmp_path), tier, device)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), run(reference, x))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())


@pytest.mark.parametrize("there", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_model_in_host_memory_may_be_given_another_dtype(there: str, tmp_path: Path) -> None:
    reference = aligned(Net()).eval().to(there)
    model = loaded(Net, save_checkpoint(reference, tmp_path), "cpu", there)
    for dtype in (torch.float32, torch.float64):  # Net's own is the second
        with torch.no_grad():
            model(IDS)  # some units are live, in the dtype from before
            for net in (model, reference):
                for block in net.blocks:
                    block.up.to(dtype)
                    block.down.to(dtype)
                    block.norm.to(dtype)
            x = torch.randn(2, 32, dtype=dtype, device=there)
            for ours, theirs in zip(model.blocks, reference.blocks, strict=True):
                found = ours(x)
                assert found.dtype == dtype
                assert torch.equal(found, theirs(x))


def test_a_weight_that_is_frozen_between_two_calls_gets_no_gradient(model: Net, reference: Net) -> None:
    with torch.no_grad():
        model(IDS)
    weights = [each.blocks[-1].up.weight for each in (model, reference)]
    for trained in (False, True):
        for weight in weights:
            weight.requires_grad_(trained)
        model(IDS).sum().backward()
        run(reference, IDS).sum().backward()
        ours, theirs = (weight.grad for weight in weights)
        assert (ours is not None) == (theirs is not None) == trained
        model.zero_grad()
        reference.zero_grad()


def test_running_statistics_are_kept(tier: str, device: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        block = lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())  # noqa: E731
        return nn.Sequential(*(block() for _ in range(4)))

    reference = aligned(build()).to(device)
    model = loaded(build, save_checkpoint(reference, tmp_path), tier, device)
    model.train()
    for _ in range(3):
        x = torch.randn(4, 8, 16)
        with torch.no_grad():
            assert torch.equal(model(x), run(reference, x))
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("there", ["meta", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_home_that_meets_tensors_of_a_device_is_read_there_also_outside_a_forward(
    tier: str, there: str, tmp_path: Path
) -> None:
    """As in a thread that is inside a block which another one is just offloading."""
    reference = aligned(Net()).eval()
    model = loaded(Net, save_checkpoint(reference, tmp_path), tier)
    homes = {name: p for name, p in model.named_parameters() if isinstance(p, DiskTensor | HostTensor)}
    name, home = next((name, home) for name, home in homes.items() if home.shape == (32,))
    truth = reference.get_parameter(name).detach()
    x = torch.randn(2, 32, dtype=truth.dtype, device=there)
    uses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda weight: functional.layer_norm(x, (32,), weight),
        lambda weight: x + weight,
        lambda weight: weight * x,
        lambda weight: x.clone().add_(weight),
        lambda weight: torch.stack([x[0], weight]),
    ]
    for use in uses:
        weight = truth.to(there).requires_grad_()
        found, expected = use(home), use(weight)
        assert found.device == expected.device
        if there != "meta":
            assert torch.equal(found, expected)
            (gradient,) = torch.autograd.grad(found.sum(), home)
            (wanted,) = torch.autograd.grad(expected.sum(), weight)
            assert torch.equal(gradient.cpu(), wanted.cpu())
    with torch.no_grad(), pytest.raises(RuntimeError):
        torch.add(x[0], x[1], out=home)
    assert torch.equal(home.detach().clone(), truth)


# 4. Ties stay ties.


def test_a_tie_is_one_home_in_one_unit(model: Net) -> None:
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model(IDS)
    assert model.head.weight is model.embed.weight
    owners = [unit for unit in streamed_units(model) if any(home is model.embed.weight for home in unit.store.homes)]
    assert len(owners) <= 1


# 5. Bounded.


def test_the_window_is_never_exceeded_and_homes_are_shown_between_calls(model: Net) -> None:
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append(window_bytes_in_use(model)))
    homes = [id(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for _ in range(3):
            model(IDS)
            assert [id(parameter) for parameter in model.parameters()] == homes
    manager = managed(model)
    assert manager is not None
    window = sum(residency.window.nbytes for residency in manager.residencies)
    assert seen
    assert max(seen) <= window
    assert window < sum(parameter.nbytes for parameter in model.parameters())


# 8. Errors arrive at the call that needs the data, and leave the model usable.


class _BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [_BoomError, KeyboardInterrupt])
def test_the_model_is_usable_after_an_exception_in_a_forward(
    error: type[BaseException], model: Net, reference: Net
) -> None:
    homes = [id(parameter) for parameter in model.parameters()]

    def fail(*_: Any) -> None:
        raise error

    for block in model.blocks:
        handle = block.up.register_forward_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(error):
            model(IDS)
        handle.remove()
        assert [id(parameter) for parameter in model.parameters()] == homes
        assert all(unit.users == 0 for unit in streamed_units(model))
    with torch.no_grad():
        assert torch.equal(model(IDS), run(reference, IDS))


# 9. Threads.


def test_threads_that_run_one_model_at_once_get_the_right_bits(model: Net, reference: Net) -> None:
    with torch.no_grad():
        inputs = [torch.randint(0, 64, (2, 12)) for _ in range(4)]
        expected = [run(reference, ids) for ids in inputs]
    failures: list[Any] = []

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                for turn in itertools.count():
                    if turn == 25:
                        return
                    if not torch.equal(model(inputs[index]), expected[index]):
                        failures.append((index, turn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert failures == []


# 10. A resident unit costs nothing.


def test_a_model_that_fits_is_an_ordinary_model(reference: Net, device: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(reference, tmp_path)
    with overspill.empty_weights():
        model = Net().eval()
    key = 0 if device.startswith("cuda") else "cpu"
    overspill.load(model, checkpoint, max_memory={key: "1GiB"}, progress=False)
    for module in model.modules():
        assert module._compiled_call_impl is None
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in module.__dict__
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert torch.equal(run(model, IDS), run(reference, IDS))

"""What only a GPU can show: races between streams, memory on the device, inputs that cross over."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.checkpoint.reader import FileReader
from overspill.errors import StateError
from overspill.managed import managed
from overspill.slab import Slab, Window
from overspill.transfer import Transfer
from support import TIERS, Net, aligned, loaded, placed, run, save_checkpoint, streamed_units

pytestmark = pytest.mark.gpu

WIDTH = 1024
X = torch.randn(4, WIDTH)


class Wide(nn.Module):
    """Blocks of 8 MiB each: large enough for copies to be under way while the host is far ahead."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Marked(nn.Module):
    """A large parameter that the root itself owns, and a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, WIDTH))
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1), x]) + self.table[: 2 * x.shape[0]]
        for block in self.blocks:
            x = torch.tanh(block(x.to(self.table.device)))
        return nn.functional.linear(x, self.table)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(build: type[nn.Module], tier: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    reference = aligned(build()).eval().cuda()
    return loaded(build, save_checkpoint(reference, folder), tier, "cuda:0"), reference


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy to the device starts late: whoever does not wait for it computes with what was there before."""
    from_host, land = Transfer.from_host, Transfer.land

    def late(stream: torch.Stream | None) -> None:
        assert stream is not None
        with stream:
            torch.cuda._sleep(2_000_000)

    def slow_from_host(self: Transfer, *args: Any) -> Any:
        late(self._host_copies)
        return from_host(self, *args)

    def slow_land(self: Transfer, *args: Any) -> Any:
        late(self._disk_copies)
        return land(self, *args)

    monkeypatch.setattr(Transfer, "from_host", slow_from_host)
    monkeypatch.setattr(Transfer, "land", slow_land)


@pytest.fixture
def poisoned_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab starts as NaN: bytes that were not copied, or were copied before their time, show in the result."""
    take = Window.take

    def poisoned(self: Window, nbytes: int, *, to_stay: bool = False) -> Any:
        slab = take(self, nbytes, to_stay=to_stay)
        if slab is not None:
            for event in slab.overwrite_after:
                torch.cuda.current_stream().wait_event(event)
            slab.memory.fill_(255)
            filled = torch.Event(device=self.device)
            filled.record(torch.cuda.current_stream())
            slab.overwrite_after.append(filled)
        return slab

    monkeypatch.setattr(Window, "take", poisoned)
    pass_on = Window.pass_on

    def poisoned_and_passed_on(self: Window, slab: Slab) -> bool:
        slab.memory.fill_(255)
        return pass_on(self, slab)

    monkeypatch.setattr(Window, "pass_on", poisoned_and_passed_on)


@pytest.fixture
def slow_compute() -> Iterator[None]:
    """The device lags behind the host, so that memory is freed and taken again while kernels still use it."""

    def late(module: nn.Module, args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda._sleep(2_000_000)

    handle = nn.modules.module.register_module_forward_pre_hook(late)
    yield
    handle.remove()


@pytest.mark.parametrize("fixture", ["slow_copies", "poisoned_slabs", "slow_compute"])
def test_results_are_exact_when_races_are_provoked(
    fixture: str, request: pytest.FixtureRequest, tier: str, tmp_path: Path
) -> None:
    model, reference = make(Wide, tier, tmp_path)
    with torch.no_grad():
        expected = run(reference, X)
    request.getfixturevalue(fixture)
    with torch.no_grad():
        for _ in range(4):
            outputs = [model(X.cuda()) for _ in range(3)]  # nothing waits for the device in between
            for output in outputs:
                assert torch.equal(output.cpu(), expected)


def test_an_edit_right_after_a_forward_spares_the_copies_that_are_still_under_way(
    slow_copies: None, tier: str, tmp_path: Path
) -> None:
    model, reference = make(Wide, tier, tmp_path)
    x = X.cuda()
    with torch.no_grad():
        before = run(reference, X)
        output = model(x)  # returns while the last blocks are still to be copied
        for net in (model, reference):
            for block in net.blocks:  # type: ignore[union-attr]
                block[2].weight.data.mul_(0.5)
                block[0].weight.mul_(2)
        assert torch.equal(output.cpu(), before)
        assert torch.equal(model(x).cpu(), run(reference, X))


def test_inputs_are_moved_and_outputs_come_back_where_the_inputs_were(tier: str, tmp_path: Path) -> None:
    model, _ = make(Wide, tier, tmp_path)
    with torch.no_grad():
        on_cpu, on_gpu = model(X), model(X.cuda())
    assert on_cpu.device.type == "cpu"
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_parameters_of_the_root_itself_act_as_if_on_the_gpu(mode: Any, tier: str, tmp_path: Path) -> None:
    model, reference = make(Marked, tier, tmp_path)
    with mode():
        for _ in range(2):
            assert torch.equal(model(X), run(reference, X))


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_adapters_added_after_loading_come_along(tier: str, tmp_path: Path) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model, reference = make(Wide, tier, tmp_path)
    for net in (model, reference):
        torch.manual_seed(1)
        for block in net.blocks:  # type: ignore[union-attr]
            block[0] = Adapter(block[0])
    reference.cuda()
    model(X).sum().backward()
    run(reference, X).sum().backward()
    for ours, theirs in zip(model.blocks, reference.blocks, strict=True):  # type: ignore[arg-type]
        assert torch.equal(ours[0].down.weight.grad.cpu(), theirs[0].down.weight.grad.cpu())
        assert torch.equal(ours[0].base.weight.grad.cpu(), theirs[0].base.weight.grad.cpu())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_device_memory_stays_within_what_the_plan_says(mode: Any, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(Wide(), tmp_path)
    total = sum(p.nbytes for p in Wide().parameters())
    for budget in ({"cpu": "1GiB"}, {}, {0: total // 2, "cpu": "1GiB"}, {0: total // 2}):
        with overspill.empty_weights():
            model = Wide()
        plan = overspill.plan(model, budget)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        overspill.load(model, checkpoint, plan, progress=False)
        torch.cuda.reset_peak_memory_stats()
        with mode():
            for _ in range(3):
                model(X.cuda())
        torch.cuda.synchronize()
        activations = 24 * X.nbytes + (1 << 20)
        assert plan.streamed_bytes > 0
        assert torch.cuda.max_memory_allocated() - base <= plan.bytes_on(torch.device("cuda:0")) + activations
        if 0 in budget:
            assert plan.bytes_on(torch.device("cuda:0")) <= budget[0]  # type: ignore[index]
        del model


@pytest.mark.parametrize("room", [2, 3, 4, 6])
def test_weights_in_both_places_cross_the_link_once_a_pass(room: int, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(Wide(12), tmp_path)
    with overspill.empty_weights():
        model = Wide(12)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    plan = overspill.plan(model, {}, window=room * block + 4096)
    plan = placed(plan, lambda index: "disk" if index % 3 == 2 else "cpu")
    overspill.load(model, checkpoint, plan, progress=False)
    manager = managed(model)
    assert manager is not None
    with torch.no_grad():
        for _ in range(3):
            model(X)
        before = dict(manager.counts.moved)
        for _ in range(5):
            model(X)
    moved = {tier: manager.counts.moved[tier] - before[tier] for tier in ("cpu", "disk")}
    assert moved["disk"] <= 5 * plan.disk_bytes  # an ample window keeps all of it
    assert 0 < moved["cpu"] <= 5 * plan.cpu_bytes


def test_what_is_remembered_of_a_window_does_not_grow_with_the_passes() -> None:
    model = Wide().cuda().requires_grad_(False)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    overspill.offload(model, overspill.plan(model, {"cpu": "1GiB"}, device="cuda:0", window=3 * block + 4096))
    manager = managed(model)
    assert manager is not None
    x, events = X.cuda(), []
    for _ in range(100):
        model(x)
        torch.cuda.synchronize()
        arena = manager.windows[torch.device("cuda:0")]._arena
        uses = sum(len(unit.slab.uses) for unit in streamed_units(model) if unit.slab is not None)
        assert arena is not None, "the plan holds the window"
        events.append(uses + sum(len(gap.events) for gap in arena._gaps))
    assert max(events[50:]) <= max(events[:10]) + 4


def test_a_cast_on_the_way_has_the_bits_of_a_cast_in_memory(tier: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(Wide(), tmp_path)
    reference = Wide()
    overspill.load(reference, checkpoint, max_memory={0: "1GiB"}, progress=False)
    reference.to(torch.bfloat16)
    with overspill.empty_weights():
        model = Wide()
    plan = placed(overspill.plan(model, {}, dtype=torch.bfloat16), tier)
    overspill.load(model, checkpoint, plan, offload_folder=tmp_path / "offload", progress=False)
    x = X.bfloat16()
    with torch.no_grad():
        assert torch.equal(model(x), run(reference, x))


def test_reads_that_miss_the_page_cache_go_past_it_and_are_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FileReader, "_read_cached", lambda *_: False)
    model, reference = make(Wide, "disk", tmp_path)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X), run(reference, X))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # exactness is wanted, not speed
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.real_gpu("inductor writes kernels for a chip"))],
)
def test_compiled_blocks_stream(backend: str, tmp_path: Path) -> None:
    model, reference = make(Net, "cpu", tmp_path)
    assert len(streamed_units(model)) >= 4
    ids = torch.arange(8)
    # Inductor chooses the order of its sums by timing kernels, so two compilations may differ in the last bits. Blocks
    # of one class share what was compiled: each model gets a clean start, or one would use the other's.
    tolerance = 0.0 if backend == "aot_eager" else 1e-4
    outputs = {}
    with torch.no_grad():
        for net in (reference, model):
            torch._dynamo.reset()
            for block in net.blocks:  # type: ignore[union-attr]
                block.compile(fullgraph=True, backend=backend)
            outputs[net] = [run(net, ids) for _ in range(4)]
    assert all(torch.equal(output, outputs[model][0]) for output in outputs[model])
    torch.testing.assert_close(outputs[model][0], outputs[reference][0], rtol=tolerance, atol=tolerance)


class Chain(Wide):
    """Nothing but blocks, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_parts_that_compute_on_other_devices_get_their_inputs_there(tmp_path: Path) -> None:
    reference = aligned(Chain())
    checkpoint = save_checkpoint(reference, tmp_path)
    with overspill.empty_weights():
        model = Chain()
    plan = overspill.plan(model, {0: "1GiB"})
    on_cpu = {"blocks.3", "blocks.5"}
    placements = tuple(
        dataclasses.replace(placement, device=torch.device("cpu")) if placement.unit.name in on_cpu else placement
        for placement in plan.placements
    )
    overspill.load(model, checkpoint, dataclasses.replace(plan, placements=placements), progress=False)
    x = X
    with torch.no_grad():
        for index, block in enumerate(reference.blocks):  # type: ignore[arg-type]
            device = "cpu" if f"blocks.{index}" in on_cpu else "cuda"
            x = block.to(device)(x.to(device))
        assert torch.equal(model(X), x.cpu())


def test_host_memory_is_pinned_where_it_lies_and_what_lies_beside_it_can_still_be_copied() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(512, 512), nn.Linear(512, 512))
    reference = aligned(copy.deepcopy(model)).cuda()
    address, beside = model[0].weight.data_ptr(), [torch.randn(512, 512) for _ in range(64)]
    overspill.offload(model, to="cpu", device=0)
    assert model[0].weight.detach().data_ptr() == address
    assert torch.equal(model[0].weight.detach().cuda(), reference[0].weight)
    x = torch.randn(2, 4096)
    for _ in range(2):
        assert torch.equal(model[0](x), reference[0](x.cuda()))
    beside += [torch.randn(512, 512) for _ in range(64)]
    assert all(torch.equal(each.cuda().cpu(), each) for each in beside)
    overspill.restore(model)
    assert torch.equal(model[0].weight, reference[0].weight.cpu())
    assert all(torch.equal(each.cuda().cpu(), each) for each in beside)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_memory_that_torch_gives_to_a_window_is_not_overwritten_while_queued_work_reads_it(tier: str) -> None:
    model = Wide().cuda()
    overspill.offload(model, to=tier)  # its window is taken for calls only
    x = X.cuda()
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    manager = managed(model)
    assert manager is not None
    (window,) = manager.windows.values()
    torch.cuda.empty_cache()
    for _ in range(3):
        earlier = torch.ones(window.nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(200_000_000)  # a tenth of a second: the host is far ahead
        copy_of_it = earlier.clone()
        del earlier  # torch's allocator gives it to the window, for the same stream
        with torch.no_grad():
            model(x)
        assert int(copy_of_it.ne(1).sum()) == 0


def test_a_model_on_the_gpu_is_not_offloaded_to_compute_on_the_cpu() -> None:
    model = nn.Linear(512, 512).cuda()
    with pytest.raises(StateError, match=r"weight is on cuda:0: .* Call model\.to\('cpu'\)"):
        overspill.offload(model, to="cpu", device="cpu")
    assert model.weight.is_cuda

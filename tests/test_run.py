"""Ways in which people call models: every one streams, and gives the bits of the resident model."""

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overspill.managed import managed
from support import TIERS, Block, Net, aligned, loaded, run, save_checkpoint, streamed_units

Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Twins = Callable[[Callable[[], nn.Module]], tuple[nn.Module, nn.Module]]


@pytest.fixture
def twins(tier: str, device: str, tmp_path: Path) -> Twins:
    """Makes a managed model on `tier` and the resident one with the same weights."""

    def make(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        reference = aligned(build()).eval().to(device)
        return loaded(build, save_checkpoint(reference, tmp_path), tier, device), reference

    return make


def assert_same(model: nn.Module, reference: nn.Module, *args: Any, passes: int = 3, **kwargs: Any) -> None:
    assert streamed_units(model)
    with torch.no_grad():
        for _ in range(passes):
            torch.testing.assert_close(model(*args, **kwargs), run(reference, *args, **kwargs), rtol=0, atol=0)


class Repeats(nn.Module):
    """Blocks that run twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0], self.blocks[0]):
            x = block(x)
        return x


class Chooses(nn.Module):
    """Blocks in the order that the caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


class Link(nn.Module):
    """A block that calls the next one in the middle of its own forward."""

    def __init__(self, following: "Link | None") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.following = [following]  # in a list, so that it is no child: each block is a unit of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x))
        if self.following[0] is not None:
            x = self.following[0](x)
        return self.down(self.up(x))


class Chain(nn.Module):
    """Blocks that are all in use at once when the last of them runs."""

    def __init__(self) -> None:
        super().__init__()
        links: list[Link] = []
        for _ in range(6):
            links.insert(0, Link(links[0] if links else None))
        self.blocks = nn.ModuleList(links)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


class UNet(nn.Module):
    """Down and up again, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x + skips.pop())
        return x


@dataclass
class Result:
    """A dataclass among the outputs."""

    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


class Nested(nn.Module):
    """Keyword and nested inputs, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, batch: dict[str, Any], *, pair: Pair, scale: float = 1.0) -> Result:
        x = batch["x"][0] + pair.first * scale + pair.second
        states = []
        for block in self.blocks:
            x = block(x, gain=scale)
            states.append(x)
        return Result(hidden=x, extra={"states": states})


class EncoderDecoder(nn.Module):
    """An encoder that runs once and a decoder that runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for block in self.encoder:
            x = block(x)
        for _ in range(steps):
            for block in self.decoder:
                x = block(x)
        return x


class SharesModule(nn.Module):
    """One module object in several blocks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.up = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UsesWeights(nn.Module):
    """Weights that are used without their module's forward being called, and other methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encode(ids)
        y = torch.nn.functional.linear(x, self.embed.weight)
        return y @ self.embed.weight + self.blocks[1].up.weight.sum()


def test_blocks_that_run_twice_in_a_pass(twins: Twins) -> None:
    assert_same(*twins(Repeats), torch.randn(2, 32))


def test_blocks_that_are_skipped_or_reordered_between_passes(twins: Twins) -> None:
    model, reference = twins(Chooses)
    for order in ([0, 1, 2, 3, 4, 5], [0, 2, 4], [5, 4, 3, 2, 1, 0], [3], [1, 1, 1], [0, 1, 2, 3, 4, 5], [2, 0, 5, 1]):
        assert_same(model, reference, torch.randn(2, 32), order, passes=2)


def test_while_a_block_computes_those_behind_it_are_on_their_way(tier: str, twins: Twins) -> None:
    model, _ = twins(Chooses)
    units = {unit.name: unit for unit in streamed_units(model)}
    seen: dict[int, set[str]] = {}

    def look(index: int) -> Callable[..., None]:
        return lambda *_: seen.update({index: {name for name, unit in units.items() if unit.slab is not None}})

    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.up.register_forward_pre_hook(look(index))
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, 32), list(range(6)))
    streamed = [index for index in range(6) if f"blocks.{index}" in units]
    ahead = 1 if tier == "mixed" else 2  # the window has room for three; of two sources, the disk's next may be far
    for at, index in enumerate(streamed):
        coming = [streamed[(at + step) % len(streamed)] for step in range(ahead + 1)]
        assert seen[index] >= {f"blocks.{block}" for block in coming}


def test_calls_within_calls_that_need_more_than_the_window_do_not_wait_for_themselves(
    twins: Twins, caplog: pytest.LogCaptureFixture
) -> None:
    model, reference = twins(Chain)
    assert_same(model, reference, torch.randn(2, 32))
    assert "outside it" in caplog.text


def test_threads_whose_calls_within_calls_share_a_window_wait_and_go_on(twins: Twins) -> None:
    model, reference = twins(Chain)
    x = torch.randn(2, 32)
    expected = run(reference, x)
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            found.extend(model(x) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    assert all(torch.equal(output, expected) for output in found)
    manager = managed(model)
    assert manager is not None
    assert [residency._running for residency in manager.residencies] == [0] * len(manager.residencies)


def test_skips_across_the_model(twins: Twins) -> None:
    assert_same(*twins(UNet), torch.randn(2, 32))


def test_keyword_and_nested_inputs_and_outputs(twins: Twins) -> None:
    model, reference = twins(Nested)
    batch, pair = {"x": (torch.randn(2, 32),)}, Pair(torch.randn(2, 32), torch.randn(2, 32))
    with torch.no_grad():
        ours, theirs = model(batch, pair=pair, scale=0.5), run(reference, batch, pair=pair, scale=0.5)
    assert isinstance(ours, Result)
    assert torch.equal(ours.hidden, theirs.hidden)
    for a, b in zip(ours.extra["states"], theirs.extra["states"], strict=True):
        assert torch.equal(a, b)


def test_an_encoder_that_runs_once_and_a_decoder_that_runs_on(twins: Twins) -> None:
    assert_same(*twins(EncoderDecoder), torch.randn(2, 32), 5)


def test_one_module_in_several_blocks_is_stored_once(twins: Twins) -> None:
    model, reference = twins(SharesModule)
    assert_same(model, reference, torch.randn(2, 32))
    homes = [home for unit in streamed_units(model) for home in unit.store.homes]
    assert len({id(home) for home in homes}) == len(homes)


def test_weights_used_without_calling_forward(twins: Twins, device: str) -> None:
    model, reference = twins(UsesWeights)
    assert_same(model, reference, torch.arange(6))
    with torch.no_grad():
        assert torch.equal(
            model.encode(torch.arange(6, device=device)).cpu(), reference.encode(torch.arange(6, device=device)).cpu()
        )  # type: ignore[operator]


def test_blocks_called_one_by_one_without_the_model(twins: Twins, device: str) -> None:
    model, reference = twins(Net)
    x = y = torch.randn(2, 3, 32, device=device)
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, reference.blocks, strict=True):  # type: ignore[arg-type]
            x, y = ours(x), theirs(y)
    assert torch.equal(x, y)


def test_a_model_that_is_itself_one_unit(twins: Twins) -> None:
    model, reference = twins(lambda: nn.Linear(512, 1024))
    assert_same(model, reference, torch.randn(2, 512), passes=1)
    call = model._compiled_call_impl
    assert_same(model, reference, torch.randn(2, 512), passes=3)
    assert model._compiled_call_impl is call, "the interception wraps itself again and again"


def test_user_hooks_see_live_weights_and_their_results_count(twins: Twins) -> None:
    model, reference = twins(Net)
    seen = []
    for net in (model, reference):
        for block in net.blocks:  # type: ignore[union-attr]
            block.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            block.register_forward_hook(lambda module, args, output: seen.append(module.up.weight.sum().item()))
    assert_same(model, reference, torch.arange(8), passes=2)
    assert seen[: len(seen) // 4] == seen[len(seen) // 4 : len(seen) // 2]


def test_gradient_checkpointing_around_blocks_has_the_same_gradients(twins: Twins) -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputes(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    model, reference = twins(Recomputes)
    calls = []
    # The recompute stops as soon as it has what backward needs, so it never reaches a hook behind the block.
    model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, index]
    model(torch.arange(8)).square().mean().backward()
    run(reference, torch.arange(8)).square().mean().backward()
    assert len(calls) == 2, "the block must be recomputed in backward"
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu()), name  # type: ignore[union-attr]


def test_a_training_pass_between_inference_passes_leaves_normal_tensors(twins: Twins) -> None:
    model, reference = twins(Net)
    ids = torch.arange(8)
    for _ in range(2):
        with torch.inference_mode():
            model(ids)
        model(ids).sum().backward()
        run(reference, ids).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())  # type: ignore[union-attr]


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_which_keep_a_second_list_of_weights(recurrent: Any, twins: Twins) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(recurrent(32, 32, batch_first=True) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x

    assert_same(*twins(Recurrent), torch.randn(2, 5, 32))

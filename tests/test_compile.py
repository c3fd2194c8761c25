"""torch.compile of each block, in each of the ways people write it: one graph, still streaming, right bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import TIERS, Net, aligned, loaded, save_checkpoint, streamed_units

IDS = torch.arange(8).view(1, 8)


def _compile_method(net: Net, options: dict[str, Any]) -> None:
    for block in net.blocks:
        block.compile(**options)


def _compile_module(net: Net, options: dict[str, Any]) -> None:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, **options)


def _compile_forward(net: Net, options: dict[str, Any]) -> None:
    for block in net.blocks:
        block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]


WAYS = [_compile_method, _compile_module, _compile_forward]


@pytest.fixture(params=TIERS)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Net, Net]:
    torch._dynamo.reset()
    reference = aligned(Net()).eval()
    return loaded(Net, save_checkpoint(reference, tmp_path), request.param), reference  # type: ignore[return-value]


def _note_binds(unit: Any, seen: list[int]) -> None:
    bind = unit.bind

    def noting(root: nn.Module, **options: Any) -> None:
        seen.append(unit.nbytes)
        bind(root, **options)

    unit.bind = noting


def _live_bytes_seen(model: nn.Module) -> list[int]:
    """Fills as the model runs: the sizes of the slabs that blocks computed with."""
    seen: list[int] = []
    for unit in streamed_units(model):
        _note_binds(unit, seen)
    return seen


def unit_is_streamed(model: nn.Module, index: int) -> bool:
    return any(unit.name == f"blocks.{index}" for unit in streamed_units(model))


@pytest.mark.parametrize("compile_blocks", WAYS)
def test_compiled_blocks_are_one_graph_and_still_stream(
    compile_blocks: Callable[[Net, dict[str, Any]], None], twins: tuple[Net, Net]
) -> None:
    model, reference = twins
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    with torch.no_grad():
        assert torch.equal(model(IDS), reference(IDS))
        compile_blocks(model, {"backend": backend, "fullgraph": True})
        seen = _live_bytes_seen(model)
        for _ in range(3):
            assert torch.equal(model(IDS), reference(IDS))
    kinds = 1 if all(unit_is_streamed(model, index) for index in range(4)) else 2  # streamed blocks, resident blocks
    assert len(graphs) == kinds, "alike blocks share one graph; more means that live tensors cause recompiles"
    assert len(seen) >= 3 * len([unit for unit in streamed_units(model) if unit.name.startswith("blocks")])


@pytest.mark.parametrize("compile_blocks", WAYS)
def test_blocks_that_were_compiled_before_loading_stream_too(
    compile_blocks: Callable[[Net, dict[str, Any]], None], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    reference = aligned(Net()).eval()
    checkpoint = save_checkpoint(reference, tmp_path)

    def build() -> Net:
        net = Net()
        if compile_blocks is not _compile_module:  # that one changes the names of the weights
            compile_blocks(net, {"backend": "eager", "fullgraph": True})
        return net

    model = loaded(build, checkpoint, "disk")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), reference(IDS))


# Dynamo asks every input for .grad, also inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compile_blocks", WAYS)
def test_gradients_through_compiled_blocks(
    compile_blocks: Callable[[Net, dict[str, Any]], None], twins: tuple[Net, Net]
) -> None:
    model, reference = twins
    parameters = dict(model.named_parameters())
    compile_blocks(model, {"backend": "aot_eager", "fullgraph": True})
    for _ in range(2):
        for net in twins:
            net(IDS).square().mean().backward()
    for (name, ours), theirs in zip(parameters.items(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_through_a_compiled_model(twins: tuple[Net, Net]) -> None:
    model, reference = twins
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        for net in (compiled, reference):
            net(IDS).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_what_a_compiled_forward_writes_to_its_weights_is_kept(tier: str, with_grad: bool, tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.a.mul_(0.5)
            self.b.data.add_(1)
            return x @ self.a + x @ self.b

    torch._dynamo.reset()
    reference = aligned(nn.Sequential(*(Writes() for _ in range(6))))
    model = loaded(lambda: nn.Sequential(*(Writes() for _ in range(6))), save_checkpoint(reference, tmp_path), tier)
    for block in model.children():
        block.compile(backend="aot_eager")
    x = torch.randn(2, 8)
    with torch.set_grad_enabled(with_grad):
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_compiler_around_the_whole_model_stops_before_each_streamed_block(twins: tuple[Net, Net]) -> None:
    model, reference = twins
    seen = _live_bytes_seen(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(IDS), reference(IDS))
    assert len(seen) >= 2

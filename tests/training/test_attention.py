"""Attention whose results a recomputed block keeps: the same bits, and the kernel runs once."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import overspill
from overspill.training import attention
from training.loops import TOKENS, WIDTH, Block, Net, activations_of, batches, compare, loss_of, plainly


class Attends(Block):
    """With torch's fused attention."""

    attention_dropout = 0.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.attention_dropout if self.training else 0.0
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(self.drop(torch.sigmoid(gate) * value))


class Draws(Attends):
    attention_dropout = 0.2


def net(block: type[Block] = Attends) -> Net:
    model = Net(4)
    model.blocks = nn.ModuleList(block() for _ in range(4))
    return model


PRODUCTS = 2 * TOKENS * WIDTH * TOKENS
"""Of one block's attention."""


@pytest.fixture(autouse=True)
def _six_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_DEAR", PRODUCTS)


class Counting(TorchDispatchMode):
    """Which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def attentions(self) -> int:
        return sum(count for name, count in self.ran.items() if name in attention._KERNELS)


def attentions_of_a_step(model: nn.Module, device: str) -> int:
    for step, batch in enumerate(batches(2, device)):
        plainly(model, batch, step)
    with Counting() as counting:
        loss_of(model, next(batches(1, device))).backward()
    return counting.attentions()


@pytest.mark.parametrize("block", [Attends, Draws])
@pytest.mark.parametrize("weights", [False, True])
def test_training_has_the_same_bits(device: str, block: type[Block], weights: bool) -> None:
    compare(lambda: net(block), device, {"recompute": True, "weights": weights}, steps=6)


def test_gradients_of_gradients_and_retained_graphs(device: str) -> None:
    def backward(model: nn.Module, batch: Any, step: int) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(net, device, {"recompute": True}, backward, steps=3)


def test_the_kernel_runs_once_a_block(device: str) -> None:
    model = net().to(device)
    once = attentions_of_a_step(model, device)
    assert once == 4
    overspill.offload_training(model, recompute=True)
    assert attentions_of_a_step(model, device) == 4


def test_without_activations_to_carry_it_runs_again(device: str) -> None:
    model = net().to(device)
    overspill.offload_training(model, recompute=True, activations=False, weights=True)
    assert attentions_of_a_step(model, device) == 7


def test_a_few_keys_are_computed_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_DEAR", PRODUCTS + 1)
    model = net().to(device)
    overspill.offload_training(model, recompute=True)
    assert attentions_of_a_step(model, device) == 7


def test_its_results_leave_the_device(device: str) -> None:
    sent = []
    for dear in (PRODUCTS, PRODUCTS + 1):
        attention._DEAR = dear
        model = net().to(device)
        overspill.offload_training(model, recompute=True)
        plainly(model, next(batches(1, device)), 0)
        sent.append(activations_of(model).nbytes_sent)
    assert sent[0] > sent[1]


# Dynamo asks every input for .grad, also inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_is_left_to_its_compiler(device: str) -> None:
    torch._dynamo.reset()
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    model = net().to(device)
    for block in model.blocks:
        block.drop.p = 0.0
        block.compile(backend=backend)
    overspill.offload_training(model, recompute=True)
    plainly(model, next(batches(1, device)), 0)
    assert len(ran) == 4 + 3, "four forwards and three replays, all of them compiled"

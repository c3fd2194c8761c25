"""Small models to train, ways to train them, and the comparison of two trainings bit by bit."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import overspill
from overspill.managed import managed
from overspill.training.activations import Activations
from support import aligned

WIDTH, TOKENS, VOCAB = 16, 6, 32

STRATEGIES: dict[str, dict[str, Any]] = {
    "activations": {},
    "weights": {"activations": False, "weights": True},
    "both": {"weights": True},
    "weights on disk": {"activations": False, "weights": "disk"},
    "recompute": {"recompute": True},
    "recompute-weights": {"recompute": True, "weights": True, "activations": False},
    "all": {"recompute": True, "weights": True},
}


class Block(nn.Module):
    """Attention and a gated product: fused projections, transposes, broadcasts, dropout, views that share a storage."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1, *, buffers: bool = True) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        if buffers:
            self.register_buffer("scale", torch.tensor(0.5))
        else:
            self.scale = 0.5

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(3, dim=1)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(self.drop(torch.sigmoid(gate) * value))


class Net(nn.Module):
    """Embedding, blocks that share a mask, and a head that may be tied to the embedding."""

    def __init__(self, blocks: int = 6, *, tied: bool = False, dropout: float = 0.1, buffers: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout, buffers=buffers) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = torch.full((ids.shape[1], ids.shape[1]), -1e4, device=ids.device).triu(1)
        for block in self.blocks:
            x = self.call(block, x, mask)
        return self.head(x)

    def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """How a block is called."""
        output: torch.Tensor = block(x, mask=mask)
        return output


class UNet(nn.Module):
    """Blocks whose outputs are used again much later."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x + skips.pop())
        return self.head(x)


STEPS = 20


def batches(steps: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (2, TOKENS + 1), generator=random).to(device)
        yield ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


@dataclass
class Record:
    """All that a training shows: every loss, every gradient, and the weights at its end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, model: nn.Module, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().cpu().clone())
        self.gradients.append(
            {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}
        )


Backward = Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor], int], torch.Tensor]
"""One step's forward and backward on a batch, given the step's number. Returns the loss."""


def plainly(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def train(model: nn.Module, device: str, backward: Backward = plainly, steps: int = STEPS) -> Record:
    """Train with an optimizer whose arithmetic rounds alike on every device: its factors are powers of two."""
    torch.manual_seed(3)  # of dropout
    record = Record()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2**-4, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step, batch in enumerate(batches(steps, device)):
        loss = backward(model, batch, step)
        record.note(model, loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            schedule.step()
    record.weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return record


def assert_same(ours: Record, theirs: Record) -> None:
    for step, (mine, expected) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert torch.equal(mine, expected), f"loss of step {step}"
    for step, (mine_all, expected_all) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert mine_all.keys() == expected_all.keys()
        for name, expected_one in expected_all.items():
            mine_one = mine_all[name]
            assert (mine_one is None) == (expected_one is None), f"gradient of {name} in step {step}"
            if mine_one is not None and expected_one is not None:
                assert torch.equal(mine_one, expected_one), f"gradient of {name} in step {step}"
    assert any(gradient is not None and gradient.any() for gradient in ours.gradients[-1].values())
    for name, expected in theirs.weights.items():
        assert torch.equal(ours.weights[name], expected), name


def pair(build: Callable[[], nn.Module], device: str) -> tuple[nn.Module, nn.Module]:
    """Two equal models in aligned memory."""
    torch.manual_seed(0)
    model = build().to(device)
    return aligned(model), aligned(copy.deepcopy(model))


def compare(
    build: Callable[[], nn.Module],
    device: str,
    options: dict[str, Any],
    backward: Backward = plainly,
    *,
    steps: int = STEPS,
    before: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Train twice, resident and offloaded, and compare. `before` is done to both models first. Ours is returned."""
    reference, model = pair(build, device)
    before(reference)
    before(model)
    expected = train(reference, device, backward, steps)
    overspill.offload_training(model, **options)
    sent = activations_of(model).nbytes_sent
    assert_same(train(model, device, backward, steps), expected)
    if options.get("activations", True):
        assert activations_of(model).nbytes_sent > sent, "nothing left the device"
    return model


def activations_of(model: nn.Module) -> Activations:
    manager = managed(model)
    assert manager is not None
    assert manager.training is not None
    activations = manager.training.blocks[0].activations  # type: ignore[attr-defined]
    assert isinstance(activations, Activations)
    return activations

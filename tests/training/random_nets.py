"""Models that nobody would think of: blocks of many kinds in any order, which share, skip and write as they like."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from training.loops import WIDTH, Block

BATCH, TOKENS, VOCAB = 2, 6, 32


class Product(nn.Module):
    """In-place activations, dropout, a weight that is used as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.up(x), inplace=True)
        h = functional.dropout(h, 0.2, self.training)
        return x + h[..., ::2] @ self.down.t()[::2]


class Normalised(nn.Module):
    """Running statistics, which each forward writes once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(nn.Module):
    """A module with a second list of its weights, and gates that are edited one by one, as gated cells do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.gates = nn.RNN(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):  # which would have all weights in one piece of memory
            hidden: torch.Tensor = self.rnn(x)[0]
        first, second, third = self.gates(hidden).unsafe_chunk(3, -1)
        return x + first.sigmoid_() * second.tanh_() * third.sigmoid_()


class Experts(nn.Module):
    """Which weights are used depends on the data: some have no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, which = self.gate(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (which == index).nonzero().squeeze(-1)
            if rows.numel():
                result = result.index_add(0, rows, (expert(flat[rows]) * weight[rows, None]).to(x.dtype))
        return x + result.view_as(x)


class Result(NamedTuple):
    """What a block may return."""

    hidden: torch.Tensor
    extra: dict[str, Any]


class Several(nn.Module):
    """Takes a dictionary, and returns a named tuple with a loss of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *, also: dict[str, Any]) -> Result:
        y = self.inner(x * also["scale"])
        return Result(x + y, {"loss": y.square().mean(), "nothing": None, "parts": list(y.unbind(1)[:2])})


class Nested(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.after, self._reentrant = Block(buffers=False), nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(self.part, x, use_reentrant=self._reentrant)
        return x + self.after(inner)


class Square(torch.autograd.Function):
    """Saves an input and a result, and has a gradient of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x * x * weight
        ctx.save_for_backward(x, weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, result = ctx.saved_tensors
        (gradient,) = gradients
        return 2 * x * weight * gradient, (x * x * gradient).sum((0, 1)) + 0 * result.sum((0, 1))


class Custom(nn.Module):
    """A function of its own, a reparametrised weight, a complex product, an embedding of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / WIDTH)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + Square.apply(x, self.weight)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        x = x + torch.view_as_real(pairs * self.turn.conj()).flatten(-2)
        return x + self.linear(x) * torch.rand(x.shape[1], 1, device=x.device)


class Counting(nn.Module):
    """Keeps a count and a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.mean.lerp_(x.detach().to(self.mean.dtype).mean((0, 1)), 0.5)
        return x + self.linear(x - self.mean.clone())


class Reassigning(nn.Module):
    """Puts new tensors in the place of its buffers, one of which is made by its first forward."""

    mean: torch.Tensor
    first: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("first", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = x.detach().float().mean((0, 1))
        y = self.linear(x - self.mean) * torch.sigmoid(self.first)
        self.mean = self.mean * 0.5 + x.detach().float().mean((0, 1))
        return x + y


class Spectral(nn.Module):
    """A weight that is divided by its norm, which each forward in training knows better."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Editing(nn.Module):
    """Edits its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.leaky_relu(x, 0.5, inplace=True)
        return x + self.linear(x)


class Passing(nn.Module):
    """Gives its input back, or a view of it, or lets nothing but a part through."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chance = float(torch.rand(()))
        if chance < 0.3:
            return x
        if chance < 0.5:
            return x.view(x.shape)
        return torch.cat([x[..., : WIDTH // 2], (x * self.scale)[..., WIDTH // 2 :]], -1)


class Forces(nn.Module):
    """Its output is the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return x
        y = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.out(torch.tanh(self.linear(y))).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x - force


class Halves(nn.Module):
    """Weights of another dtype than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x).to(self.linear.weight.dtype)).to(x.dtype)


class Plain(nn.Module):
    """Attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.block(x, mask)
        return output


KINDS: list[Callable[[], nn.Module]] = [
    Plain,
    Product,
    Normalised,
    Recurrent,
    Experts,
    Several,
    lambda: Nested(False),
    lambda: Nested(True),
    Custom,
    Counting,
    Halves,
    Reassigning,
    Spectral,
    Editing,
    Passing,
    Forces,
]


class RandomNet(nn.Module):
    """Blocks of any kind."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        some = chance.sample(KINDS, chance.randint(1, 3))  # several of a kind have each other's memory
        self.blocks = nn.ModuleList(chance.choice(some)() for _ in range(chance.randint(3, 7)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tied = chance.random() < 0.3
        if self.tied:
            self.head.weight = self.embed.weight
        self.skips = chance.random() < 0.3
        self.drops = chance.choice([0.0, 0.0, 0.3])
        self.twice, self.shares = -1, False
        how = chance.random()
        if how < 0.2:
            once = [i for i, block in enumerate(self.blocks) if not isinstance(block, Recurrent | Spectral)]
            self.twice = chance.choice(once or [-1])
        elif how < 0.4:
            self.shares = share(self, chance)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, extra = self.embed(ids), []
        mask = torch.full((ids.shape[1], ids.shape[1]), -1e4, device=x.device).triu(1)
        past: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            if self.training and torch.rand(()) < self.drops:
                continue
            for _ in range(2 if index == self.twice else 1):
                if self.skips and len(past) > 2:
                    x = x + past.pop(0)
                if isinstance(block, Several):
                    x, others = block(x, also={"scale": 0.5, "what": None})
                    extra.append(others["loss"] + others["parts"][0].mean())
                else:
                    x = block(x, mask) if isinstance(block, Plain) else block(x)
                past.append(x)
        logits: torch.Tensor = self.head(x)
        return logits + sum(extra) if extra else logits


def share(net: RandomNet, chance: random.Random) -> bool:
    """Tie a weight of one block to one of another."""
    places = [
        (module, name, parameter)
        for block in net.blocks
        if not isinstance(block, Spectral | Nested)  # whose weights are used more than once as it is
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(module, nn.RNNBase) and "parametrizations" not in module._modules
    ]
    if not places:
        return False
    _, _, source = chance.choice(places)
    alike = [(m, n) for m, n, p in places if p is not source and p.shape == source.shape and p.dtype == source.dtype]
    if alike:
        module, name = chance.choice(alike)
        setattr(module, name, source)
    return bool(alike)

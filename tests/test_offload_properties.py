"""Random models, random steps: whatever is offloaded, edited, run and restored, it equals a twin that never moved."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn

import overspill
from overspill.errors import OverspillError
from overspill.managed import managed
from overspill.moving import tier_of
from overspill.plan import Tier

WIDTH = 8
BATCH = 4


# ---------------------------------------------------------------- random models


class Casts(nn.Module):
    """A linear layer that computes in another dtype than its neighbours."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


class LooksUp(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(x.argmax(-1))


class Branch(nn.Module):
    """Parts in a container, with a parameter and buffers of its own beside them."""

    def __init__(self, parts: list[nn.Module], container: str, owns: bool, buffers: tuple[bool, ...]) -> None:
        super().__init__()
        named = {f"part{index}": part for index, part in enumerate(parts)}
        self.parts: nn.Module = {
            "list": lambda: nn.ModuleList(parts),
            "dict": lambda: nn.ModuleDict(named),
            "sequence": lambda: nn.Sequential(*parts),
        }[container]()
        if owns:
            self.scale = nn.Parameter(torch.randn(WIDTH))
        for index, persistent in enumerate(buffers):
            self.register_buffer(f"shift{index}", torch.randn(WIDTH, WIDTH), persistent=persistent)
        self.owns, self.shifts = owns, len(buffers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.parts, nn.Sequential):
            x = self.parts(x)
        else:
            parts = self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts
            for part in parts:
                x = torch.tanh(part(x))
        if self.owns:
            x = x * self.scale
        for index in range(self.shifts):
            x = x @ getattr(self, f"shift{index}")
        return torch.tanh(x)


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "bfloat16": lambda: Casts(torch.bfloat16),
    "float64": lambda: Casts(torch.float64),
    "embedding": LooksUp,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
}

leaves = st.sampled_from([*LEAVES, "again"])
branches: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda parts: st.tuples(
        st.lists(parts, min_size=1, max_size=3),
        st.sampled_from(["list", "dict", "sequence"]),
        st.booleans(),
        st.lists(st.booleans(), max_size=2).map(tuple),
    ),
    max_leaves=6,
)


def build(drawn: Any, made: list[nn.Module]) -> nn.Module:
    """The module that `drawn` describes. `made` holds the leaves so far: "again" is the last of them once more."""
    if not isinstance(drawn, str):
        parts, *options = drawn
        return Branch([build(part, made) for part in parts], *options)
    if drawn == "again" and made:
        return made[-1]
    made.append(LEAVES["linear" if drawn == "again" else drawn]())
    return made[-1]


def tie(model: nn.Module, pairs: list[tuple[int, int]]) -> None:
    """Tie weights of equal shape and dtype, as each of `pairs` says."""
    owners = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    for first, second in pairs:
        if owners:
            a, b = owners[first % len(owners)], owners[second % len(owners)]
            if a.weight.dtype == b.weight.dtype:
                b.weight = a.weight


# ---------------------------------------------------------------- what must be equal


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of the values: a NaN equals itself, and zeros keep their sign."""
    values: list[int] = tensor.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    return values


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def shape_of(model: nn.Module) -> list[Any]:
    """Names in order, what each shows, and which of them show the same tensor. Reads no value."""
    first: dict[int, str] = {}
    return [
        (name, first.setdefault(id(tensor), name), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in named_tensors(model)
    ]


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and persistent buffers: what can be offloaded."""
    buffers = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
    return [tensor for tensor in (*module._parameters.values(), *buffers) if tensor is not None]


names = st.integers(0, 999)  # which of the model's modules or tensors: the remainder counts
amounts = st.sampled_from([-0.5, 0.25, 1.0, 2.0])


class Machine(RuleBasedStateMachine):
    """A model and its twin. Each rule does something to both, or moves parts of the model only."""

    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module = nn.Module()
        self.twin: nn.Module = nn.Module()
        self.min_bytes = 0
        self.looks = True
        self.generator = torch.Generator()

    @initialize(
        tree=branches.filter(lambda drawn: not isinstance(drawn, str)),
        ties=st.lists(st.tuples(names, names), max_size=3),
        min_bytes=st.sampled_from([0, 150]),
        looks=st.booleans(),
        seed=st.integers(0, 3),
    )
    def start(self, tree: Any, ties: list[tuple[int, int]], min_bytes: int, looks: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        self.model = build(tree, []).to(self.device)
        tie(self.model, ties)
        self.twin = copy.deepcopy(self.model)
        self.model = copy.deepcopy(self.model)  # both are copies: their memory is aligned alike
        self.min_bytes = min_bytes
        self.looks = (
            looks  # looking reads all values, which may hide what forgets to: so look at the end only, at times
        )

    # Moves.

    @rule(name=names, tier=st.sampled_from(["disk", "disk", "cpu"]), as_module=st.booleans())
    def offload(self, name: int, tier: str, as_module: bool) -> None:
        path, module = self._module(name)
        before = self._tiers()
        movable = self._movable(module)
        tiers = {tier_of(tensor) for tensor in movable}
        try:
            if as_module:
                done = overspill.offload(module, to=tier, min_bytes=self.min_bytes)
            else:
                done = overspill.offload(self.model, to=tier, modules=[path], min_bytes=self.min_bytes)
        except OverspillError:
            # Right where nothing can move, or where something of it is there already, or is away with another module.
            tied_away = as_module and tiers - {Tier.DEVICE}
            assert not movable or Tier(tier) in tiers or self._is_no_move(tier, tiers) or tied_away
            assert self._tiers() == before
        else:
            assert tiers != {Tier(tier)}
            assert not self._is_no_move(tier, tiers)
            assert all(tier_of(tensor) is Tier(tier) for tensor in movable)
            assert done.nbytes > 0
            if tier == "disk":
                assert sum(file.stat().st_size for file in done.files) >= done.nbytes
        self._check()

    @rule(name=names, as_module=st.booleans(), delete=st.booleans())
    def restore(self, name: int, as_module: bool, delete: bool) -> None:
        path, module = self._module(name)
        before = self._tiers()
        is_away = [tensor for part in module.modules() for tensor in own_tensors(part) if tier_of(tensor) != "device"]
        was_managed = self._is_managed()  # also where all that was offloaded has been replaced since
        try:
            if as_module:
                overspill.restore(module, delete=delete)
            else:
                overspill.restore(self.model, modules=[path], delete=delete)
        except OverspillError:
            assert not is_away
            assert self._tiers() == before
        else:
            assert is_away or was_managed
            assert all(tier_of(tensor) is Tier.DEVICE for _, tensor in named_tensors(module))
        self._check()

    @rule(keeps=st.booleans())
    def copies(self, keeps: bool) -> None:
        copied = copy.deepcopy(self.model)
        self._assert_plain(copied)
        assert shape_of(copied) == shape_of(self.twin)
        if keeps:
            # Values that are not on the device are copied where they are.
            self.model = copied.to(next(tensor.device for _, tensor in named_tensors(self.twin)))
            self.twin.zero_grad()  # copies have no gradients
        else:
            with torch.no_grad():
                for tensor in (*copied.parameters(), *copied.buffers()):
                    tensor.zero_()
        self._check()

    # Edits.

    @rule(name=names, amount=amounts)
    def edits_in_place(self, name: int, amount: float) -> None:
        for tensor in self._both(name):
            with torch.no_grad():
                tensor.add_(1) if tensor.dtype == torch.int64 else tensor.mul_(amount)
        self._check()

    @rule(name=names, amount=amounts)
    def edits_one_element(self, name: int, amount: float) -> None:
        for tensor in self._both(name):
            with torch.no_grad():
                tensor[0 if tensor.ndim else ...] = amount
        self._check()

    @rule(name=names, amount=amounts)
    def edits_through_data(self, name: int, amount: float) -> None:
        for tensor in self._both(name):
            tensor.data.fill_(amount)
        self._check()

    @rule(name=names, amount=amounts)
    def replaces_data(self, name: int, amount: float) -> None:
        for tensor in self._both(name):
            tensor.data = torch.full_like(tensor.detach().clone(), amount)
        self._check()

    @rule(amount=amounts)
    def loads_a_state_dict(self, amount: float) -> None:
        for net in (self.model, self.twin):
            state = {
                name: value.detach().clone() if value.dtype == torch.int64 else value.detach().clone() * amount
                for name, value in net.state_dict().items()
            }
            net.load_state_dict(state)
        self._check()

    @rule(name=names, amount=amounts)
    def assigns_a_new_parameter(self, name: int, amount: float) -> None:
        places = [(path, p) for path, p in self.twin.named_parameters(remove_duplicate=False)]
        if places:
            path, p = places[name % len(places)]
            values = torch.full_like(p.detach(), amount)
            owner, _, attribute = path.rpartition(".")
            for net in (self.model, self.twin):
                setattr(net.get_submodule(owner), attribute, nn.Parameter(values.clone()))
        self._check()

    @rule(name=names, on=st.booleans())
    def freezes(self, name: int, on: bool) -> None:
        path, _ = self._module(name)
        for net in (self.model, self.twin):
            net.get_submodule(path).requires_grad_(not on)
        self._check()

    # Runs.

    @rule(mode=st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad]), training=st.booleans())
    def runs(self, mode: Callable[[], Any], training: bool) -> None:
        x = self._input()
        for net in (self.model, self.twin):
            net.train(training)
        with mode():
            assert bits(self.model(x)) == bits(self.twin(x))
        self._check()

    @precondition(lambda self: any(p.requires_grad for p in self.twin.parameters()))
    @rule(steps=st.booleans())
    def trains(self, steps: bool) -> None:
        x = self._input()
        for net in (self.model, self.twin):
            loss = net(x).sum()
            if loss.requires_grad:  # a frozen part may be all that the output depends on
                loss.backward()
            del loss
            if steps:
                torch.optim.SGD(net.parameters(), lr=0.5).step()
        self._check()

    @rule()
    def forgets_gradients(self) -> None:
        self.model.zero_grad()
        self.twin.zero_grad()

    # What holds after each step, and at the end.

    def _check(self) -> None:
        assert shape_of(self.model) == shape_of(self.twin)
        if self.looks:
            self._look()

    def _look(self) -> None:
        x = self._input()
        with torch.no_grad():
            assert bits(self.model(x)) == bits(self.twin(x))
        ours, theirs = self.model.state_dict(), self.twin.state_dict()
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert bits(ours[name]) == bits(value), name
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.device == p.device, name
                assert bits(p.grad) == bits(q.grad), name

    def teardown(self) -> None:
        if self._is_managed():
            overspill.restore(self.model)
        self._assert_plain(self.model)
        self._look()

    def _assert_plain(self, model: nn.Module) -> None:
        for (path, module), other in zip(model.named_modules(), self.twin.modules(), strict=True):
            assert set(vars(module)) == set(vars(other)), path
            assert module._compiled_call_impl is None, path
            assert not module._forward_pre_hooks, path
        for name, tensor in named_tensors(model):
            assert type(tensor) in (nn.Parameter, torch.Tensor), name
            assert not vars(tensor), name
            assert not tensor.is_inference(), name

    # What rules choose from.

    def _module(self, name: int) -> tuple[str, nn.Module]:
        modules = list(self.model.named_modules(remove_duplicate=False))
        return modules[name % len(modules)]

    def _both(self, name: int) -> Iterator[torch.Tensor]:
        ours, theirs = (list(named_tensors(net)) for net in (self.model, self.twin))
        if ours:
            yield ours[name % len(ours)][1]
            yield theirs[name % len(theirs)][1]

    def _input(self) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=self.generator).to(self.device)

    def _tiers(self) -> dict[str, Tier]:
        return {name: tier_of(tensor) for name, tensor in named_tensors(self.model)}

    def _is_managed(self) -> bool:
        return any(managed(module) is not None for module in self.model.modules())

    def _movable(self, module: nn.Module) -> list[torch.Tensor]:
        found = []
        for part in module.modules():
            tensors = own_tensors(part)
            if sum(tensor.nbytes for tensor in dict.fromkeys(tensors)) >= max(self.min_bytes, 1):
                found += tensors
        return found

    def _is_no_move(self, tier: str, tiers: set[Tier]) -> bool:
        """Host memory is no other place for what is on the CPU and computes there."""
        return tier == "cpu" and self.device == "cpu" and Tier.DEVICE in tiers


class MachineOnCuda(Machine):
    """The same where the two tiers are other places than the device."""

    device = "cuda:0"


# Steps enough for a part to go, be edited, come back and go again; one failure shrunk is worth more than ten explained.
SETTINGS = settings(
    max_examples=150, stateful_step_count=14, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False
)


def test_whatever_is_done_the_model_equals_its_twin() -> None:
    run_state_machine_as_test(Machine, settings=SETTINGS)


@pytest.mark.gpu
def test_whatever_is_done_on_a_gpu_the_model_equals_its_twin() -> None:
    run_state_machine_as_test(MachineOnCuda, settings=SETTINGS)

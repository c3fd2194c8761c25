"""Trainings that are offloaded have the bits of those that are not: each strategy in each situation."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.slab import Slab, Window
from training.loops import (
    STRATEGIES,
    VOCAB,
    WIDTH,
    Block,
    Net,
    UNet,
    activations_of,
    assert_same,
    batches,
    compare,
    loss_of,
    pair,
    plainly,
    train,
)
from training.random_nets import Forces

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=list(STRATEGIES))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STRATEGIES[request.param]


@pytest.fixture(params=["both", "all"])
def some_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """For what the strategies have in common."""
    return STRATEGIES[request.param]


def test_blocks_without_buffers_have_each_other_s_slabs_as_they_are(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, pass_on = Counter[bool](), Window.pass_on

    def counted(self: Window, slab: Slab) -> bool:
        result = pass_on(self, slab)
        passed[result] += 1
        return result

    monkeypatch.setattr(Window, "pass_on", counted)
    compare(lambda: Net(buffers=False), device, options)
    assert (passed[True] > 10 * passed[False]) == bool(options.get("weights")), passed


def test_plain_training(device: str, options: dict[str, Any]) -> None:
    compare(Net, device, options)


def test_gradients_are_accumulated(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        plainly(model, (batch[0].flip(0), batch[1].flip(0)), step)
        plainly(model, (batch[0][:1], batch[1][:1]), step)
        return plainly(model, batch, step)

    compare(Net, device, options, backward)


def test_gradients_are_accumulated_in_place_behind_zero_grad(device: str, some_options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        plainly(model, batch, step)
        model.zero_grad(set_to_none=False)
        return plainly(model, batch, step)

    compare(Net, device, some_options, backward)


def test_gradients_are_clipped(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        loss = plainly(model, batch, step)
        # The sum of the squares on one device for both: others add up in another order.
        norm = get_total_norm([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        clip_grads_with_norm_(model.parameters(), 0.25, norm)
        assert norm > 0.25
        return loss

    compare(Net, device, options, backward)


def test_torch_clips_gradients_on_several_devices(device: str, some_options: dict[str, Any]) -> None:
    model = Net().to(device)
    overspill.offload_training(model, **some_options)
    plainly(model, next(iter_batches(device)), 0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    total = get_total_norm([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert torch.isclose(total, torch.tensor(0.25), atol=1e-4)


def iter_batches(device: str) -> Iterator[Batch]:
    from training.loops import batches

    return batches(1, device)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_user_checkpoints_the_blocks(device: str, options: dict[str, Any], reentrant: bool) -> None:
    class Checkpointed(Net):
        def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(block, x, mask, use_reentrant=reentrant)
            return output

    reference, model = pair(Checkpointed, device)
    expected = train(reference, device)
    overspill.offload_training(model, **options)
    assert_same(train(model, device), expected)


def test_autocast(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        return loss

    compare(Net, device, options, backward)


def _sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2**-4, momentum=0.5)


def _fused_adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """One that divides by the scale itself, if nobody has done so before."""
    return torch.optim.AdamW(parameters, lr=2**-4, fused=True)


_Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class _WhereTheyLive(torch.optim.Optimizer):
    """An optimizer of resident weights that updates each on the device where another model has it, since devices round
    otherwise. Scalers divide for it."""

    def __init__(self, make: _Make, parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.weights = self.param_groups[0]["params"]
        pairs = zip(self.weights, others, strict=True)
        self.homes = [nn.Parameter(weight.detach().to(other.device, copy=True)) for weight, other in pairs]
        self.optimizer = make(self.homes)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for weight, home in zip(self.weights, self.homes, strict=True):
            home.grad = None if weight.grad is None else weight.grad.to(home.device)
        self.optimizer.step()
        for weight, home in zip(self.weights, self.homes, strict=True):
            weight.detach().copy_(home.detach())


@pytest.mark.parametrize(
    ("make", "unscales"),
    [(_sgd, True), (_fused_adamw, False), (_fused_adamw, True)],
    ids=["sgd", "fused adamw", "fused adamw, unscaled"],
)
def test_gradients_that_a_scaler_scales_overflows_among_them(
    make: _Make, unscales: bool, device: str, options: dict[str, Any]
) -> None:
    kind, found = torch.device(device).type, []
    reference, model = pair(Net, device)
    overspill.offload_training(model, **options)
    resident = _WhereTheyLive(make, reference.parameters(), model.parameters())
    for net, optimizer in ((reference, resident), (model, make(model.parameters()))):
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**20, growth_interval=2)
        torch.manual_seed(3)  # of dropout
        losses, scales = [], []
        for batch in batches(12, device):
            with torch.autocast(kind, dtype=torch.float16):
                loss = loss_of(net, batch)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        assert 1 < scales.count(min(scales)) < len(scales), "there were overflows, and steps without"
        found.append((losses, scales, [p.detach().cpu() for p in net.parameters()]))
    (losses, scales, weights), (our_losses, our_scales, our_weights) = found
    assert our_losses == losses
    assert our_scales == scales
    assert all(map(torch.equal, our_weights, weights))


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_step_that_overflows_on_two_devices_is_skipped_whoever_offloaded_the_weights(device: str, to: str) -> None:
    model, _ = pair(Net, device)
    overspill.offload(model, to="disk" if device == "cpu" else to, modules=["blocks.1", "blocks.2"], min_bytes=0)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4, fused=device != "cpu" and to == "cpu")
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**127)
    for batch in batches(2, device):
        scaler.scale(loss_of(model, batch) * 2**8).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**125
    assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))


def test_autocast_of_blocks_that_run_twice(device: str, some_options: dict[str, Any]) -> None:
    class Twice(Net):
        def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().call(block, super().call(block, x, mask), mask)

    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, cache_enabled=False):
            loss = loss_of(model, batch)
        loss.backward()
        return loss

    compare(Twice, device, some_options, backward)


def test_tied_weights(device: str, options: dict[str, Any]) -> None:
    def tie(model: nn.Module) -> None:
        assert isinstance(model, Net)
        model.blocks[2].out.weight = model.blocks[1].out.weight

    model = compare(lambda: Net(tied=True), device, options, before=tie)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert model.get_parameter("blocks.1.out.weight") is model.get_parameter("blocks.2.out.weight")


class Adapted(nn.Module):
    """A frozen linear layer and two trained matrices of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.b(self.a(x))
        return adapted


def with_adapters() -> Net:
    net = Net().requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.qkv, block.down = Adapted(block.qkv), Adapted(block.down)  # type: ignore[assignment]
    return net


class Conjugated(Block):
    """Its operations save what shows a weight conjugated, or negated, over the weight's own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, mask)
        conjugated = self.rotation.conj()
        rotated = x.to(torch.complex64) * conjugated[1]
        return x + (rotated.real + rotated.imag) * conjugated.imag[0]


def test_weights_that_are_saved_as_conjugates(device: str, options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        model = Net(blocks=0)
        model.blocks.extend(Conjugated() for _ in range(4))
        return model

    compare(build, device, options, steps=5)


def test_a_frozen_base_with_adapters(device: str, options: dict[str, Any]) -> None:
    compare(with_adapters, device, options)


def test_a_frozen_base_on_disk_with_adapters(device: str) -> None:
    model = compare(with_adapters, device, {"weights": "disk"})
    on_disk = [name for name, p in model.named_parameters() if "DiskTensor" in type(p).__name__]
    assert on_disk
    assert all(not model.get_parameter(name).requires_grad for name in on_disk)


def test_blocks_that_are_skipped_now_and_then(device: str, options: dict[str, Any]) -> None:
    class Skips(Net):
        turn = 0

        def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            return x if self.turn % 4 == 0 else super().call(block, x, mask)

    compare(Skips, device, options)


def test_blocks_that_run_twice(device: str, some_options: dict[str, Any]) -> None:
    class Twice(Net):
        def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().call(block, super().call(block, x, mask), mask)

    compare(Twice, device, some_options)


def test_a_parameter_without_a_gradient(device: str, options: dict[str, Any]) -> None:
    def add(model: nn.Module) -> None:
        assert isinstance(model, Net)
        for block in model.blocks:
            block.unused = nn.Parameter(torch.ones(3, device=device))

    model = compare(Net, device, options, before=add)
    assert model.get_parameter("blocks.0.unused").grad is None


def test_skips_of_a_u_net(device: str, options: dict[str, Any]) -> None:
    compare(UNet, device, options)


def test_a_graph_that_is_retained_gives_the_same_twice(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare(Net, device, options, backward)


def test_gradients_of_gradients(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        loss = loss_of(model, batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty: torch.Tensor = sum((g.to(loss.device).square().sum() for g in gradients), loss)
        penalty.backward()
        return penalty

    compare(Net, device, options, backward)


@pytest.mark.parametrize("weights", [True, "disk"])
def test_gradients_of_weights_whose_block_checkpoints_a_part_of_itself(device: str, weights: bool | str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Block()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.part, x, mask, use_reentrant=False)
            return output

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Nested() for _ in range(4))

        def call(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = block(x, mask)
            return output

    reference, model = pair(Holding, device)
    overspill.offload_training(model, activations=False, weights=weights)
    found = []
    for each in (reference, model):
        torch.manual_seed(3)
        wanted = [*each.blocks.parameters(), each.embed.weight]
        loss = loss_of(each, next(iter_batches(device)))
        some = torch.autograd.grad(loss, wanted, retain_graph=True)
        unused = nn.Parameter(torch.ones(2, device=device))
        *_, zeros = torch.autograd.grad(loss, [*wanted, unused], retain_graph=True, materialize_grads=True)
        assert torch.equal(zeros, torch.zeros_like(unused))
        wanted[0].requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(loss, wanted)
        found.append([gradient.cpu() for gradient in some])
    assert all(map(torch.equal, *found))


def test_gradients_of_some_tensors_only(device: str, some_options: dict[str, Any]) -> None:
    reference, model = pair(Net, device)
    overspill.offload_training(model, **some_options)
    batch = next(iter_batches(device))
    found = []
    for each in (reference, model):
        torch.manual_seed(3)
        wanted = [each.get_parameter("blocks.1.qkv.weight"), each.get_parameter("head.weight")]
        found.append(torch.autograd.grad(loss_of(each, batch), wanted))
        assert all(parameter.grad is None for parameter in each.parameters())
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.cpu(), ours.cpu())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_between_steps(device: str, options: dict[str, Any], mode: Callable[[], Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        model.eval()
        with mode():
            loss_of(model, batch)
        model.train()
        return plainly(model, batch, step)

    compare(Net, device, options, backward)


class _BoomError(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _BoomError


def test_an_exception_in_forward_is_followed_by_clean_steps(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        state = torch.get_rng_state(), torch.cuda.get_rng_state() if "cuda" in device else None
        handle = model.get_submodule(f"blocks.{step % 6}.up").register_forward_hook(_fail)
        with pytest.raises(_BoomError):
            plainly(model, batch, step)
        handle.remove()
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1])
        return plainly(model, batch, step)

    compare(Net, device, options, backward)


def test_an_exception_in_backward_is_followed_by_clean_steps(device: str, options: dict[str, Any]) -> None:
    def backward(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
        # The module's hook on its output's gradient fails in the middle of backward.
        handle = model.get_submodule(f"blocks.{step % 6}").register_full_backward_hook(_fail)
        with pytest.raises(_BoomError):
            plainly(model, batch, step)
        handle.remove()
        model.zero_grad()
        return plainly(model, batch, step)

    compare(Net, device, options, backward)


def test_hooks_on_parameters_see_complete_gradients(device: str, some_options: dict[str, Any]) -> None:
    reference, model = pair(Net, device)
    overspill.offload_training(model, **some_options)
    seen: list[dict[str, torch.Tensor]] = []
    for each in (reference, model):
        found: dict[str, torch.Tensor] = {}
        for name, parameter in each.named_parameters():
            parameter.register_hook(lambda g, name=name, found=found: found.update({name: g.cpu().clone()}))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, found=found: found.update({f"{name} in all": p.grad.cpu().clone()})
            )
        torch.manual_seed(3)
        plainly(each, next(iter_batches(device)), 0)
        seen.append(found)
    assert seen[0].keys() == seen[1].keys()
    for name, theirs in seen[0].items():
        assert torch.equal(theirs, seen[1][name]), name


# Dynamo asks every input for .grad, also inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks(device: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def compile_blocks(model: nn.Module) -> None:
        assert isinstance(model, Net)
        for block in model.blocks:
            block.compile(backend="aot_eager")

    # Without dropout: a compiled block draws its random numbers in an order of its own.
    compare(lambda: Net(3, dropout=0.0), device, options, before=compile_blocks)


def test_an_optimizer_that_was_made_before_trains_on(device: str, some_options: dict[str, Any]) -> None:
    reference, model = pair(Net, device)
    records = []
    for each in (reference, model):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(each.parameters(), lr=2**-4)
        for step in range(4):
            if step == 2 and each is model:
                overspill.offload_training(model, **some_options)
            loss = plainly(each, next(iter_batches(device)), step)
            optimizer.step()
            optimizer.zero_grad()
        records.append((loss.detach().cpu(), [p.detach().cpu().clone() for p in each.parameters()]))
    assert torch.equal(records[0][0], records[1][0])
    for theirs, ours in zip(records[0][1], records[1][1], strict=True):
        assert torch.equal(theirs, ours)


def test_transformers_checkpoints_its_blocks(device: str, some_options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        attn_implementation="eager",
    )

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.LlamaForCausalLM(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(input_ids=ids).logits
            return logits

    reference, model = pair(Llama, device)
    expected = train(reference, device)
    overspill.offload_training(model, **some_options)
    assert_same(train(model, device), expected)
    overspill.restore(model)
    reference, model = pair(Llama, device)
    for each in (reference, model):
        each.inner.gradient_checkpointing_enable()  # type: ignore[operator, union-attr]
    expected = train(reference, device)
    overspill.offload_training(model, **some_options)
    assert_same(train(model, device), expected)


def under_the_context_manager(model: nn.Module, batch: Batch, step: int) -> torch.Tensor:
    with overspill.offload_activations(min_bytes=0):
        loss = loss_of(model, batch)
    loss.backward()
    return loss


def test_training_under_the_context_manager(device: str) -> None:
    reference, model = pair(Net, device)
    assert_same(train(model, device, under_the_context_manager), train(reference, device))


class ForcesWithASharedWeight(nn.Module):
    """Blocks that compute gradients, whose own backward saves weights outside of any call of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.Sequential(Forces(), Forces(), Forces())
        self.blocks[2].out.weight = self.blocks[1].out.weight
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_weights_that_are_saved_outside_of_their_calls_under_the_context_manager(device: str, to: str) -> None:
    reference, model = pair(ForcesWithASharedWeight, device)
    parts = ["blocks.2.out", "blocks.1.linear", "blocks.0.out", "blocks.2.linear"]
    overspill.offload(model, to="disk" if device == "cpu" else to, modules=parts, min_bytes=0)
    assert_same(train(model, device, under_the_context_manager), train(reference, device))


def test_functional_code_under_the_context_manager(device: str) -> None:
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    x = torch.randn(4, 8, device=device)

    def compute() -> torch.Tensor:
        return functional.silu(x @ weight).t().softmax(0).square().sum()

    expected = torch.autograd.grad(compute(), weight)[0]
    with overspill.offload_activations(min_bytes=0):
        loss = compute()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


def test_the_transforms_of_torch_func_are_left_alone(device: str) -> None:
    _, model = pair(lambda: Net(dropout=0.0), device)
    overspill.offload_training(model)
    parameters = dict(model.named_parameters())
    batch = next(iter_batches(device))

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = torch.func.functional_call(model, values, (batch[0],))
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    found = torch.func.grad(loss)(parameters)
    plainly(model, batch, 0)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_nothing_leaves_outside_the_chosen_blocks(device: str) -> None:
    _, model = pair(Net, device)
    overspill.offload_training(model, layers=["blocks.2"])
    assert isinstance(model, Net)
    x = torch.randn(2, 6, WIDTH, device=device, requires_grad=True)
    model.blocks[1](x).sum().backward()
    assert activations_of(model).nbytes_sent == 0
    model.blocks[2](x).sum().backward()
    assert activations_of(model).nbytes_sent > 0

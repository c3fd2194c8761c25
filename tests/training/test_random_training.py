"""Random models, trained by random steps, offloaded in random ways: the bits of a twin that stays where it is."""

import copy
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import overspill
from overspill.training.blocks import find_blocks
from support import aligned
from training.random_nets import BATCH, TOKENS, VOCAB, RandomNet

SEQUENCES, STEPS = 8, 14
SOAK_SECONDS = float(os.environ.get("OVERSPILL_SOAK_SECONDS", "600"))


class _OnPurposeError(Exception):
    """Raised by a test."""


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class Sequence:
    """A model that is offloaded, and a twin that is not: each does what the other does."""

    def __init__(self, seed: int, device: str) -> None:
        self.chance, self.device = random.Random(seed), device
        torch.manual_seed(seed)
        self.shape = seed
        while len(find_blocks(net := self.build())) < 2:  # too different from each other
            self.shape += 10**10
        net.to(device)
        for parameter in net.parameters():
            parameter.requires_grad_(parameter is net.embed.weight or self.chance.random() > 0.1)
        self.twin, self.model = net, aligned(copy.deepcopy(net))
        aligned(net)
        self.story: list[str] = [" ".join(type(block).__name__ for block in net.blocks)]
        self.offload()
        self.steps: list[Callable[[], None]] = [
            *[self.train] * 6,
            self.accumulate,
            self.two_at_once,
            self.twice_through_a_graph,
            self.gradients_alone,
            self.gradients_of_gradients,
            self.weights_for_a_call,
            self.hooks,
            self.offloaded_besides,
            self.copy,
            self.no_gradients,
            self.forward_alone,
            self.fail_in_forward,
            self.fail_in_backward,
            self.edit,
            self.load_state,
            self.freeze,
            self.evaluate,
            self.again,
            self.save,
            self.load_anew,
            self.autocast,
            self.scaled,
            self.clip,
            self.clear,
        ]

    def build(self) -> RandomNet:
        return RandomNet(random.Random(self.shape))

    def both(self, act: Callable[[nn.Module, Any], object]) -> None:
        """Do the same with both, and see whether the same came of it."""
        seed = self.chance.randrange(2**31)
        results, state = [], self.chance.getstate()
        for model, optimizer in ((self.twin, self.twin_optimizer), (self.model, self.optimizer)):
            torch.manual_seed(seed)
            self.chance.setstate(state)
            results.append(act(model, optimizer))
        self.compare(*results)

    def compare(self, expected: object, found: object) -> None:
        same(expected, found, "result")
        pairs = zip(self.twin.named_parameters(), self.model.named_parameters(), strict=True)
        for (name, theirs), (other, mine) in pairs:
            assert name == other
            same(theirs.grad, mine.grad, f"gradient of {name}")
        expected_state, state = self.twin.state_dict(), self.model.state_dict()
        assert expected_state.keys() == state.keys()
        for name in state:
            same(expected_state[name], state[name], name)

    # Steps.

    def ids(self) -> torch.Tensor:
        random_ids = torch.Generator().manual_seed(self.chance.randrange(2**31))
        return torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=random_ids).to(self.device)

    def offload(self) -> None:
        self.overlaps = self.chance.random() < 0.7  # beside backward, weights in files cannot be updated
        if self.overlaps:
            self.offload_training()
        else:
            self.offload_parts()
        self.new_optimizers()

    def offload_parts(self) -> None:
        chance = self.chance
        paths = [path for path, module in self.twin.named_modules() if path and any(True for _ in module.parameters())]
        modules = None if chance.random() < 0.3 else chance.sample(paths, chance.randint(1, min(4, len(paths))))
        to = "disk" if self.device == "cpu" else chance.choice(["cpu", "disk"])
        options: dict[str, Any] = {"to": to, "modules": modules, "min_bytes": 0}
        self.story.append(f"offload({options})")
        overspill.offload(self.model, **options)

    def offload_training(self) -> None:
        chance = self.chance
        while True:
            options: dict[str, Any] = {
                "activations": chance.choice([True, True, False, "disk"]),
                "weights": chance.choice([False, True, True, "disk"]),
                "recompute": chance.random() < 0.5,
                "double_buffering": chance.random() < 0.7,
            }
            if chance.random() < 0.4:
                options["layers"] = chance.randrange(len(find_blocks(self.twin)))
            if chance.random() < 0.15:
                options = {**options, "layers": None, "recompute": False, "memory": "1GB"}
            if options["activations"] or options["weights"]:
                break
        self.story.append(f"offload_training({options})")
        overspill.offload_training(self.model, **options)

    def new_optimizers(self) -> None:
        twins, ours = ([p for p in model.parameters() if p.requires_grad] for model in (self.twin, self.model))
        self.twin_optimizer: torch.optim.Optimizer
        self.optimizer: torch.optim.Optimizer
        self.max_norm: float | None = None
        # torch's AdamW rounds otherwise on a GPU, and knows no fused update of complex numbers.
        if self.device == "cpu" and not self.has("Custom") and self.chance.random() < 0.4:
            self.max_norm = self.chance.choice([None, 2**-4])
            self.twin_optimizer = torch.optim.AdamW(twins, lr=2**-8, fused=True)
            self.optimizer = overspill.HostAdamW(ours, lr=2**-8, max_grad_norm=self.max_norm)
        else:
            momentum = self.chance.choice([0.0, 0.5])
            self.twin_optimizer = torch.optim.SGD(twins, lr=2**-4, momentum=momentum)
            self.optimizer = torch.optim.SGD(ours, lr=2**-4, momentum=momentum)

    def again(self) -> None:
        overspill.restore(self.model)
        self.compare(None, None)
        self.offload()

    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.save_to(folder)

    def save_to(self, folder: str) -> None:
        overspill.save(self.model, folder, progress=False)
        stored = load_file(f"{folder}/model.safetensors")
        state = self.twin.state_dict()
        assert stored.keys() <= state.keys()
        for name, values in stored.items():
            same(state[name], values, f"{name} as it is stored")

    def load_anew(self) -> None:
        if self.has("Reassigning"):  # what its first forward makes, no skeleton has
            return
        budget = self.chance.choice([32_000, 64_000, 10**6])
        mode = self.twin.training
        with tempfile.TemporaryDirectory() as folder:
            self.save_to(folder)
            with overspill.empty_weights():
                self.model = self.build()
            for mine, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                mine.requires_grad_(theirs.requires_grad)
            for module, other in zip(self.model.modules(), self.twin.modules(), strict=True):
                module.training = other.training
            here = 0 if self.device != "cpu" else "cpu"
            plan = overspill.plan(self.model, {here: budget, "cpu": 10**7 if here == 0 else budget}, device=here)
            overspill.load(self.model, folder, plan, progress=False)
            self.twin.zero_grad()
            self.overlaps = False
            self.new_optimizers()
            self.compare(None, None)
            self.train()
            overspill.restore(self.model)
        assert self.twin.training == mode
        self.offload()

    def train(self) -> None:
        ids = self.ids()

        def act(model: nn.Module, optimizer: Any) -> object:
            overlaps = self.chance.random() < 0.7 and isinstance(optimizer, overspill.HostAdamW)
            overlaps &= self.overlaps and not self.reentrant()  # gradients of those come one by one
            # A block that is recomputed reads all its weights, also those that another call alone has used.
            overlaps &= not (self.has("Experts") and self.uses_weights_again())
            loss = loss_of(model, ids)
            with optimizer.overlap() if overlaps else nullcontext():
                backward(loss)
            if self.chance.random() < 0.1:  # a step that is left out
                optimizer.zero_grad()
                return loss.detach()
            if model is self.twin and self.max_norm is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.max_norm)
            optimizer.step()
            return loss.detach()

        self.both(act)
        self.clear()

    def accumulate(self) -> None:
        ids = [self.ids() for _ in range(self.chance.randint(1, 3))]

        def act(model: nn.Module, optimizer: Any) -> object:
            losses = [loss_of(model, each) for each in ids[:1]]
            backward(losses[0])
            for each in ids[1:]:
                losses.append(loss_of(model, each))
                backward(losses[-1])
            return [loss.detach() for loss in losses]

        self.both(act)

    def two_at_once(self) -> None:
        first, second, order = self.ids(), self.ids(), self.chance.randrange(3)
        if order == 0 and self.uses_weights_again():
            return

        def act(model: nn.Module, optimizer: Any) -> object:
            losses = [loss_of(model, first), loss_of(model, second)]
            if order == 0:
                backward(losses[0] + losses[1])
            else:
                for loss in losses if order == 1 else reversed(losses):
                    backward(loss)
            return [loss.detach() for loss in losses]

        self.both(act)

    def twice_through_a_graph(self) -> None:
        ids = self.ids()

        def act(model: nn.Module, optimizer: Any) -> object:
            loss = loss_of(model, ids)
            backward(loss, retain_graph=True)
            backward(loss)
            return loss.detach()

        self.both(act)

    def gradients_alone(self) -> None:
        ids, share = self.ids(), self.chance.random()

        def act(model: nn.Module, optimizer: Any) -> object:
            trained = [p for p in model.parameters() if p.requires_grad]
            some = [p for p in trained if self.chance.random() < share]
            loss = loss_of(model, ids)
            if not some or not loss.requires_grad or self.reentrant():
                return loss.detach()
            return torch.autograd.grad(loss, some, allow_unused=True)

        self.both(act)

    def gradients_of_gradients(self) -> None:
        ids = self.ids()

        def act(model: nn.Module, optimizer: Any) -> object:
            trained = [p for p in model.parameters() if p.requires_grad]
            loss = loss_of(model, ids)
            if not trained or not loss.requires_grad or self.reentrant() or self.uses_weights_again():
                return loss.detach()
            first = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
            squares: list[torch.Tensor] = [g.abs().square().sum().cpu() for g in first if g is not None]  # type: ignore[redundant-expr]
            if any(square.requires_grad for square in squares):
                torch.stack(squares).sum().backward()
            return loss.detach()

        if self.device == "cpu":
            self.both(act)
        else:
            self.nearly(act)

    def nearly(self, act: Callable[[nn.Module, Any], object]) -> None:
        """Do the same with both, where autograd adds up gradients from the threads of two devices as they come."""
        seed, gradients = self.chance.randrange(2**31), []
        for model, optimizer in ((self.twin, self.twin_optimizer), (self.model, self.optimizer)):
            model.zero_grad()
            torch.manual_seed(seed)
            act(model, optimizer)
            gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        for theirs, mine in zip(*gradients, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)

    def uses_weights_again(self) -> bool:
        """Whether a forward uses weights more than once: docs/train.md says which sums of gradients round otherwise."""
        return self.twin.twice >= 0 or self.twin.shares or self.twin.tied or self.has("Recurrent", "Spectral")

    def has(self, *kinds: str) -> bool:
        return any(type(block).__name__ in kinds for block in self.twin.blocks)

    def reentrant(self) -> bool:
        return any(getattr(module, "_reentrant", False) for module in self.twin.modules())

    def weights_for_a_call(self) -> None:
        ids, factor = self.ids(), self.chance.choice([0.5, 2.0])

        def act(model: nn.Module, optimizer: Any) -> object:
            given = {name: (p.detach().to(self.device) * factor) for name, p in model.named_parameters()}
            given = {name: p.requires_grad_() for name, p in given.items() if self.chance.random() < 0.5}
            logits = functional_call(model, given, (ids[:, :-1],))
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            if not self.reentrant():
                backward(loss)
            return [loss.detach(), *(p.grad for p in given.values())]

        # torch's own checkpoint does not know of them when it computes once more.
        if not self.uses_weights_again() and not self.has("Nested"):
            self.both(act)

    def hooks(self) -> None:
        ids, factor = self.ids(), self.chance.choice([0.5, 2.0])

        def act(model: nn.Module, optimizer: Any) -> object:
            of_weights: list[torch.Tensor] = []
            seen: list[torch.Tensor] = []

            def weight_hook(gradient: torch.Tensor) -> torch.Tensor:
                of_weights.append(gradient.detach().cpu().clone())
                return gradient * factor

            def module_hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
                seen.extend(gradient.detach().clone() for gradient in outputs if gradient is not None)

            def output_hook(module: nn.Module, args: object, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: gradient * factor)

            trained = [p for p in model.parameters() if p.requires_grad]
            block = self.chance.choice(list(model.blocks))
            handles = [self.chance.choice(trained).register_hook(weight_hook)]
            handles.append(block.register_forward_hook(output_hook))
            if not self.has("Editing", "Passing"):  # such a hook gives modules views of their inputs
                handles.append(block.register_full_backward_hook(module_hook))
            backward(loss_of(model, ids))
            for handle in handles:
                handle.remove()
            return [*of_weights, *seen]

        self.both(act)

    def offloaded_besides(self) -> None:
        ids, to = self.ids(), self.chance.choice(["cpu", "disk"])

        def act(model: nn.Module, optimizer: Any) -> object:
            away = overspill.offload_activations(to=to, min_bytes=0)
            with away if model is self.model else nullcontext():
                loss = loss_of(model, ids)
            backward(loss)
            return loss.detach()

        self.both(act)

    def copy(self) -> None:
        ids = self.ids()
        results = []
        for model in (self.twin, self.model):
            torch.manual_seed(0)
            another = copy.deepcopy(model).to(self.device)
            loss = loss_of(aligned(another), ids)
            backward(loss)
            results.append([loss.detach(), *(p.grad for p in another.parameters())])
        self.compare(*results)

    def no_gradients(self) -> None:
        ids, modes = self.ids(), [torch.no_grad, torch.inference_mode]
        # What a forward in inference mode puts in the place of a buffer cannot be edited later.
        mode = modes[0] if self.has("Reassigning") else self.chance.choice(modes)

        def act(model: nn.Module, optimizer: Any) -> object:
            with mode():
                return loss_of(model, ids).clone()

        self.both(act)

    def forward_alone(self) -> None:
        ids = self.ids()
        self.both(lambda model, optimizer: loss_of(model, ids).detach())

    def fail_in_forward(self) -> None:
        ids, where = self.ids(), self.chance.randrange(len(self.twin.blocks))

        def act(model: nn.Module, optimizer: Any) -> object:
            inside = list(model.blocks[where].modules())
            module, before = self.chance.choice(inside), self.chance.random() < 0.5

            def fail(*args: object) -> None:
                raise _OnPurposeError

            hook = module.register_forward_pre_hook(fail) if before else module.register_forward_hook(fail)
            try:
                backward(loss_of(model, ids))
                return "ended"
            except _OnPurposeError:
                return "failed"
            finally:
                hook.remove()

        self.both(act)

    def fail_in_backward(self) -> None:
        ids, where = self.ids(), self.chance.randrange(len(self.twin.blocks))

        def act(model: nn.Module, optimizer: Any) -> object:
            def fail(gradient: torch.Tensor) -> None:
                raise _OnPurposeError

            def hook(module: nn.Module, args: object, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if tensor.requires_grad:
                    tensor.register_hook(fail)

            handle = model.blocks[where].register_forward_hook(hook)
            try:
                backward(loss_of(model, ids))
                how = "ended"
            except _OnPurposeError:
                how = "failed"
            finally:
                handle.remove()
            for parameter in model.parameters():  # which of them have come so far is nobody's business
                parameter.grad = None
            return how

        self.both(act)

    def edit(self) -> None:
        def act(model: nn.Module, optimizer: Any) -> object:
            name, parameter = self.chance.choice(list(model.named_parameters()))
            how = self.chance.randrange(4)
            with torch.no_grad():
                if how == 0:
                    parameter.mul_(0.5)
                elif how == 1:
                    parameter.view(-1)[0] = 0.25
                elif how == 2:
                    parameter.data.copy_(parameter.data * 2)
                else:
                    parameter.copy_(parameter.flip(0))
            return name

        self.both(act)

    def load_state(self) -> None:
        def act(model: nn.Module, optimizer: Any) -> object:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            name = self.chance.choice(list(state))
            state[name].mul_(2)
            model.load_state_dict(state)
            return name

        self.both(act)

    def freeze(self) -> None:
        def act(model: nn.Module, optimizer: Any) -> object:
            parameter = self.chance.choice(list(model.parameters())[1:])
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None
            return None

        self.both(act)
        self.new_optimizers()

    def evaluate(self) -> None:
        ids = self.ids()

        def act(model: nn.Module, optimizer: Any) -> object:
            model.eval()
            with torch.no_grad():
                result = loss_of(model, ids)
            model.train(self.chance.random() < 0.8)
            return result

        self.both(act)

    def autocast(self) -> None:
        ids = self.ids()

        def act(model: nn.Module, optimizer: Any) -> object:
            # A cast that is cached sums the gradients of all its uses in its own precision.
            caches, kind = not self.uses_weights_again(), torch.device(self.device).type
            with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=caches):
                loss = loss_of(model, ids)
            backward(loss)
            return loss.detach()

        if not self.has("Recurrent") and not self.has("Custom"):
            self.both(act)

    def scaled(self) -> None:
        ids, start = [self.ids() for _ in range(2)], 2.0 ** self.chance.choice([8, 12, 127])  # too much, the last one

        def act(model: nn.Module, optimizer: Any) -> object:
            optimizer.zero_grad()
            scaler, scales = torch.amp.GradScaler(torch.device(self.device).type, init_scale=start), []
            for each in ids:
                backward(scaler.scale(loss_of(model, each)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            return scales

        # Complex gradients cannot be scaled, nor those of halves on a GPU, and HostAdamW has tests of its own.
        can_be_scaled = not self.has("Custom") and (self.device == "cpu" or not self.has("Halves"))
        if can_be_scaled and not isinstance(self.optimizer, overspill.HostAdamW):
            self.both(act)

    def clip(self) -> None:
        def act(model: nn.Module, optimizer: Any) -> object:
            if any(p.grad is not None for p in model.parameters()):
                torch.nn.utils.clip_grad_value_(model.parameters(), 2**-8)
            return None

        if not self.has("Custom"):  # complex gradients cannot be clipped
            self.both(act)

    def clear(self) -> None:
        to_none = self.chance.random() < 0.7

        def act(model: nn.Module, optimizer: Any) -> object:
            model.zero_grad(set_to_none=to_none)
            return None

        self.both(act)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            step = self.chance.choice(self.steps)
            self.story.append(step.__name__)
            step()
        overspill.restore(self.model)
        self.compare(None, None)


def backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def same(expected: object, found: object, what: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), what
        assert expected.dtype == found.dtype, what
        a, b = expected.detach().cpu().resolve_conj().contiguous(), found.detach().cpu().resolve_conj().contiguous()
        assert a.shape == b.shape, what
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), what
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(expected) == len(found)
        for theirs, mine in zip(expected, found, strict=True):
            same(theirs, mine, what)
    else:
        assert expected == found, what


def play(seed: int, device: str) -> None:
    sequence = None
    try:
        sequence = Sequence(seed, device)
        sequence.go(STEPS)
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "; ".join(sequence.story if sequence else ()))
        raise


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("first", range(0, 48, SEQUENCES))
def test_a_random_training_has_the_bits_of_its_twin(first: int, device: str) -> None:
    for seed in range(first, first + SEQUENCES):
        play(seed, device)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_random_trainings_for_a_long_time(device: str) -> None:
    first = random.SystemRandom().randrange(10**7, 10**9)  # others each time; one that fails is told with its seed
    until = time.monotonic() + SOAK_SECONDS
    for seed in itertools.count(first):
        play(seed, device)
        if time.monotonic() > until:
            break

"""Parts of a model in memory go to a tier and come back: the contract of `offload` and `restore`, on every tier."""

import copy
import errno
import gc
import itertools
import json
import os
import pickle
import resource
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import overspill
from overspill import offloading, transfer
from overspill.checkpoint.reader import FileReader
from overspill.errors import (
    BudgetError,
    OffloadFolderError,
    OverspillError,
    PlanError,
    StateError,
)
from overspill.homes import DiskTensor, HostTensor
from overspill.managed import managed
from overspill.plan import Tier
from overspill.transfer import Transfer
from support import (
    TIERS,
    Block,
    Net,
    Where,
    aligned,
    loaded,
    narrow,
    placed,
    run_program,
    save_checkpoint,
    streamed_units,
)

IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def model(where: Where) -> Net:
    return aligned(Net()).to(where.device)  # type: ignore[return-value]


@pytest.fixture
def twin(model: Net) -> Net:
    """The same model, which nobody offloads."""
    return copy.deepcopy(model)


# ---------------------------------------------------------------- what all tests look at


def device_of(twin: nn.Module) -> torch.device:
    return next(itertools.chain(twin.parameters(), twin.buffers())).device


def assert_right(model: nn.Module, twin: nn.Module, x: torch.Tensor = IDS, passes: int = 2) -> None:
    """Both give the same bits, time and again."""
    x = x.to(device_of(twin))
    with torch.no_grad():
        for _ in range(passes):
            assert torch.equal(model(x), twin(x))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of any tensor's values in host memory: also of NaNs and of types that cannot be compared."""
    return tensor.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    """The same names in the same order, with the same values, shapes, types and ties."""
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype), name
        assert torch.equal(bits(ours[name]), bits(value)), name
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad, name
    assert ties(model) == ties(twin)


def ties(model: nn.Module) -> list[list[str]]:
    """Names that show one tensor, for each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def same_gradients(model: nn.Module, twin: nn.Module) -> None:
    """Each parameter has the twin's gradient, where the parameter is."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert p.grad.device == p.device, name
            assert torch.equal(p.grad.cpu(), q.grad.cpu()), name


def train_step(model: nn.Module, x: torch.Tensor = IDS) -> None:
    model(x).square().mean().backward()


def assert_plain(model: nn.Module, twin: nn.Module) -> None:
    """Nothing tells it from its twin that was never offloaded: no hook, attribute, class or inference tensor."""
    for (path, module), other in zip(model.named_modules(), twin.modules(), strict=True):
        assert type(module) is type(other), path
        assert list(vars(module)) == list(vars(other)), path
        for key, value in vars(other).items():
            if "hooks" in key:
                assert len(vars(module)[key]) == len(value), f"{path}.{key}"
        assert module._compiled_call_impl is None, path
        assert list(module._parameters) == list(other._parameters), path
        assert list(module._buffers) == list(other._buffers), path
        assert module._non_persistent_buffers_set == other._non_persistent_buffers_set, path
    assert managed(model) is None
    for (name, tensor), (_, other) in zip(_named_tensors(model), _named_tensors(twin), strict=True):
        assert_plain_tensor(name, tensor, other)


def assert_plain_tensor(name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    assert type(tensor) is type(other), name
    assert list(vars(tensor)) == list(vars(other)), name
    assert not tensor.is_inference(), name
    assert tensor.device == other.device, name
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (other.shape, other.stride(), other.dtype), name
    assert tensor.is_leaf, name
    assert len(tensor._backward_hooks or ()) == len(other._backward_hooks or ()), name
    assert torch.equal(bits(tensor), bits(other)), name


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def assert_ordinary(model: nn.Module, twin: nn.Module, x: torch.Tensor = IDS) -> None:
    """A plain model that runs, trains, pickles and copies as its twin does."""
    assert_plain(model, twin)
    assert_same_state(model, twin)
    assert_right(model, twin, x, passes=1)
    for copied in (copy.deepcopy, _pickled):
        assert_plain(copied(model), copied(twin))
    x = x.to(device_of(twin))
    for net in (model, twin):
        train_step(net, x)
    same_gradients(model, twin)


def _pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


class Untouched:
    """What a model is made of, to be compared after something that must not have changed it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._twin = model, copy.deepcopy(model)
        self._tensors = dict(_named_tensors(model))
        self._addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def check(self, x: torch.Tensor = IDS) -> None:
        assert {name: id(t) for name, t in _named_tensors(self._model)} == {n: id(t) for n, t in self._tensors.items()}
        assert {name: t.data_ptr() for name, t in _named_tensors(self._model)} == self._addresses
        assert_ordinary(self._model, self._twin, x)


def is_away(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a home: offloaded ones are of a class of their own, which knows what is done with them."""
    return type(tensor).__module__.startswith("overspill.") or hasattr(tensor, "_overspill_values")


def away(model: nn.Module) -> set[str]:
    """Names of the tensors that are offloaded."""
    return {name for name, tensor in _named_tensors(model) if is_away(tensor)}


@contextmanager
def or_an_error_that_names(culprit: str) -> Iterator[None]:
    """Within, the right values or an error of ours with `culprit` in it: both keep the promise never to be wrong."""
    try:
        yield
    except OverspillError as error:
        if culprit not in str(error):
            raise


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file under `folder` with its bytes, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


MOVED_OF_A_BLOCK = {"up.weight", "up.bias", "down.weight"}
STAYED_OF_A_BLOCK = {"norm.weight", "norm.bias", "scale", "shift"}
BLOCK_BYTES = (64 * 32 + 64 + 64 * 32) * 4


# ---------------------------------------------------------------- something really moves


def test_the_memory_of_what_is_offloaded_is_freed_and_comes_back(where: Where, model: Net, twin: Net) -> None:
    names = {f"blocks.{i}.{name}" for i in range(4) for name in MOVED_OF_A_BLOCK} | {"embed.weight"}
    memory = {name: StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters() if name in names}
    assert not any(ref.expired() for ref in memory.values())
    done = where.offload(model)
    assert [name for name, ref in memory.items() if not ref.expired()] == []
    assert done.nbytes == 4 * BLOCK_BYTES + 64 * 32 * 4
    assert away(model) == names
    assert_right(model, twin)
    overspill.restore(model)
    assert away(model) == set()
    assert {p.device for p in model.parameters()} == {torch.device(where.device)}
    assert_ordinary(model, twin)


def test_the_result_tells_what_was_done(where: Where, model: Net, tmp_path: Path) -> None:
    folder = {"folder": tmp_path / "off"} if where.tier == "disk" else {}
    done = where.offload(model, modules=["blocks.1", "embed"], **folder)
    assert all(path == "embed" or path.split(".")[:2] == ["blocks", "1"] for path in done.modules)
    assert {path.split(".")[0] for path in done.modules} == {"blocks", "embed"}
    assert done.nbytes == BLOCK_BYTES + 64 * 32 * 4
    assert set(done.stayed) == {f"blocks.1.{name}" for name in STAYED_OF_A_BLOCK}
    assert all(isinstance(path, Path) and path.is_file() for path in done.files)
    if where.tier == "disk":
        assert sum(path.stat().st_size for path in done.files) >= done.nbytes
    text = str(done)
    assert "\n" in text or len(text) < 200, "a line or a table, no dump"
    assert "24" in text, "its size in KiB"
    assert "4 " in text or "four" in text or "blocks.1.norm.weight" in text, "what stayed"


def test_two_hundred_megabytes_leave_the_process_and_nothing_is_held_twice() -> None:
    printed = run_program("""
        import gc
        import threading
        from pathlib import Path

        import torch
        from torch import nn

        import overspill

        def held():
            lines = Path("/proc/self/status").read_text().splitlines()
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

        class Watch:
            # The most that is held while the block runs.
            def __enter__(self):
                self.most, self._ended = 0, threading.Event()
                self._thread = threading.Thread(target=self._run)
                self._thread.start()
                return self

            def _run(self):
                while not self._ended.wait(0.002):
                    self.most = max(self.most, held())

            def __exit__(self, *exc):
                self._ended.set()
                self._thread.join()

        def linear():
            layer = nn.utils.skip_init(nn.Linear, 3072, 3072)
            nn.init.constant_(layer.weight, 0.5)
            nn.init.constant_(layer.bias, 0.25)
            return layer

        def run():
            with torch.no_grad():
                return model(x)

        empty = held()
        model, x = nn.Sequential(*(linear() for _ in range(6))), torch.ones(1, 3072)
        size, expected = sum(p.nbytes for p in model.parameters()), run()
        full = held()
        assert full - empty > 0.95 * size, (empty, full, size)

        with Watch() as offloading:
            done = overspill.offload(model, to="disk")
        assert done.nbytes == size
        assert offloading.most - full < 0.3 * size, ("a second copy while writing", offloading.most, full, size)
        for _ in range(3):
            assert torch.equal(run(), expected)
            gc.collect()
            assert full - held() > 0.85 * size, ("idle", full, held(), size)
        model.state_dict()
        assert full - held() > 0.85 * size, ("after a state_dict", full, held(), size)

        with Watch() as restoring:
            overspill.restore(model)
        assert held() - empty > 0.95 * size, "nothing came back"
        assert restoring.most - full < 0.5 * size, ("a second copy while reading", restoring.most, full, size)
        assert torch.equal(run(), expected)
        print(size)
        """)
    assert int(printed) > 200e6


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_device_memory_is_free_whenever_no_forward_runs(tier: str) -> None:
    gc.collect()  # or what other tests have left is freed in the middle, and counted
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))).cuda()
    size = sum(p.nbytes for p in model.parameters())
    x = torch.randn(2, 2048, device="cuda")
    with torch.no_grad():
        expected = model(x)
    full = torch.cuda.memory_allocated()
    done = overspill.offload(model, to=tier)
    assert done.nbytes == size
    assert full - torch.cuda.memory_allocated() > 0.99 * size
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        torch.cuda.synchronize()
        assert full - torch.cuda.memory_allocated() > 0.98 * size
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(x)
    assert full - torch.cuda.max_memory_allocated() > 0.2 * size, "all of it came at once"
    overspill.restore(model)
    assert abs(torch.cuda.memory_allocated() - full) < 0.02 * size
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_the_window_is_given_back_after_each_call_and_each_backward(where: Where, model: Net) -> None:
    where.offload(model)
    manager = managed(model)
    assert manager is not None
    x = IDS.to(where.device)

    def assert_given_back() -> None:
        assert all(residency.window._arena is None for residency in manager.residencies)
        # What is computed with where it lies on disk takes nothing of the window.
        assert all(unit.slab is None or unit.mapped is not None for unit in streamed_units(model))

    for _ in range(2):
        with torch.no_grad():
            model(x)
        assert_given_back()
        train_step(model, x)
        assert_given_back()


# ---------------------------------------------------------------- parameters are themselves throughout


def test_parameter_objects_are_the_same_before_meanwhile_and_after(where: Where, model: Net, twin: Net) -> None:
    before = dict(model.named_parameters(remove_duplicate=False))

    def check() -> None:
        now = dict(model.named_parameters(remove_duplicate=False))
        assert list(now) == list(before)
        assert all(now[name] is p for name, p in before.items())
        assert all(isinstance(p, nn.Parameter) for p in before.values())

    where.offload(model)
    check()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            model(IDS.to(where.device))
        check()
    train_step(model, IDS.to(where.device))
    check()
    overspill.restore(model)
    check()
    assert all(type(p) is nn.Parameter for p in before.values())
    twin(IDS.to(where.device)).square().mean().backward()
    assert_ordinary(model, twin)


def test_shape_dtype_and_requires_grad_are_told_without_reading(
    where: Where, model: Net, twin: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    for net in (model, twin):
        net.blocks[1].up.weight.requires_grad_(False)
    where.offload(model, min_bytes=0)
    moved = []
    monkeypatch.setattr(FileReader, "read", lambda *_: moved.append("disk"))
    monkeypatch.setattr(Transfer, "from_host", lambda *_: moved.append("cpu"))
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.shape, p.dtype, p.requires_grad, p.stride()) == (q.shape, q.dtype, q.requires_grad, q.stride()), name
        assert (p.numel(), p.nbytes, p.ndim, p.is_leaf, p.is_meta) == (q.numel(), q.nbytes, q.ndim, True, False), name
    assert moved == []


def test_every_way_to_read_gives_the_true_values(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, min_bytes=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        truth = q.detach().cpu()
        assert torch.equal(p.detach().clone().cpu(), truth), name
        assert torch.equal(p.detach().cpu(), truth), name
        assert torch.equal((p + 0).cpu(), truth), name
        assert torch.equal(p.sum().cpu(), truth.sum()), name
        assert torch.equal(p[0].cpu(), truth[0]), name
        assert torch.equal(p.data.cpu(), truth), name
        assert p.tolist() == truth.tolist(), name
    assert_same_state(model, twin)


def test_weights_used_without_their_modules_call_are_right(where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    x = torch.randn(3, 32, device=where.device)
    for ours, theirs in ((model.embed, twin.embed), (model.blocks[1].up, twin.blocks[1].up)):
        assert torch.equal(functional.linear(x, ours.weight), functional.linear(x, theirs.weight))
    assert torch.equal(model.blocks[2].up.forward(x), twin.blocks[2].up.forward(x))
    assert torch.equal(model.blocks[3](x), twin.blocks[3](x))


def test_memory_that_is_not_there_is_never_handed_out() -> None:
    """A null pointer that is followed ends a process: each way to get at the memory has one of its own."""
    printed = run_program("""
        import os

        import numpy
        import torch
        from torch import nn

        import overspill

        WAYS = {
            "numpy.asarray": lambda weight: numpy.asarray(weight.detach())[0, 0],
            "numpy.from_dlpack": lambda weight: numpy.from_dlpack(weight.detach())[0, 0],
            "torch.from_dlpack": lambda weight: torch.from_dlpack(weight.detach())[0, 0],
            "untyped_storage": lambda weight: torch.tensor([], dtype=weight.dtype).set_(weight.untyped_storage())[0],
            "share_memory_": lambda weight: weight.share_memory_()[0, 0],
            "pin_memory": lambda weight: weight.pin_memory()[0, 0],
        }

        def is_right(way):
            model = nn.Linear(64, 64)
            nn.init.constant_(model.weight, 0.5)
            overspill.offload(model, to="disk")
            try:
                return bool(way(model.weight) == 0.5)
            except (RuntimeError, BufferError):  # StateError is a RuntimeError
                return True

        for name, way in WAYS.items():
            child = os.fork()
            if child == 0:
                os._exit(0 if is_right(way) else 1)
            if os.waitpid(child, 0)[1] != 0:
                print(name)
        """)
    assert printed.split() == []


class UsesOthersWeights(nn.Module):
    """Weights in containers that are never called, a child that is used but not called, a reparametrised weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))
        self.several = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(2)])
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.recurrent = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x, self.table) @ self.several[0] + self.several[1].sum()
        x, _ = self.attention(x, x, x, need_weights=False)
        x, _ = self.recurrent(self.normed(x))
        return x


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single:UserWarning")  # in a slab they are not
def test_modules_that_use_each_others_weights(where: Where) -> None:
    made = UsesOthersWeights().to(where.device)
    model, twin = copy.deepcopy(made), copy.deepcopy(made)  # both: copies of recurrent modules lack an attribute
    x = torch.randn(2, 3, 64)
    for _ in range(2):
        done = where.offload(model)
        assert done.nbytes > 0.95 * sum(p.nbytes for p in twin.parameters())
        assert_right(model, twin, x)
        assert_same_state(model, twin)
        overspill.restore(model)
        assert all(a is b for a, b in zip(model.recurrent._flat_weights, model.recurrent.parameters(), strict=True))
        assert_plain(model, twin)
        assert_right(model, twin, x)


def test_attributes_that_users_set_on_parameters_survive(where: Where, model: Net, twin: Net) -> None:
    for net in (model, twin):
        net.blocks[0].up.weight.tag = "mine"
        net.blocks[0].up.weight.notes = {"rows": [1, 2]}
    where.offload(model)
    assert model.blocks[0].up.weight.tag == "mine"
    model.blocks[0].up.weight.later = twin.blocks[0].up.weight.later = 7
    overspill.restore(model)
    assert model.blocks[0].up.weight.notes == {"rows": [1, 2]}
    assert model.blocks[0].up.weight.later == 7
    assert_ordinary(model, twin)


class Special(nn.Parameter):
    """A parameter of a library's own."""

    scale: float

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: float = 1.0) -> "Special":
        parameter: Special = torch.Tensor._make_subclass(cls, data, True)  # type: ignore[assignment]
        parameter.scale = scale
        return parameter

    def doubled(self) -> torch.Tensor:
        return self.detach() * 2


def test_parameters_of_a_class_of_their_own_come_back_as_such(where: Where) -> None:
    model = nn.Linear(64, 64, device=where.device)
    model.weight = Special(torch.randn(64, 64, device=where.device), scale=0.5)
    weight, expected = model.weight, model.weight.detach().clone()
    where.offload(model)
    assert torch.equal(model.weight.detach().cpu(), expected.cpu())
    overspill.restore(model)
    assert model.weight is weight
    assert type(model.weight) is Special
    assert model.weight.scale == 0.5
    assert torch.equal(weight.doubled(), expected * 2)


def test_a_parameter_that_somebody_holds_a_weak_reference_to_can_go_and_come_back(where: Where) -> None:
    model = nn.Linear(64, 64, device=where.device)
    reference = weakref.ref(model.weight)
    where.offload(model)
    assert reference() is model.weight
    overspill.restore(model)
    assert reference() is model.weight


def _loss(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "hold",
    [
        _loss,  # kept after its backward, as people do in lists
        lambda model, x: model.weight.detach(),
        lambda model, x: model.weight.data.view(-1),
        lambda model, x: model.weight.expand_as(model.weight).grad_fn.next_functions[0][0],  # as DDP does
        lambda model, x: [model.weight] * 3,
    ],
)
def test_what_people_hold_of_a_parameter_is_no_obstacle(hold: Callable[..., Any], where: Where) -> None:
    model = aligned(nn.Linear(64, 64)).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    held = hold(model, x.to(where.device))
    where.offload(model)
    assert_right(model, twin, x)
    overspill.restore(model)
    model.zero_grad()
    assert_ordinary(model, twin, x)
    del held


def test_hooks_that_users_set_on_parameters_and_modules_survive(where: Where, model: Net, twin: Net) -> None:
    calls: dict[int, list[str]] = {}
    for net in (model, twin):
        log = calls.setdefault(id(net), [])
        weight = net.blocks[1].up.weight
        weight.register_post_accumulate_grad_hook(lambda _, log=log: log.append("accumulated"))
        weight.register_hook(lambda gradient, log=log: log.append(f"gradient {gradient.shape}"))
        net.blocks[1].register_forward_hook(lambda *_, log=log: log.append("forward"))
        net.blocks[1].up.register_forward_pre_hook(lambda *_, log=log: log.append("pre"))

    def both() -> None:
        for net in (model, twin):
            train_step(net, IDS.to(where.device))
        assert calls[id(model)] == calls[id(twin)]
        same_gradients(model, twin)

    where.offload(model)
    both()
    overspill.restore(model)
    both()
    assert len(calls[id(model)]) == 8
    assert_plain(model, twin)


# ---------------------------------------------------------------- edits


def _in_place(net: Net) -> None:
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)
        net.blocks[3].norm.bias.add_(1)


def _through_data(net: Net) -> None:
    net.blocks[0].up.weight.data[0].add_(1)
    net.blocks[1].down.weight.data += 0.5


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


def _buffer(net: Net) -> None:
    net.blocks[0].shift.add_(1)


def _tied(net: Net) -> None:
    with torch.no_grad():
        net.head.weight[3] = 7


def _initialised(net: Net) -> None:
    nn.init.constant_(net.blocks[1].up.weight, 0.5)
    nn.init.zeros_(net.blocks[1].up.bias)


EDITS = [_in_place, _through_data, _data_replaced, _load_state_dict, _new_parameter, _buffer, _tied, _initialised]


def _to_the_device(net: nn.Module, device: str) -> None:
    """A parameter that was put in the place of an offloaded one lies where it was made."""
    net.to(device)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("passes", [0, 2])
def test_an_edit_is_seen_by_the_next_forward_by_state_dict_and_after_restore(
    edit: Callable[[Net], None], passes: int, where: Where, model: Net, twin: Net
) -> None:
    where.offload(model, min_bytes=0)
    for _ in range(passes):
        assert_right(model, twin)
    edit(model)
    edit(twin)
    assert_right(model, twin)
    assert_same_state(model, twin)
    overspill.restore(model)
    if edit is _new_parameter:
        _to_the_device(model, where.device)
    assert_ordinary(model, twin)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_right_before_restore_is_in_what_comes_back(
    edit: Callable[[Net], None], where: Where, model: Net, twin: Net
) -> None:
    where.offload(model, min_bytes=0)
    edit(model)
    edit(twin)
    overspill.restore(model)
    if edit is _new_parameter:
        _to_the_device(model, where.device)
    assert_ordinary(model, twin)


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit is not _new_parameter])
def test_an_edit_moves_along_to_another_tier(
    edit: Callable[[Net], None], where: Where, model: Net, twin: Net, tmp_path: Path
) -> None:
    where.offload(model, min_bytes=0, folder=None if where.tier == "cpu" else tmp_path / "first")
    edit(model)
    edit(twin)
    other = "cpu" if where.tier == "disk" else "disk"
    overspill.offload(model, to=other, min_bytes=0)
    assert_right(model, twin)
    edit(model)
    edit(twin)
    overspill.offload(model, to=where.tier, min_bytes=0)
    assert_right(model, twin)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_parameters_put_in_the_place_of_offloaded_ones_can_go_and_come_back(where: Where) -> None:
    model = aligned(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    where.offload(model)
    for index in (1, 0):
        for name, p in list(twin[index].named_parameters()):
            values = torch.randn_like(p)
            for net in (model, twin):
                setattr(net[index], name, nn.Parameter(values.clone()))
        assert_right(model, twin, x)
    overspill.offload(model, to="disk")
    assert away(model) == {"0.weight", "0.bias", "1.weight"}
    assert_right(model, twin, x)
    overspill.restore(model)
    assert_ordinary(model, twin, x)


@pytest.mark.parametrize("restored", ["itself", "its model"])
def test_a_module_whose_offloaded_parameters_were_all_replaced_is_ordinary_after_restore(
    restored: str, where: Where
) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(where.device)
    twin, values = copy.deepcopy(model), torch.randn(64, 64, device=where.device)
    where.offload(model[0])
    for net in (model, twin):
        net[0].weight = nn.Parameter(values.clone())
    assert_right(model, twin, torch.randn(2, 64))
    overspill.restore(model[0] if restored == "itself" else model)
    assert_ordinary(model, twin, torch.randn(2, 64))


def test_an_alias_taken_while_offloaded_writes_to_the_model(where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    ours, theirs = model.blocks[0].up.weight.detach().view(-1), twin.blocks[0].up.weight.detach().view(-1)
    for value in (0.5, 0.25):
        ours[:100] = value
        theirs[:100] = value
        assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_what_a_forward_writes_is_kept(where: Where) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
            self.register_buffer("calls", torch.zeros(2000, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.a.mul_(0.5)
                self.calls += 1
            self.b.data.add_(1)
            return torch.tanh(x @ self.a + x @ self.b)

    model = aligned(nn.Sequential(*(Writes() for _ in range(3)))).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    where.offload(model)
    assert_right(model, twin, x, passes=3)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_plain(model, twin)
    assert int(model[0].calls[0]) == 3


def test_an_optimizer_made_before_trains_what_is_offloaded(where: Where, model: Net, twin: Net) -> None:
    # A power of two, so that the product is exact and the CPU's homes are updated as the device's weights are.
    ours, theirs = (torch.optim.SGD(net.parameters(), lr=2**-6) for net in (model, twin))

    def steps(count: int) -> None:
        for _ in range(count):
            for net, optimizer in ((model, ours), (twin, theirs)):
                train_step(net, IDS.to(where.device))
                optimizer.step()
            same_gradients(model, twin)
            for optimizer in (ours, theirs):
                optimizer.zero_grad()

    start = twin.blocks[1].up.weight.detach().clone()
    steps(1)
    where.offload(model)
    steps(3)
    assert_right(model, twin)
    overspill.restore(model)
    assert not torch.equal(model.blocks[1].up.weight, start), "nothing was trained"
    assert_same_state(model, twin)
    steps(2)
    assert_ordinary(model, twin)


def test_an_optimizer_with_a_state_trains_on_across_offload_and_restore() -> None:
    model = aligned(Net())
    twin = copy.deepcopy(model)
    ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    for turn in range(6):
        if turn % 3 == 1:
            overspill.offload(model, to="disk")
        for net, optimizer in ((model, ours), (twin, theirs)):
            train_step(net)
            optimizer.step()
            optimizer.zero_grad()
        if turn % 3 == 2:
            overspill.restore(model)
    assert_same_state(model, twin)
    assert_ordinary(copy.deepcopy(model), twin)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_have_the_same_bits(mode: Callable[[], Any], where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    ids = IDS.to(where.device)
    for _ in range(3):
        with mode():
            assert torch.equal(model(ids), twin(ids))


def test_gradients_have_the_same_bits_and_survive_both_ways(where: Where, model: Net, twin: Net) -> None:
    ids = IDS.to(where.device)

    def both() -> None:
        for net in (model, twin):
            train_step(net, ids)
        same_gradients(model, twin)

    both()
    kept = {name: p.grad for name, p in model.named_parameters()}
    where.offload(model)
    same_gradients(model, twin)
    both()
    both()
    overspill.restore(model)
    same_gradients(model, twin)
    both()
    where.offload(model)
    model.zero_grad()
    twin.zero_grad()
    same_gradients(model, twin)
    overspill.restore(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(gradient is not None for gradient in kept.values())
    assert_ordinary(model, twin)


def test_frozen_and_trained_parameters_stay_what_they_are(where: Where, model: Net, twin: Net) -> None:
    for net in (model, twin):
        for block in net.blocks[:2]:
            block.requires_grad_(False)
    where.offload(model)
    for net in (model, twin):
        train_step(net, IDS.to(where.device))
        net.blocks[0].requires_grad_(True)
        net.blocks[3].requires_grad_(False)
    same_gradients(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


@pytest.mark.parametrize("first", ["offload", "forward"])
def test_a_move_between_forward_and_backward_loses_no_gradient_in_silence(
    first: str, where: Where, model: Net, twin: Net
) -> None:
    if first == "offload":
        where.offload(model)
    losses = [net(IDS.to(where.device)).square().mean() for net in (model, twin)]
    try:
        if first == "offload":
            overspill.restore(model)
        else:
            where.offload(model)
        for loss in losses:
            loss.backward()
        same_gradients(model, twin)
    except StateError as error:
        if "backward" not in str(error):
            raise
    del losses
    for net in (model, twin):  # whatever was refused, the next step is as good as ever
        net.zero_grad()
        train_step(net, IDS.to(where.device))
    same_gradients(model, twin)


def test_a_graph_that_waits_for_its_backward_is_not_disturbed_by_moves_of_other_parts(
    where: Where, model: Net, twin: Net
) -> None:
    where.offload(model, modules=["blocks.1"])
    x = torch.randn(2, 32, device=where.device)
    losses = [net.blocks[1](x).square().mean() for net in (model, twin)]
    where.offload(model, modules=["blocks.2"])
    overspill.restore(model, modules=["blocks.2"])
    for loss in losses:
        loss.backward()
    same_gradients(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["blocks.1"], {"blocks.1"}),
        (["blocks.1.up"], {"blocks.1.up"}),
        (["blocks"], {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}),
        (["embed"], {"embed"}),
        (["blocks.3", "blocks.0.down"], {"blocks.3", "blocks.0.down"}),
        (["blocks.2", "head"], {"blocks.2", "embed"}),  # named by the first name of the tied weight
    ],
)
def test_paths_move_just_what_they_name(
    paths: list[str], expected: set[str], where: Where, model: Net, twin: Net
) -> None:
    done = where.offload(model, modules=paths)
    assert {name.rpartition(".")[0] for name in away(model)} == {
        leaf
        for path in expected
        for leaf in ([f"{path}.up", f"{path}.down"] if path.count(".") == 1 and path[-1].isdigit() else [path])
    }
    moved = {name: p.nbytes for name, p in twin.named_parameters() if name in away(model)}
    assert done.nbytes == sum(moved.values())
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_module_of_a_model_can_be_given_itself(where: Where, model: Net, twin: Net) -> None:
    done = where.offload(model.blocks[1])
    assert done.nbytes == BLOCK_BYTES
    assert away(model) == {f"blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    x = torch.randn(2, 32, device=where.device)
    assert torch.equal(model.blocks[1](x), twin.blocks[1](x))
    overspill.restore(model.blocks[1])
    assert_ordinary(model, twin)


def test_parts_that_were_given_as_modules_come_back_with_their_model(where: Where, model: Net, twin: Net) -> None:
    where.offload(model.blocks[1])
    where.offload(model.blocks[2].up)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


@pytest.mark.parametrize("module_first", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_some_parts_given_as_modules_and_others_as_paths(
    at_once: bool, module_first: bool, where: Where, model: Net, twin: Net
) -> None:
    for turn in (0, 1) if module_first else (1, 0):
        where.offload(model.blocks[1]) if turn == 0 else where.offload(model, modules=["blocks.2", "embed"])
        assert_right(model, twin)
    if at_once:
        overspill.restore(model)
    else:
        overspill.restore(model.blocks[2])
        overspill.restore(model, modules=["blocks.1"])
        assert away(model) == {"embed.weight"}
        assert_right(model, twin)
        overspill.restore(model.head)
    assert_ordinary(model, twin)


def test_parts_that_were_given_as_modules_move_on_with_their_model(where: Where, model: Net, twin: Net) -> None:
    where.offload(model.blocks[1])
    other = "cpu" if where.tier == "disk" else "disk"
    overspill.offload(model, to=other, modules=["blocks.1"])
    assert away(model) == {f"blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_parts_that_were_given_as_modules_one_by_one_become_one_model_with_the_next(
    where: Where, model: Net, twin: Net
) -> None:
    for index in (0, 1):
        where.offload(model.blocks[index])
    where.offload(model, modules=["blocks.2"])
    assert away(model) == {f"blocks.{index}.{name}" for index in range(3) for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    overspill.restore(model.blocks[1])
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_parts_that_were_given_as_paths_come_back_as_modules(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.1", "blocks.2"])
    overspill.restore(model.blocks[1])
    assert away(model) == {f"blocks.2.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    overspill.restore(model.blocks[2])
    assert_ordinary(model, twin)


def test_a_model_that_is_one_leaf(where: Where) -> None:
    model = aligned(nn.Linear(64, 64)).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    done = where.offload(model)
    assert done.nbytes == (64 * 64 + 64) * 4
    assert away(model) == {"weight", "bias"}
    assert_right(model, twin, x)
    overspill.restore(model)
    assert_ordinary(model, twin, x)


class OwnsTensors(nn.Module):
    """A root with a parameter and a buffer of its own, beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("offset", torch.randn(64, 64))
        self.child = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x @ self.table) @ self.offset


def test_the_roots_own_tensors_move_are_in_state_dict_and_come_back(where: Where) -> None:
    model = aligned(OwnsTensors()).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    done = where.offload(model)
    assert done.nbytes == (3 * 64 * 64 + 64) * 4
    assert away(model) == {"table", "offset", "child.weight", "child.bias"}
    assert_right(model, twin, x)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin, x)


class Wrapper(nn.Module):
    """Holds the real module, as many wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("path", ["blocks.1", "module.blocks.1"])
@pytest.mark.parametrize("wrap", [Wrapper, AveragedModel])
def test_a_path_through_a_wrapper_may_leave_it_out(
    wrap: Callable[[nn.Module], nn.Module], path: str, where: Where, model: Net, twin: Net
) -> None:
    wrapped, other = wrap(model), wrap(twin)
    where.offload(wrapped, modules=[path])
    assert away(wrapped) == {f"module.blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(wrapped, other)
    overspill.restore(wrapped, modules=[path])
    assert_plain(wrapped, other)
    assert_right(wrapped, other)


@pytest.mark.parametrize("path", ["blocks.1.up", "blocks.1.module.up"])
def test_a_wrapper_in_the_middle_of_a_path_may_be_left_out(path: str, where: Where, model: Net, twin: Net) -> None:
    for net in (model, twin):
        net.blocks[1] = Wrapper(net.blocks[1])
    where.offload(model, modules=[path])
    assert away(model) == {"blocks.1.module.up.weight", "blocks.1.module.up.bias"}
    assert_right(model, twin)
    overspill.restore(model, modules=[path])
    assert_ordinary(model, twin)


def test_a_wrapper_is_offloaded_as_what_it_holds(where: Where, model: Net, twin: Net) -> None:
    wrapped, other = Wrapper(model), Wrapper(twin)
    done = where.offload(wrapped)
    assert done.nbytes == 4 * BLOCK_BYTES + 64 * 32 * 4
    assert_right(wrapped, other)
    overspill.restore(wrapped)
    assert_ordinary(wrapped, other)


def test_a_child_whose_name_is_module_is_no_wrapper_where_the_path_is_there(where: Where) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)
            self.module = nn.Sequential()
            self.module.add_module("up", nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(self.up(x))

    model = aligned(Both()).to(where.device)
    twin = copy.deepcopy(model)
    where.offload(model, modules=["up"])
    assert away(model) == {"up.weight", "up.bias"}
    assert_right(model, twin, torch.randn(2, 64))


@pytest.mark.parametrize(
    ("path", "nearest"), [("blocks.1.upp", "blocks.1.up"), ("block.1", "blocks.1"), ("heads", "head")]
)
def test_an_unknown_path_is_named_with_the_nearest_one(path: str, nearest: str, model: Net) -> None:
    untouched = Untouched(model)
    with pytest.raises(OverspillError, match=rf"{path}.*{nearest}"):
        overspill.offload(model, to="disk", modules=["blocks.2", path])
    untouched.check()


def test_restore_of_an_unknown_path_is_named_and_changes_nothing(where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    before = away(model)
    with pytest.raises(OverspillError, match=r"blocks\.1\.upp.*blocks\.1\.up"):
        overspill.restore(model, modules=["blocks.2", "blocks.1.upp"])
    assert away(model) == before
    assert_right(model, twin)


# ---------------------------------------------------------------- what is too small, and what has no place in a file


def test_small_leaves_stay_and_are_told(where: Where, model: Net) -> None:
    done = where.offload(model)
    small = {f"blocks.{i}.{name}" for i in range(4) for name in STAYED_OF_A_BLOCK} | {"norm.weight", "norm.bias"}
    assert set(done.stayed) == small
    for name, tensor in _named_tensors(model):
        if name in small:
            assert type(tensor) in (nn.Parameter, torch.Tensor), name
            assert tensor.device == torch.device(where.device), name


def test_min_bytes_counts_the_tensors_of_a_leaf_together(where: Where) -> None:
    # 31 * 32 * 4 + 31 * 4 = 4092 bytes; 32 * 32 * 4 = 4096
    model = nn.ModuleDict({"under": nn.Linear(32, 31), "at": nn.Linear(32, 32, bias=False)}).to(where.device)
    done = where.offload(model)
    assert set(done.stayed) == {"under.weight", "under.bias"}
    assert away(model) == {"at.weight"}
    overspill.restore(model)
    where.offload(model, min_bytes=4092)
    assert away(model) == {"at.weight", "under.weight", "under.bias"}


def test_min_bytes_zero_moves_everything(where: Where, model: Net, twin: Net) -> None:
    done = where.offload(model, min_bytes=0)
    assert done.stayed == ()
    assert away(model) == {name for name, _ in _named_tensors(twin)}
    assert done.nbytes == sum(tensor.nbytes for _, tensor in _named_tensors(twin))
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_where_nothing_can_move_that_is_an_error(device: str) -> None:
    for module in (nn.ReLU(), nn.ModuleList(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)):
        untouched = Untouched(module)
        with pytest.raises(OverspillError):
            overspill.offload(module, to="disk")
        assert_plain(module, untouched._twin)


class Buffers(nn.Module):
    """Large buffers, persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("kept", torch.randn(64, 64))
        self.register_buffer("derived", torch.randn(64, 64), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.kept + x @ self.derived


def test_persistent_buffers_move_and_others_stay(where: Where) -> None:
    model = aligned(Buffers()).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    derived = model.derived
    done = where.offload(model, min_bytes=0)
    assert done.stayed == ("derived",)
    assert away(model) == {"linear.weight", "linear.bias", "kept"}
    assert model.derived is derived
    assert_right(model, twin, x)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin, x)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_kept_up(training: bool, where: Where) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU(), nn.BatchNorm1d(64))

    model = aligned(build()).to(where.device).train(training)
    for norm in (model[1], model[3]):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var)
    twin = copy.deepcopy(model)
    where.offload(model, min_bytes=0)
    assert {"1.running_mean", "1.running_var", "3.num_batches_tracked"} <= away(model)
    for _ in range(3):
        assert_right(model, twin, torch.randn(4, 64, 16))
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_plain(model, twin)
    assert int(model[1].num_batches_tracked) == (6 if training else 0)
    assert_ordinary(model, twin, torch.randn(4, 64, 16))


def test_batch_norms_train_while_offloaded(where: Where) -> None:
    model = aligned(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64)))
    model.to(where.device).train()
    twin = copy.deepcopy(model)
    where.offload(model, min_bytes=0)
    for _ in range(3):
        x = torch.randn(4, 64, device=where.device)
        for net in (model, twin):
            train_step(net, x)
        same_gradients(model, twin)
    assert_same_state(model, twin)
    assert int(model[1].num_batches_tracked) == 3
    overspill.restore(model)
    assert_ordinary(model, twin, torch.randn(4, 64))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.uint8,
]


class AllKinds(nn.Module):
    """Tensors of every dtype, without dimensions, without elements, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in DTYPES:
            name = str(dtype).replace("torch.", "of_")
            # Bits that mean something in every type: halves, whole numbers, true and false.
            values = torch.randint(0, 3, (40, 30)).to(torch.float32) / (2 if dtype.is_floating_point else 1)
            self.register_parameter(name, nn.Parameter(values.to(dtype), requires_grad=False))
            self.register_buffer(f"{name}_scalar", torch.ones(()).to(dtype))
            self.register_buffer(f"{name}_empty", torch.empty(0, 3).to(dtype))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dtype in DTYPES:
            name = str(dtype).replace("torch.", "of_")
            values, scalar, empty = (getattr(self, f"{name}{end}") for end in ("", "_scalar", "_empty"))
            assert values.dtype == scalar.dtype == empty.dtype == dtype
            plain = torch.view_as_real(values)[..., 0] if dtype.is_complex else values.to(torch.float32)
            x = x + plain * scalar.to(torch.float32 if not dtype.is_complex else dtype).abs() + empty.numel()
        return x


def test_every_dtype_goes_and_comes_back_bit_by_bit(where: Where, tmp_path: Path) -> None:
    model = aligned(AllKinds()).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(40, 30)
    done = where.offload(model, min_bytes=0, folder=tmp_path / "off" if where.tier == "disk" else None)
    assert done.nbytes == sum(tensor.nbytes for _, tensor in _named_tensors(twin))
    assert away(model) >= {name for name, tensor in _named_tensors(twin) if tensor.numel()}
    assert_same_state(model, twin)
    assert_right(model, twin, x)
    overspill.restore(model)
    assert_plain(model, twin)
    assert_right(model, twin, x)


class Strided(nn.Module):
    """Weights whose memory is in another order than their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(48, 64).t())
        self.permuted = nn.Parameter(torch.randn(8, 16, 32).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(1)
        return y[:, :64] @ self.turned + self.permuted.sum()


def test_strides_are_kept(where: Where) -> None:
    model = Strided().to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 16, 4, 4)
    assert not twin.turned.is_contiguous()
    assert not twin.conv.weight.is_contiguous()
    done = where.offload(model, min_bytes=0)
    assert done.nbytes == sum(p.nbytes for p in twin.parameters())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.stride() == q.stride(), name
        assert p.detach().clone().stride() == q.stride(), name
    assert_right(model, twin, x)
    assert_same_state(model, twin)
    for net in (model, twin):
        train_step(net, x.to(where.device))
    same_gradients(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin, x)


def test_parameters_that_are_parts_of_one_memory(where: Where) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.randn(3 * 64 * 64)
            self.a, self.b = nn.Parameter(memory[: 64 * 64].view(64, 64)), nn.Parameter(memory[-64 * 64 :].view(64, 64))
            self.wide = nn.Parameter(torch.randn(64, 1).expand(64, 64), requires_grad=False)
            self.every_other = nn.Parameter(torch.randn(64, 128)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a @ self.b + x @ self.wide + x @ self.every_other

    model = Flat().to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    where.offload(model)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), twin.get_parameter(name).detach().cpu()), name
    assert torch.allclose(model(x.to(where.device)), twin(x.to(where.device)))
    overspill.restore(model)
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        assert torch.equal(p, twin.get_parameter(name)), name
    train_step(model, x.to(where.device))


# ---------------------------------------------------------------- ties


class TiedInside(nn.Module):
    """One module that shows the same tensors under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(64, 64))
        self.b = self.a
        self.register_buffer("c", torch.randn(64, 64))
        self.register_buffer("d", self.c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.c + x @ self.b @ self.d


def test_ties_inside_one_module_are_stored_once_and_come_back_tied(where: Where, tmp_path: Path) -> None:
    model = aligned(TiedInside()).to(where.device)
    model.b, model.d = model.a, model.c
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    done = where.offload(model, **({"folder": tmp_path / "off"} if where.tier == "disk" else {}))
    assert done.nbytes == 2 * 64 * 64 * 4
    if where.tier == "disk":
        assert sum(path.stat().st_size for path in done.files) < 3 * 64 * 64 * 4
    assert model.a is model.b
    assert model.c is model.d
    assert_right(model, twin, x)
    for net in (model, twin):
        with torch.no_grad():
            net.a[0] = 3
            net.d[1] = 4
    assert_right(model, twin, x)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert model.a is model.b
    assert model.c is model.d
    assert_ordinary(model, twin, x)


PARTS = [["embed"], ["head"], ["embed", "head"], ["head", "embed"], ["blocks.0.up"], ["blocks.2.up", "blocks.0.up"]]


@pytest.mark.parametrize("parts", PARTS)
def test_ties_across_modules_stay_ties_wherever_their_ends_are(
    parts: list[str], where: Where, model: Net, twin: Net
) -> None:
    for net in (model, twin):
        net.blocks[2].up.weight = net.blocks[0].up.weight
    done = where.offload(model, modules=parts)
    assert done.nbytes == sum(p.nbytes for name, p in twin.named_parameters() if name in away(model))
    tied = [model.embed.weight, model.head.weight] if "head" in parts or "embed" in parts else []
    assert all(is_away(weight) for weight in tied)
    assert_same_state(model, twin)
    assert_right(model, twin)
    for net in (model, twin):
        with torch.no_grad():
            net.head.weight[5] = 2
            net.blocks[2].up.weight.mul_(0.5)
        train_step(net, IDS.to(where.device))
    same_gradients(model, twin)
    assert_same_state(model, twin)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_tie_between_parts_that_go_one_after_the_other(where: Where, model: Net, twin: Net) -> None:
    for net in (model, twin):
        net.blocks[2].up.weight = net.blocks[0].up.weight
    assert where.offload(model, modules=["blocks.0"]).nbytes == BLOCK_BYTES
    assert_right(model, twin)
    try:
        where.offload(model, modules=["blocks.2"])
    except StateError as error:  # a part of it is there already
        if "up.weight" not in str(error):
            raise
    assert_right(model, twin)
    assert_same_state(model, twin)
    overspill.restore(model, modules=["blocks.0"])
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert not is_away(model.blocks[0].up.weight)
    assert_right(model, twin)
    assert_same_state(model, twin)
    if away(model):
        overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_tie_that_went_with_a_module_of_its_own_is_no_obstacle_for_others(
    where: Where, model: Net, twin: Net
) -> None:
    for net in (model, twin):
        net.blocks[2].up.weight = net.blocks[0].up.weight
    where.offload(model.blocks[2])
    where.offload(model, modules=["blocks.1"])
    assert_right(model, twin)
    overspill.restore(model, modules=["blocks.0"])
    assert not is_away(model.blocks[2].up.weight)
    assert is_away(model.blocks[2].down.weight)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_one_module_at_two_paths_moves_once(where: Where, model: Net, twin: Net) -> None:
    for net in (model, twin):
        net.blocks[3] = net.blocks[1]
    done = where.offload(model)
    assert done.nbytes == 3 * BLOCK_BYTES + 64 * 32 * 4
    assert_right(model, twin)
    for net in (model, twin):
        with torch.no_grad():
            net.blocks[3].up.weight.mul_(0.5)
        train_step(net, IDS.to(where.device))
    same_gradients(model, twin)
    assert_right(model, twin)
    assert_same_state(model, twin)
    overspill.restore(model, modules=["blocks.3"])
    assert not is_away(model.blocks[1].up.weight)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- restore


def test_restore_of_some_parts_leaves_the_others_away(where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    overspill.restore(model, modules=["blocks.0", "blocks.2.up"])
    assert away(model) == {
        "embed.weight",
        "blocks.2.down.weight",
        *(f"blocks.{i}.{name}" for i in (1, 3) for name in MOVED_OF_A_BLOCK),
    }
    assert_right(model, twin)
    assert_plain(model.blocks[0], twin.blocks[0])
    overspill.restore(model, modules=["blocks"])
    assert away(model) == {"embed.weight"}
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_part_of_what_went_as_one_comes_back_alone(where: Where, model: Net, twin: Net, tmp_path: Path) -> None:
    where.offload(model, modules=["blocks.1"], **({"folder": tmp_path / "off"} if where.tier == "disk" else {}))
    overspill.restore(model, modules=["blocks.1.up"], delete=False)
    assert away(model) == {"blocks.1.down.weight"}
    assert_plain(model.blocks[1].up, twin.blocks[1].up)
    assert_right(model, twin)
    where.offload(model, modules=["blocks.1.up"])
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_many_times_there_and_back(where: Where, model: Net, twin: Net, tmp_path: Path) -> None:
    for turn in range(8):
        folder = {"folder": tmp_path / "off"} if where.tier == "disk" and turn % 2 else {}
        done = where.offload(model, modules=None if turn % 3 else ["blocks.1", "embed"], **folder)
        assert done.nbytes > 0
        assert_right(model, twin, passes=1)
        with torch.no_grad():
            for net in (model, twin):
                net.blocks[1].up.weight.add_(turn)
        overspill.restore(model, delete=bool(turn % 4 == 1))
        assert_plain(model, twin)
    assert_ordinary(model, twin)


def test_restore_of_what_was_never_offloaded_is_refused(where: Where, model: Net, twin: Net) -> None:
    untouched = Untouched(model)
    with pytest.raises(StateError):
        overspill.restore(model)
    with pytest.raises(StateError, match=r"blocks\.2"):
        overspill.restore(model, modules=["blocks.2"])
    untouched.check()
    model.zero_grad()
    where.offload(model, modules=["blocks.1"])
    with pytest.raises(StateError, match=r"blocks\.2"):
        overspill.restore(model, modules=["blocks.1", "blocks.2"])
    assert away(model) == {f"blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    overspill.restore(model)
    with pytest.raises(StateError):
        overspill.restore(model)
    assert_ordinary(model, twin)


def test_restore_to_another_dtype_casts_floating_point_only(where: Where) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("table", torch.randn(64, 64, dtype=torch.bfloat16))
            self.register_buffer("steps", torch.arange(2000))
            self.register_buffer("phase", torch.randn(1000, dtype=torch.complex64))

    model = Mixed().to(where.device)
    objects, expected = list(model.parameters()), {n: t.clone() for n, t in model.state_dict().items()}
    where.offload(model, min_bytes=0)
    overspill.restore(model, dtype=torch.float64)
    for name, tensor in model.state_dict().items():
        dtype = torch.float64 if expected[name].is_floating_point() else expected[name].dtype
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, expected[name].to(dtype)), name
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    train_step(model.linear, torch.randn(2, 64, dtype=torch.float64, device=where.device))
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.linear.parameters())


def test_gradients_are_cast_with_their_parameters(where: Where) -> None:
    model = nn.Linear(64, 64, device=where.device)
    train_step(model, torch.randn(2, 64, device=where.device))
    expected = model.weight.grad.double()
    where.offload(model)
    overspill.restore(model, dtype=torch.float64)
    assert model.weight.grad is None or torch.equal(model.weight.grad, expected)
    train_step(model, torch.randn(2, 64, device=where.device, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_restore_to_another_device(tier: str) -> None:
    model = aligned(Net()).cuda()
    twin = copy.deepcopy(model).cpu()
    overspill.offload(model, to=tier, min_bytes=0)
    overspill.restore(model, device="cpu")
    assert_ordinary(model, twin)
    overspill.offload(model, to=tier, min_bytes=0, device="cuda:0")
    twin.cuda()
    twin.zero_grad()
    model.zero_grad()
    assert_right(model, twin)
    overspill.restore(model, device="cuda:0")
    assert_ordinary(model, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_model_in_host_memory_computes_on_the_device_that_is_given(tier: str) -> None:
    model = aligned(Net())
    twin = copy.deepcopy(model)
    on_device = copy.deepcopy(model).cuda()
    overspill.offload(model, to=tier, device="cuda:0")
    with torch.no_grad():
        for ids in (IDS, IDS.cuda()):
            assert torch.equal(model(ids).cpu(), on_device(IDS.cuda()).cpu())
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_nothing_is_an_inference_tensor_whatever_ran_in_inference_mode(where: Where, model: Net, twin: Net) -> None:
    with torch.inference_mode():
        where.offload(model)
        model(IDS.to(where.device))
        overspill.restore(model)
    assert_ordinary(model, twin)
    for p in itertools.chain(model.parameters(), twin.parameters()):
        p.grad = None
    with torch.inference_mode():
        where.offload(model, min_bytes=0)
        model(IDS.to(where.device))
    for net in (model, twin):
        train_step(net, IDS.to(where.device))
    same_gradients(model, twin)
    with torch.inference_mode():
        overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_module_made_in_inference_mode_comes_back_trainable_or_is_refused(where: Where) -> None:
    with torch.inference_mode():
        model = nn.Linear(64, 64, device=where.device)
    expected = model.weight.detach().clone()
    try:
        where.offload(model)
    except StateError:
        assert type(model.weight) is nn.Parameter
        return
    overspill.restore(model)
    assert torch.equal(model.weight.detach(), expected)


@pytest.mark.parametrize("tier", TIERS)
def test_a_loaded_model_can_be_restored(tier: str, device: str, tmp_path: Path) -> None:
    twin = aligned(Net()).eval().to(device)
    model = loaded(Net, save_checkpoint(twin, tmp_path / "checkpoint"), tier, device)
    objects = list(model.parameters())
    assert_right(model, twin)
    with torch.no_grad():
        for net in (model, twin):
            net.get_parameter("blocks.1.up.weight").mul_(2)
    overspill.restore(model)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert_ordinary(model, twin)
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize("tier", TIERS)
def test_restore_with_delete_leaves_a_checkpoint_alone(tier: str, device: str, tmp_path: Path) -> None:
    twin = aligned(Net()).eval().to(device)
    checkpoint = save_checkpoint(twin, tmp_path / "checkpoint")
    before = checkpoint.read_bytes()
    model = loaded(Net, checkpoint, tier, device)
    try:
        overspill.restore(model, delete=True)
    except OverspillError:
        overspill.restore(model)
    assert checkpoint.read_bytes() == before
    assert_ordinary(model, twin)


@pytest.mark.parametrize("tier", TIERS)
def test_a_part_of_a_loaded_model_comes_back_and_goes_again(tier: str, device: str, tmp_path: Path) -> None:
    twin = aligned(Net()).eval().to(device)
    model = loaded(Net, save_checkpoint(twin, tmp_path / "checkpoint"), tier, device)
    part = next(f"blocks.{i}" for i in range(4) if f"blocks.{i}.up.weight" in away(model))
    overspill.restore(model, modules=[part])
    assert f"{part}.up.weight" not in away(model)
    assert_right(model, twin)
    overspill.offload(model, to="disk", modules=[part])
    assert f"{part}.up.weight" in away(model)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- calls while offloaded


class _BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [_BoomError, KeyboardInterrupt])
def test_the_model_is_usable_after_an_exception_in_a_forward(
    error: type[BaseException], where: Where, model: Net, twin: Net
) -> None:
    objects = [id(p) for p in model.parameters()]
    where.offload(model)
    names = away(model)

    def fail(*_: Any) -> None:
        raise error

    for block in model.blocks:
        handle = block.up.register_forward_hook(fail)
        with pytest.raises(error):
            model(IDS.to(where.device))
        handle.remove()
        assert [id(p) for p in model.parameters()] == objects
        assert away(model) == names, "something stayed on the device"
    assert_right(model, twin)
    handle = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(error):
        model(IDS.to(where.device))
    handle.remove()
    overspill.restore(model)
    assert_ordinary(model, twin)


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(lambda model: overspill.restore(model), id="restore"),
        pytest.param(lambda model: overspill.restore(model, modules=["blocks.1"]), id="restore the one that runs"),
        pytest.param(lambda model: overspill.restore(model, modules=["blocks.3"]), id="restore another"),
        pytest.param(lambda model: overspill.offload(model, to="disk", modules=["blocks.2"]), id="offload another"),
        pytest.param(lambda model: overspill.offload(model, to="disk"), id="offload"),
    ],
)
def test_the_verbs_are_refused_inside_a_running_forward(
    verb: Callable[[Net], Any], where: Where, model: Net, twin: Net
) -> None:
    where.offload(model, modules=["blocks.1", "blocks.3"])
    names, errors = away(model), []

    def inside(*_: Any) -> None:
        with pytest.raises(StateError, match="forward") as caught:
            verb(model)
        errors.append(caught.value)

    handle = model.blocks[1].up.register_forward_hook(inside)
    with torch.no_grad():
        output = model(IDS.to(where.device))
        handle.remove()
        assert torch.equal(output, twin(IDS.to(where.device)))
    assert len(errors) == 1
    assert away(model) == names
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_the_verbs_are_refused_also_between_the_parts_of_a_running_forward(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.1", "blocks.3"])
    errors = []

    def inside(*_: Any) -> None:
        with pytest.raises(StateError, match="forward") as caught:
            overspill.restore(model, modules=["blocks.3"])
        errors.append(caught.value)

    handle = model.blocks[2].register_forward_hook(inside)
    with torch.no_grad():
        output = model(IDS.to(where.device))
        handle.remove()
        assert torch.equal(output, twin(IDS.to(where.device)))
    assert len(errors) == 1
    assert_right(model, twin)


def test_copies_and_pickles_of_an_offloaded_model_are_ordinary(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, min_bytes=0)
    names = away(model)
    assert_right(model, twin)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert away(copied) == set()
        assert copied.head.weight is copied.embed.weight
        assert_plain(copied.cpu(), copy.deepcopy(twin).cpu())
        assert_right(aligned(copied).to(where.device), twin)
        with torch.no_grad():
            copied.blocks[0].up.weight.zero_()
    assert away(model) == names
    assert_right(model, twin)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("parts", [["child"], [""]])
def test_copies_of_what_is_partly_restored_are_ordinary(
    parts: list[str], copied: Callable[[nn.Module], nn.Module], where: Where
) -> None:
    model = aligned(OwnsTensors()).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(2, 64)
    where.offload(model)
    overspill.restore(model, modules=parts)
    assert_plain(copied(model).cpu(), copied(twin).cpu())
    assert_right(model, twin, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies_of_a_recurrent_unit_compute_with_their_own_weights(
    copied: Callable[[nn.Module], nn.Module], where: Where
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RNN(8, 8)).to(where.device)
    where.offload(model[1], min_bytes=0)  # which makes its state for copies itself
    another = copied(model).to(where.device)
    with torch.no_grad():
        for weight in model[1].parameters():
            weight.zero_()
    with torch.backends.cudnn.flags(enabled=False):
        output, _ = another(torch.randn(3, 2, 8, device=where.device))
    assert output.any()
    output.sum().backward()
    assert all(weight.grad is not None for weight in another.parameters())


class WritesItsBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.3)
        self.count += (x > 0).sum()
        self.noise.normal_()
        return self.linear(x) + self.mean.clone() * self.count + self.noise


def test_buffers_of_a_module_whose_parts_alone_come_to_the_device_are_written_there(where: Where) -> None:
    model = aligned(nn.Sequential(WritesItsBuffers(), nn.ReLU())).to(where.device)
    twin = copy.deepcopy(model)
    where.offload(model, modules=["0", "0.linear"], min_bytes=0)
    assert isinstance(model[0].mean, DiskTensor | HostTensor)
    for _ in range(3):
        x, results = torch.randn(4, 8, device=where.device), []
        for net in (model, twin):
            torch.manual_seed(5)
            with torch.no_grad():
                results.append(net(x))
        assert torch.equal(*results)
    assert_same_state(model, twin)


class CopiesItself(nn.Linear):
    """A module that is copied in its own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


@pytest.mark.parametrize(
    "make", [lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), lambda: CopiesItself(8, 8)]
)
@pytest.mark.parametrize("whole", [True, False])
def test_copies_of_what_copies_itself_compute_with_their_own_weights(
    make: Callable[[], nn.Module], whole: bool, where: Where
) -> None:
    model = aligned(make()).to(where.device) if whole else nn.Sequential(nn.Linear(8, 8), make()).to(where.device)
    part, twin, x = model if whole else model[1], copy.deepcopy(model), torch.randn(3, 8, device=where.device)
    where.offload(part, min_bytes=0)
    another = copy.deepcopy(model)
    assert vars(another).keys() == vars(twin).keys()
    assert_plain(another.to(where.device), twin)
    with torch.no_grad():
        for weight in part.parameters():
            weight.zero_()
    output = another.eval()(x)
    assert output.any()
    output.sum().backward()
    assert all(weight.grad is not None for weight in another.parameters())
    overspill.restore(part)
    assert vars(copy.deepcopy(model)).keys() == vars(model).keys() == vars(twin).keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies_of_what_torch_fx_has_traced_are_ordinary(
    copied: Callable[[nn.Module], nn.Module], where: Where
) -> None:
    model = aligned(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))).to(where.device)
    twin, x = copy.deepcopy(model), torch.randn(3, 8, device=where.device)
    where.offload(model, min_bytes=0)
    another = copied(model).to(where.device)
    assert vars(another).keys() == vars(copied(twin)).keys()
    assert {type(parameter) for parameter in another.parameters()} == {nn.Parameter}
    assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    assert torch.equal(aligned(another)(x), twin(x))


def test_a_state_dict_can_be_saved_and_loaded(where: Where, model: Net, twin: Net, tmp_path: Path) -> None:
    where.offload(model, min_bytes=0)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert list(state) == list(twin.state_dict())
    for name, value in twin.state_dict().items():
        assert type(state[name]) is torch.Tensor, name
        assert torch.equal(state[name].cpu(), value.cpu()), name
    fresh = Net().to(where.device)
    fresh.load_state_dict(model.state_dict())
    assert_right(fresh, twin)


def test_a_state_dict_outlives_restore_and_its_files(where: Where, model: Net, twin: Net) -> None:
    where.offload(model)
    state, alias = model.state_dict(), model.blocks[1].up.weight.detach()
    overspill.restore(model, delete=where.tier == "disk")
    with or_an_error_that_names("safetensors"):
        for name, value in twin.state_dict().items():
            assert torch.equal(state[name].cpu(), value.cpu()), name
        assert torch.equal(alias.cpu(), twin.blocks[1].up.weight.cpu())
    assert_ordinary(model, twin)


def test_parts_of_two_models_do_not_know_of_each_other(where: Where, model: Net, twin: Net) -> None:
    other = aligned(Net(blocks=2)).to(where.device)
    other_twin = copy.deepcopy(other)
    where.offload(model)
    where.offload(other, modules=["blocks.0"])
    assert away(other) == {f"blocks.0.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    assert_right(other, other_twin)
    overspill.restore(model)
    assert_ordinary(model, twin)
    assert_right(other, other_twin)
    overspill.restore(other)
    assert_ordinary(other, other_twin)


def test_a_tensor_that_two_models_share_is_right_in_both(where: Where, model: Net, twin: Net) -> None:
    class Critic(nn.Module):
        def __init__(self, embed: nn.Embedding) -> None:
            super().__init__()
            self.embed = embed

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids).sum(-1)

    critic, other = Critic(model.embed), Critic(twin.embed)
    where.offload(model)
    assert critic.embed.weight is model.head.weight
    assert_right(critic, other)
    assert_right(model, twin)
    overspill.restore(model)
    assert_right(critic, other)
    assert_ordinary(model, twin)


# ---------------------------------------------------------------- states that a verb cannot start from


def test_offloading_twice_is_refused_with_the_name(where: Where, model: Net, twin: Net) -> None:
    where.offload(model, modules=["blocks.1"])
    with pytest.raises(StateError, match=r"blocks\.1"):
        overspill.offload(model, to=where.tier, modules=["blocks.1"])
    with pytest.raises(StateError, match=r"blocks\.1"):
        overspill.offload(model, to=where.tier, modules=["blocks.2", "blocks.1"])
    with pytest.raises(StateError):
        overspill.offload(model.blocks[1], to=where.tier)
    assert away(model) == {f"blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_the_cpu_is_no_tier_where_the_cpu_computes() -> None:
    model = aligned(Net())
    untouched = Untouched(model)
    with pytest.raises((StateError, BudgetError)):
        overspill.offload(model, to="cpu")
    with pytest.raises((StateError, BudgetError)):
        overspill.offload(model, to="cpu", modules=["blocks.1"], device="cpu")
    untouched.check()


@pytest.mark.parametrize(
    ("device", "told"), [("cpu", "is in host memory"), ("cuda:0", r"is on cuda:0: .* Call model\.to\('cpu'\)")]
)
def test_a_move_to_the_cpu_to_compute_there_is_refused_by_where_the_tensor_is(device: str, told: str) -> None:
    # Stand-ins: a tensor on a GPU is told as one also where there is none. test_gpu.py has the real thing.
    mover: Any = SimpleNamespace(groups={"w": SimpleNamespace(tensor=SimpleNamespace(device=torch.device(device)))})
    move: Any = SimpleNamespace(tier=Tier.CPU, device=torch.device("cpu"), unit=SimpleNamespace(tensors=["w"]))
    with pytest.raises(StateError, match=f"w {told}"):
        offloading._refuse_no_op(mover, [move])


def test_a_part_moves_from_tier_to_tier(where: Where, model: Net, twin: Net, tmp_path: Path) -> None:
    names = {f"blocks.1.{name}" for name in MOVED_OF_A_BLOCK}
    objects = [id(p) for p in model.parameters()]
    first = where.offload(model, modules=["blocks.1"])
    for tier in ("disk", "cpu", "disk") if where.tier == "cpu" else ("cpu", "disk", "cpu"):
        done = overspill.offload(model, to=tier, modules=["blocks.1"])
        assert done.nbytes == first.nbytes == BLOCK_BYTES
        assert away(model) == names
        if tier == "disk":
            assert sum(path.stat().st_size for path in done.files) >= done.nbytes
        assert_right(model, twin)
        for net in (model, twin):
            train_step(net, IDS.to(where.device))
        same_gradients(model, twin)
    assert [id(p) for p in model.parameters()] == objects
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_module_on_meta_is_refused_with_its_name(device: str) -> None:
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(StateError, match="meta"):
        overspill.offload(empty, to="disk")
    model = aligned(Net()).to(device)
    model.blocks[2].up = nn.Linear(32, 64, device="meta")
    with pytest.raises(StateError, match=r"blocks\.2\.up"):
        overspill.offload(model, to="disk")
    assert away(model) == set()
    assert model.blocks[2].up.weight.is_meta
    overspill.offload(model, to="disk", modules=["blocks.1"])
    x = torch.randn(2, 32, device=device)
    assert torch.equal(model.blocks[1](x), model.blocks[1](x))


@pytest.mark.real_gpu("the simulated one has dense tensors only")
def test_tensors_that_are_no_plain_values_are_refused_with_their_name(device: str) -> None:
    model = aligned(Net()).to(device)
    model.blocks[1].up.register_buffer("mask", torch.eye(64, device=device).to_sparse())
    with pytest.raises(StateError, match=r"blocks\.1\.up\.mask is a torch\.sparse_coo tensor: only dense ones"):
        overspill.offload(model, to="disk", modules=["blocks.1"])
    del model.blocks[1].up.mask
    model.blocks[1].up.register_buffer("scaled", model.blocks[1].up.weight * 2)
    with pytest.raises(StateError, match=r"blocks\.1\.up\.scaled is the result of a computation.*Detach it"):
        overspill.offload(model, to="disk", modules=["blocks.1"])
    assert away(model) == set()


def test_a_tensor_on_disk_takes_no_values_of_another_shape(disk_model: Net, disk_twin: Net) -> None:
    overspill.offload(disk_model, to="disk", modules=["blocks.1"])
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight is float32\[64, 32\] on disk .* new nn\.Parameter"):
        disk_model.blocks[1].up.weight.data = torch.zeros(3)
    assert_right(disk_model, disk_twin)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"to": "gpu"},
        {"to": "device"},
        {"to": "disk", "modules": []},
        {"to": "cpu", "folder": "somewhere"},
        {"to": "disk", "min_bytes": -1},
        {"to": "disk", "device": "meta"},
        {"to": "disk", "device": "cuda:99"},
        {"to": "disk", "device": "warp"},
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = aligned(Net()).to(device)
    untouched = Untouched(model)
    with pytest.raises((OverspillError, TypeError)):
        overspill.offload(model, **options)
    untouched.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"modules": []}, {"device": "meta"}, {"device": "cuda:99"}, {"dtype": torch.int8}])
def test_options_of_restore_that_mean_nothing_are_refused(options: dict[str, Any], where: Where, model: Net) -> None:
    twin = copy.deepcopy(model)
    where.offload(model)
    names = away(model)
    with pytest.raises((OverspillError, TypeError)):
        overspill.restore(model, **options)
    assert away(model) == names
    assert_right(model, twin)


# ---------------------------------------------------------------- by a plan


@pytest.mark.parametrize(
    ("device", "tier"),
    [
        ("cpu", "disk"),
        pytest.param("cuda:0", "disk", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cpu", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "mixed", marks=pytest.mark.gpu),
    ],
)
def test_by_a_plan(device: str, tier: str, tmp_path: Path) -> None:
    model = aligned(Net()).to(device)
    twin = copy.deepcopy(model)
    objects = [id(p) for p in model.parameters()]
    plan = placed(narrow(overspill.plan(model, {}, device=device)), tier)
    done = overspill.offload(model, plan)
    assert away(model)
    assert done.nbytes == sum(t.nbytes for name, t in _named_tensors(twin) if name in away(model))
    if tier != "cpu":
        assert sum(path.stat().st_size for path in done.files) > 0.3 * done.nbytes
    assert [id(p) for p in model.parameters()] == objects
    assert_right(model, twin)
    assert_same_state(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_plan_that_keeps_some_units_leaves_them_as_they_are(device: str) -> None:
    model = aligned(Net()).to(device)
    twin = copy.deepcopy(model)
    plan = placed(narrow(overspill.plan(model, {}, device=device)), lambda i: "disk" if i % 2 else "device")
    overspill.offload(model, plan)
    stays = [p.unit for p in plan.placements if p.tier == "device"]
    assert stays
    assert not any(name in away(model) for unit in stays for name in unit.tensors)
    assert_right(model, twin)
    overspill.restore(model)
    assert_ordinary(model, twin)


def test_a_plan_and_options_that_it_answers_are_refused_together(device: str) -> None:
    model = aligned(Net()).to(device)
    untouched = Untouched(model)
    plan = overspill.plan(model, {}, device=device)
    for options in ({"to": "disk"}, {"modules": ["blocks.1"]}, {"device": device}):
        with pytest.raises((PlanError, TypeError)):
            overspill.offload(model, plan, **options)
    untouched.check()


def test_a_plan_that_changes_nothing_or_casts_is_refused(device: str, tmp_path: Path) -> None:
    model = aligned(Net()).to(device)
    untouched = Untouched(model)
    budget: dict[int | str, int | str] = {"cpu" if device == "cpu" else 0: "1GiB"}
    whole = overspill.plan(model, budget, device=device)
    with pytest.raises(StateError, match="this plan changes nothing"):
        overspill.offload(model, whole)
    with pytest.raises(PlanError, match=r"folder='.*off' has no effect: the plan puts nothing on disk"):
        overspill.offload(model, whole, folder=tmp_path / "off")
    with pytest.raises(PlanError, match=r"casts to torch\.bfloat16.*Plan without dtype="):
        overspill.offload(model, overspill.plan(model, {}, device=device, dtype=torch.bfloat16))
    untouched.check()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_another_model_is_refused(device: str) -> None:
    model = aligned(Net()).to(device)
    untouched = Untouched(model)
    with pytest.raises(PlanError):
        overspill.offload(model, overspill.plan(Net(blocks=2), {}, device=device))
    untouched.check()


# ---------------------------------------------------------------- files


@pytest.fixture
def disk_model(device: str) -> Net:
    return aligned(Net()).to(device)  # type: ignore[return-value]


@pytest.fixture
def disk_twin(disk_model: Net) -> Net:
    return copy.deepcopy(disk_model)


def bundles(folder: Path) -> list[Path]:
    return sorted(folder.rglob("tensors.safetensors"))


def test_one_folder_a_unit_with_a_bundle_and_an_index_that_others_can_read(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "off"
    done = overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks", "embed"])
    assert (folder / "overspill.json").is_file()
    assert "fingerprint" in json.loads((folder / "overspill.json").read_text())
    found = bundles(folder)
    assert len(found) == len(done.modules) >= 5
    assert {path for path in done.files if path.suffix == ".safetensors"} == set(found)
    assert all(path.parent != folder for path in found), "no unit lies in the root itself"
    state, seen = disk_twin.state_dict(), set()
    for path in found:
        index = json.loads((path.parent / "index.json").read_text())
        raw, values = path.read_bytes(), load_file(path)
        assert set(values) == {entry["name"] for entry in index["tensors"]}
        for entry in index["tensors"]:
            name, begin = entry["name"], entry["offset"]
            truth = state[name].cpu()
            assert torch.equal(values[name], truth), name
            assert (entry["shape"], entry["dtype"]) == (list(truth.shape), str(truth.dtype).removeprefix("torch."))
            assert raw[begin : begin + entry["nbytes"]] == truth.numpy().tobytes(), name
            seen.add(name)
    assert seen == away(disk_model)
    assert sum(path.stat().st_size for path in found) >= done.nbytes


def test_every_dtype_is_in_a_bundle_as_it_is(device: str, tmp_path: Path) -> None:
    model = AllKinds().to(device)
    twin = copy.deepcopy(model)
    overspill.offload(model, to="disk", min_bytes=0, folder=tmp_path / "off")
    stored: dict[str, torch.Tensor] = {}
    for path in bundles(tmp_path / "off"):
        stored.update(load_file(path))
    assert set(stored) == set(twin.state_dict())
    for name, value in twin.state_dict().items():
        assert (stored[name].dtype, stored[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(stored[name]), bits(value)), name


def test_a_root_module_has_a_folder_of_its_own(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "more.txt").write_text("mine too")
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = aligned(nn.Linear(64, 64)).to(device)
    twin = copy.deepcopy(model)
    overspill.offload(model, to="disk", folder=".")
    (bundle,) = bundles(tmp_path)
    assert bundle.parent.parent == tmp_path
    assert_right(model, twin, torch.randn(2, 64))
    monkeypatch.chdir("/")
    assert_right(model, twin, torch.randn(2, 64))
    overspill.restore(model, delete=True)
    assert tree(tmp_path) == before
    assert_ordinary(model, twin, torch.randn(2, 64))


def test_a_temporary_folder_goes_away_with_the_model(device: str) -> None:
    model = aligned(Net()).to(device)
    done = overspill.offload(model, to="disk")
    with torch.no_grad():
        model(IDS.to(device))
    assert done.files
    assert all(path.is_file() for path in done.files)
    del model
    gc.collect()
    assert [path for path in done.files if path.exists() or path.parent.exists() or path.parent.parent.exists()] == []


def test_a_temporary_folder_goes_away_after_restore(device: str) -> None:
    model = aligned(Net()).to(device)
    done = overspill.offload(model, to="disk")
    overspill.restore(model, delete=True)
    assert [path for path in done.files if path.exists() or path.parent.exists()] == []
    done = overspill.offload(model, to="disk")
    overspill.restore(model)
    del model
    gc.collect()
    assert [path for path in done.files if path.exists() or path.parent.exists()] == []


def test_files_in_a_folder_that_was_given_outlive_restore_unless_asked(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    done = overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    overspill.restore(disk_model)
    assert all(path.is_file() for path in done.files)
    again = overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    assert sum(path.stat().st_size for path in again.files) >= again.nbytes
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert [path for path in again.files if path.exists()] == []
    assert_ordinary(disk_model, disk_twin)


def test_delete_removes_the_folder_that_it_made_and_nothing_else(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "off").mkdir()
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    overspill.restore(disk_model, delete=True)
    assert tree(tmp_path) == {"off": None}, "the user made that folder"
    assert_ordinary(disk_model, disk_twin)


def test_foreign_files_survive_everything(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    folder = tmp_path / "off"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    (folder / "deep").mkdir()
    (folder / "deep" / "model.safetensors").write_bytes(b"also mine")
    done = overspill.offload(disk_model, to="disk", folder=folder)
    inside = bundles(folder)[0].parent / "notes.txt"
    inside.write_text("a note beside a bundle")
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    left = tree(folder)
    assert {path: data for path, data in left.items() if data is not None} == {
        "mine.txt": b"mine",
        "deep/model.safetensors": b"also mine",
        str(inside.relative_to(folder)): b"a note beside a bundle",
    }
    assert [path for path in done.files if path.exists()] == []
    assert_ordinary(disk_model, disk_twin)


def test_a_foreign_file_where_a_bundle_would_go_is_never_overwritten(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    where = overspill.offload(disk_model, to="disk", folder=tmp_path / "probe", modules=["blocks.1"]).files
    overspill.restore(disk_model)
    folder = tmp_path / "off"
    foreign = [folder / path.relative_to(tmp_path / "probe") for path in where]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    try:
        overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks.1"])
    except OffloadFolderError:
        assert away(disk_model) == set()
    else:
        assert_right(disk_model, disk_twin)
        overspill.restore(disk_model, delete=True)
    assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)
    assert_ordinary(disk_model, disk_twin)


def test_parts_in_one_folder_are_deleted_one_by_one(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    folder = tmp_path / "off"
    first = overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks.0"])
    second = overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks.1", "blocks.2"])
    overspill.restore(disk_model, modules=["blocks.0"], delete=True)
    bundle = {path for path in first.files if path.suffix == ".safetensors"}
    assert bundle
    assert not any(path.exists() for path in bundle)
    assert all(path.is_file() for path in second.files)
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, modules=["blocks.2"], delete=True)
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(disk_model, disk_twin)


def test_folders_of_parts_that_became_one_model_are_cleared_with_it(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    for index, name in enumerate("ab"):
        overspill.offload(disk_model.blocks[index], to="disk", folder=tmp_path / name)
    overspill.offload(disk_model, to="disk", modules=["blocks.2"], folder=tmp_path / "b")
    assert [len(bundles(tmp_path / name)) for name in "ab"] == [2, 3]
    overspill.restore(disk_model.blocks[1], delete=True)
    assert [len(bundles(tmp_path / name)) for name in "ab"] == [2, 1]
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(disk_model, disk_twin)


def test_a_part_of_a_unit_restored_with_delete_leaves_the_rest_readable(
    disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off", modules=["blocks.1"])
    overspill.restore(disk_model, modules=["blocks.1.up"], delete=True)
    assert away(disk_model) == {"blocks.1.down.weight"}
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(disk_model, disk_twin)


def test_a_folder_that_another_model_uses_is_refused(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    folder = tmp_path / "off"
    overspill.offload(disk_model, to="disk", folder=folder)
    other = aligned(Net()).to(device_of(disk_model))  # the same architecture, so the same names and sizes
    untouched, before = Untouched(other), tree(folder)
    with pytest.raises(OffloadFolderError, match="off"):
        overspill.offload(other, to="disk", folder=folder)
    with pytest.raises(OffloadFolderError, match="off"):
        overspill.offload(other.blocks[0], to="disk", folder=folder)
    untouched.check()
    assert tree(folder) == before
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    other_twin = copy.deepcopy(other)
    overspill.offload(other, to="disk", folder=folder)
    assert_right(other, other_twin)


@pytest.mark.parametrize("keep", ["all", "no mark", "no bundle", "no index"])
def test_what_another_model_left_in_a_folder_is_never_computed_with(
    keep: str, disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    folder = tmp_path / "off"
    left = aligned(Net()).to(device_of(disk_model))
    overspill.offload(left, to="disk", folder=folder)
    overspill.restore(left)
    del left
    gc.collect()
    dropped = {"no mark": "overspill.json", "no bundle": "tensors.safetensors", "no index": "index.json"}.get(keep)
    for path in list(folder.rglob("*")):
        if path.name == dropped:
            path.unlink()
    before = tree(folder)
    try:
        overspill.offload(disk_model, to="disk", folder=folder)
    except OffloadFolderError:
        assert tree(folder) == before
        assert away(disk_model) == set()
    else:
        assert_right(disk_model, disk_twin)
        assert_same_state(disk_model, disk_twin)
        overspill.restore(disk_model)
    assert_ordinary(disk_model, disk_twin)


def test_a_model_whose_weights_changed_writes_them_anew(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    overspill.restore(disk_model)
    with torch.no_grad():
        for net in (disk_model, disk_twin):
            net.blocks[1].up.weight.mul_(3)
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert_ordinary(disk_model, disk_twin)


def test_tensors_outlive_their_model_or_say_what_is_missing(device: str) -> None:
    model = aligned(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))).to(device)
    expected = [p.detach().clone().cpu() for p in model.parameters()]
    overspill.offload(model, to="disk")
    kept = list(model.parameters())
    del model
    gc.collect()
    for p, values in zip(kept, expected, strict=True):
        with or_an_error_that_names("safetensors"):
            assert torch.equal(p.detach().clone().cpu(), values)


# ---------------------------------------------------------------- disks that fail


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Within, the kernel refuses writes past `nbytes` of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def no_more_files(folder: Path, count: int) -> Iterator[None]:
    """Within, only `count` new files can be made under `folder`."""
    real, made = os.open, itertools.count()

    def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and str(folder) in str(path) and next(made) >= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", full)
        yield


FULL: list[Callable[[Path], AbstractContextManager[None]]] = [
    lambda folder: files_of_at_most(0),
    lambda folder: files_of_at_most(1000),
    lambda folder: files_of_at_most(9000),  # the embedding fits, a block does not
    lambda folder: no_more_files(folder, 0),
    lambda folder: no_more_files(folder, 1),
    lambda folder: no_more_files(folder, 4),
]


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("made", [True, False])
def test_a_full_disk_leaves_the_model_and_the_folder_as_they_were(
    full: Callable[[Path], AbstractContextManager[None]], made: bool, disk_model: Net, tmp_path: Path
) -> None:
    folder = tmp_path / "off"
    if made:
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    before, untouched = tree(tmp_path), Untouched(disk_model)
    with full(folder), pytest.raises(OffloadFolderError) as caught:
        overspill.offload(disk_model, to="disk", folder=folder)
    assert str(folder) in str(caught.value)
    assert tree(tmp_path) == before
    untouched.check()
    disk_model.zero_grad()
    twin = copy.deepcopy(disk_model)
    overspill.offload(disk_model, to="disk", folder=folder)
    assert_right(disk_model, twin)


@pytest.mark.parametrize("full", FULL)
def test_a_disk_that_fills_up_leaves_the_parts_that_went_before_as_they_were(
    full: Callable[[Path], AbstractContextManager[None]], disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    folder = tmp_path / "off"
    overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks.0"])
    before, names = tree(folder), away(disk_model)
    with full(folder), pytest.raises(OffloadFolderError):
        overspill.offload(disk_model, to="disk", folder=folder, modules=["blocks.1", "blocks.2", "blocks.3"])
    assert tree(folder) == before
    assert away(disk_model) == names
    assert_right(disk_model, disk_twin)
    for i in (1, 2, 3):
        assert_plain(disk_model.blocks[i], disk_twin.blocks[i])
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(disk_model, disk_twin)


def test_too_little_space_is_told_before_anything_is_written(
    disk_model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage, untouched = shutil.disk_usage(tmp_path), Untouched(disk_model)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(OffloadFolderError, match="free"):
            overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    assert list(tmp_path.iterdir()) == []
    untouched.check()


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_folder_that_cannot_be_made_is_named(below: str, disk_model: Net, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    untouched = Untouched(disk_model)
    with pytest.raises(OffloadFolderError, match="file"):
        overspill.offload(disk_model, to="disk", folder=tmp_path / "file" / below)
    assert tree(tmp_path) == {"file": b"mine"}
    untouched.check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    model = aligned(Net())
    folder, untouched = tmp_path / "off", Untouched(model)
    folder.mkdir(mode=0o500)
    with pytest.raises(OffloadFolderError, match="off"):
        overspill.offload(model, to="disk", folder=folder)
    assert list(folder.iterdir()) == []
    untouched.check()


def test_an_interrupt_in_the_middle_of_an_offload_leaves_the_model(
    disk_model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched, real, made = Untouched(disk_model), os.open, itertools.count()

    def interrupted(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and str(tmp_path) in str(path) and next(made) == 4:
            raise KeyboardInterrupt
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    assert list(tmp_path.iterdir()) == []
    untouched.check()


# ---------------------------------------------------------------- files that change behind its back


def overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100:] = bytes(100)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.rename(path)


def removed(path: Path) -> None:
    path.unlink()


def turned_to_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [overwritten, truncated, replaced, removed, turned_to_a_folder])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_file_that_changes_is_named_at_the_next_use_unless_its_bytes_can_still_be_read(
    change: Callable[[Path], None], passes: int, disk_model: Net, disk_twin: Net, tmp_path: Path
) -> None:
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off", modules=["blocks.1"])
    assert_right(disk_model, disk_twin, passes=passes)
    names = away(disk_model)
    (bundle,) = bundles(tmp_path / "off")
    change(bundle)
    for use in (
        lambda: assert_right(disk_model, disk_twin),
        lambda: assert_same_state(disk_model, disk_twin),
        lambda: overspill.restore(disk_model),
    ):
        if change in (overwritten, truncated):  # whoever has the file open reads the new bytes
            with pytest.raises(OverspillError, match=r"tensors\.safetensors"):
                use()
            assert away(disk_model) == names
        else:
            with or_an_error_that_names(str(bundle)):
                use()
    with torch.no_grad():  # the rest of the model is as it was
        x = torch.randn(2, 32, device=device_of(disk_twin))
        assert torch.equal(disk_model.blocks[0](x), disk_twin.blocks[0](x))


def test_files_that_come_back_can_be_used_again(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    (tmp_path / "off").rename(tmp_path / "elsewhere")
    with or_an_error_that_names("tensors.safetensors"):
        assert_right(disk_model, disk_twin)
    (tmp_path / "elsewhere").rename(tmp_path / "off")
    assert_right(disk_model, disk_twin)
    overspill.restore(disk_model, delete=True)
    assert list(tmp_path.iterdir()) == []
    assert_ordinary(disk_model, disk_twin)


def test_delete_of_files_that_are_gone_is_no_error(disk_model: Net, disk_twin: Net, tmp_path: Path) -> None:
    done = overspill.offload(disk_model, to="disk", folder=tmp_path / "off")
    with torch.no_grad():
        for net in (disk_model, disk_twin):
            for p in net.parameters():
                p.add_(1)  # in host memory from now on: the files are not needed
    for path in done.files:
        path.unlink()
    overspill.restore(disk_model, delete=True)
    assert_ordinary(disk_model, disk_twin)


# ---------------------------------------------------------------- nothing is held


def test_cycles_leave_no_thread_descriptor_or_tensor(where: Where, model: Net, tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
        # The ring of pinned chunks is every model's, and grows to a fixed size as threads happen to read at once.
        chunks = sum(ring._free.qsize() for ring in transfer._shared_rings.values())
        return tensors - chunks, len(list(Path("/proc/self/fd").iterdir()))

    seen: list[Any] = []
    for _ in range(6):
        where.offload(model)
        with torch.no_grad():
            model(IDS.to(where.device))
        overspill.restore(model)
        seen.append((*count(), threading.active_count()))
    assert len(set(seen[2:])) == 1, seen


def test_a_deleted_model_frees_everything(where: Where) -> None:
    def cycle() -> Sequence[weakref.ref[Any]]:
        model = aligned(Net()).to(where.device)
        where.offload(model)
        with torch.no_grad():
            model(IDS.to(where.device))
        return [weakref.ref(model), weakref.ref(model.blocks[1]), weakref.ref(model.embed)]

    references = cycle()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_block_offloaded_by_itself_keeps_running_when_its_model_is_gone(where: Where) -> None:
    block = aligned(Block()).to(where.device)
    twin, x = copy.deepcopy(block), torch.randn(2, 32)
    model = nn.Sequential(block, nn.Linear(32, 32, device=where.device))
    where.offload(model, modules=["0"])
    del model
    gc.collect()
    with or_an_error_that_names("safetensors"):
        assert_right(block, twin, x)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_an_index_that_a_killed_process_had_begun_is_no_obstacle(share: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    overspill.offload(model, to="disk", folder=tmp_path, min_bytes=0)
    (index,) = tmp_path.rglob("index.json")
    content = index.read_bytes()
    overspill.restore(model, delete=True)
    index.parent.mkdir(parents=True)
    begun = index.with_name("index.json.partial")
    begun.write_bytes(content[: int(share * len(content))])
    overspill.offload(model, to="disk", folder=tmp_path, min_bytes=0)
    assert index.read_bytes() == content
    assert not begun.exists()


def test_an_index_that_somebody_else_had_begun_is_left_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    (tmp_path / "0").mkdir()
    begun = tmp_path / "0" / "index.json.partial"
    begun.write_text('{"made by": "somebody')
    with pytest.raises(OffloadFolderError, match="was not made by overspill for module '0'"):
        overspill.offload(model, to="disk", folder=tmp_path, min_bytes=0)
    assert begun.read_text() == '{"made by": "somebody'
    assert type(model[0].weight) is nn.Parameter

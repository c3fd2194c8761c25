"""empty_weights: a model's shape without its weights, for the thread that asks and for nobody else."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.skeleton import empty_weights
from support import run_at_once


@pytest.fixture(autouse=True)
def _one_hook_of_each_kind_stays() -> Iterator[None]:
    with empty_weights():
        pass
    yield
    assert len(torch_module._global_parameter_registration_hooks) == 1
    assert len(torch_module._global_buffer_registration_hooks) == 1


class Tagged(nn.Parameter):
    """A parameter of a class whose constructor nobody can guess, and whose `.to` does more than move it."""

    rank: int

    def __new__(cls, data: torch.Tensor, *, rank: int) -> "Tagged":
        tagged: Tagged = torch.Tensor._make_subclass(cls, data, False)
        tagged.rank = rank
        return tagged

    def to(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("moved by its own method")


def is_real(module: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


# ---------------------------------------------------------------- what goes to meta


def test_parameters_are_on_meta_and_buffers_keep_their_values() -> None:
    with empty_weights():
        norm = nn.BatchNorm1d(3)
    assert all(parameter.is_meta for parameter in norm.parameters())
    assert torch.equal(norm.get_buffer("running_var"), torch.ones(3))


def test_buffers_go_to_meta_on_request() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("passing", torch.ones(3, dtype=torch.int64), persistent=False)
            self.register_buffer("absent", None)
            self.typed = nn.Buffer(torch.ones(4), persistent=False)

    with empty_weights(include_buffers=True):
        module = Buffers()
    assert {name: buffer.is_meta for name, buffer in module.named_buffers()} == dict.fromkeys(
        ["kept", "passing", "typed"], True
    )
    assert list(module.state_dict()) == ["kept"]
    assert module.absent is None
    assert module.get_buffer("passing").dtype == torch.int64
    assert isinstance(module.typed, nn.Buffer)


def test_a_skeleton_has_the_names_shapes_and_dtypes_of_the_model() -> None:
    def build() -> nn.Module:
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dtype=torch.bfloat16)
        return nn.ModuleList([encoder, nn.Conv2d(3, 4, 5), nn.Embedding(7, 8), nn.LSTM(4, 5, 2), nn.GroupNorm(2, 4)])

    def described(module: nn.Module) -> list[tuple[object, ...]]:
        return [(name, p.shape, p.dtype, p.stride(), p.requires_grad) for name, p in module.named_parameters()]

    with empty_weights():
        skeleton = build()
    assert described(skeleton) == described(build())
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_frozen_parameter_stays_frozen() -> None:
    module = nn.Module()
    with empty_weights():
        module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        module.trained = nn.Parameter(torch.ones(2))
    assert not module.frozen.requires_grad
    assert module.trained.requires_grad


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    module = nn.Module()
    with empty_weights():
        module.w = Tagged(torch.ones(2, 3), rank=7)
    assert type(module.w) is Tagged
    assert module.w.is_meta
    assert module.w.rank == 7
    assert module.w.shape == (2, 3)


def test_a_parameter_that_wraps_tensors_has_them_all_on_meta() -> None:
    module = nn.Module()
    with empty_weights():
        module.w = nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)), requires_grad=False)
    assert isinstance(module.w, nn.Parameter)
    assert isinstance(module.w, TwoTensor)
    assert module.w.a.is_meta
    assert module.w.b.is_meta
    assert not module.w.requires_grad


def test_a_lazy_module_stays_lazy() -> None:
    with empty_weights():
        lazy = nn.LazyLinear(3)
    assert lazy.has_uninitialized_params()
    assert lazy(torch.ones(1, 2)).shape == (1, 3)


def test_a_module_may_compute_with_tensors_to_configure_itself() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = torch.linspace(0, 1, 3).tolist()
            self.w = nn.Parameter(torch.ones(int(torch.tensor([2, 3]).prod().item())))

    for include_buffers in (False, True):
        with empty_weights(include_buffers):
            module = Configured()
        assert module.rates == [0, 0.5, 1]
        assert module.w.shape == (6,)
        assert module.w.is_meta


def test_a_real_parameter_is_freed_as_soon_as_it_is_registered() -> None:
    module = nn.Module()
    with empty_weights():
        real = nn.Parameter(torch.randn(3))
        alive = weakref.ref(real)
        module.w = real
        del real
        assert alive() is None
    assert module.w.is_meta


# ---------------------------------------------------------------- ties


def test_a_parameter_registered_twice_stays_one() -> None:
    first, second = nn.Module(), nn.Module()
    with empty_weights():
        shared = nn.Parameter(torch.randn(3))
        first.w = shared
        with empty_weights():
            second.w = shared
        first.again = shared
    assert first.w is second.w
    assert first.w is first.again
    assert first.w.is_meta


def test_a_tie_made_by_assignment_stays_a_tie() -> None:
    with empty_weights():
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
    assert head.weight is embedding.weight
    assert len(list(nn.ModuleList([embedding, head]).parameters())) == 1


def test_a_buffer_registered_twice_stays_one() -> None:
    module, shared = nn.Module(), torch.ones(2)
    with empty_weights(include_buffers=True):
        module.register_buffer("a", shared)
        module.register_buffer("b", shared)
    assert module.a is module.b
    assert module.a.is_meta


def test_a_parameter_from_outside_keeps_its_values_there() -> None:
    outside = nn.Linear(2, 2)
    before = outside.weight.detach().clone()
    inside = nn.Module()
    with empty_weights():
        inside.w = outside.weight
        inside.module = outside
    assert inside.w.is_meta
    assert torch.equal(outside.weight, before)
    assert inside.module is outside


# ---------------------------------------------------------------- where the context ends


def test_what_is_built_after_the_context_is_real() -> None:
    with empty_weights(include_buffers=True):
        pass
    assert is_real(nn.BatchNorm1d(3))


def test_an_error_inside_ends_the_context() -> None:
    with pytest.raises(RuntimeError, match="from the model"), empty_weights(include_buffers=True), empty_weights():
        raise RuntimeError("from the model")
    assert is_real(nn.BatchNorm1d(3))


def test_of_nested_contexts_the_inner_one_counts() -> None:
    with empty_weights(include_buffers=True):
        with empty_weights():
            inner = nn.BatchNorm1d(3)
        outer = nn.BatchNorm1d(3)
    assert not inner.get_buffer("running_var").is_meta
    assert outer.get_buffer("running_var").is_meta
    assert inner.weight.is_meta
    assert outer.weight.is_meta


# ---------------------------------------------------------------- threads


def in_thread(build: object) -> list[nn.Module]:
    """What `build` returns in another thread, while this one waits."""
    assert callable(build)
    built: list[nn.Module] = []
    thread = threading.Thread(target=lambda: built.append(build()))
    thread.start()
    thread.join()
    return built


def test_another_thread_builds_real_models_meanwhile() -> None:
    with empty_weights(include_buffers=True):
        [other] = in_thread(lambda: nn.BatchNorm1d(3))
        own = nn.BatchNorm1d(3)
    assert is_real(other)
    assert own.weight.is_meta


def test_a_thread_that_leaves_its_context_does_not_end_anothers() -> None:
    def build() -> nn.Module:
        with empty_weights():
            return nn.Linear(2, 2)

    with empty_weights():
        [other] = in_thread(build)
        own = nn.Linear(2, 2)
    assert other.weight.is_meta
    assert own.weight.is_meta


def test_a_context_may_end_while_another_thread_registers_a_parameter() -> None:
    registering, ended = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        registering.set()
        assert ended.wait(60)

    hook = torch_module.register_module_parameter_registration_hook(wait)  # type: ignore[arg-type]
    context = empty_weights()
    context.__enter__()
    built: list[nn.Module] = []
    thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2, bias=False)))
    thread.start()
    try:
        assert registering.wait(60)
        context.__exit__(None, None, None)
    finally:
        ended.set()
        thread.join()
        hook.remove()
    assert [is_real(module) for module in built] == [True]


def test_threads_in_and_out_of_contexts_do_not_disturb_each_other() -> None:
    def build(empty: bool) -> None:
        for _ in range(200):
            if empty:
                with empty_weights():
                    module: nn.Module = nn.BatchNorm1d(3)
                assert all(parameter.is_meta for parameter in module.parameters())
            else:
                assert is_real(nn.BatchNorm1d(3))

    run_at_once([partial(build, number % 2 == 0) for number in range(6)])


# ---------------------------------------------------------------- size


def test_the_skeleton_of_a_70b_llama_takes_next_to_no_memory() -> None:
    program = """
        import json
        from pathlib import Path

        import transformers.models.llama.modeling_llama
        from transformers import AutoModelForCausalLM, LlamaConfig

        from overspill.skeleton import empty_weights

        def memory(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

        config = LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256,
        )
        before = memory("VmRSS")
        with empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        print(json.dumps({
            "growth": memory("VmHWM") - before,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "real": sum(not parameter.is_meta for parameter in model.parameters()),
            "meta buffers": sum(buffer.is_meta for buffer in model.buffers()),
        }))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment).stdout
    result = json.loads(printed.splitlines()[-1])
    assert result.pop("growth") < 150e6  # at its highest, so that what was freed again counts too
    assert result == {"parameters": 70_553_706_496, "real": 0, "meta buffers": 0}


class _Operations(TorchDispatchMode):
    """Notes the names of the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.trunc_normal_,
        lambda weight: weight.data.normal_(0, 0.02),
    ],
    ids=["normal", "uniform", "kaiming", "xavier", "truncated", "data"],
)
def test_random_initialisation_of_what_has_no_memory_is_skipped(fill: Any) -> None:
    """torch works out shapes and dtypes for it in Python: most of the time that a skeleton takes."""
    operations = _Operations()
    with empty_weights(), operations:
        layer = nn.Linear(8, 8)
        fill(layer.weight)
        real = torch.empty(8).fill_(2)
        nn.init.normal_(real)
    randoms = [name for name in operations.names if name.startswith(("normal_", "uniform_", "erfinv_"))]
    assert randoms == ["normal_.default"]  # the real tensor's, and no other
    assert not torch.equal(real, torch.full((8,), 2.0))
    assert layer.weight.is_meta
    assert layer.weight.requires_grad

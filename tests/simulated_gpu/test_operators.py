"""What the simulated device computes: as the CPU does, with the rules of CUDA."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from support import run_program

pytestmark = pytest.mark.gpu


def busy() -> None:
    torch.cuda._sleep(100_000_000)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: functional.linear(x, x, x[0]),
        lambda x: functional.layer_norm(x, x.shape[1:], x[0], x[1]),
        lambda x: functional.scaled_dot_product_attention(y := x.view(1, 2, 4, -1), y, y, is_causal=True),
        lambda x: torch.cat([x, x.t()]).sum(0).sort().values,
        lambda x: x[x > 0],
        lambda x: x.index_add(0, torch.arange(4, device=x.device), x[:4]),
        lambda x: functional.conv1d(x[None], x[:, :, None]),
        lambda x: x.double().cumsum(0).half().view(-1)[::3],
        lambda x: torch.histc(x, 4, 0, 4),
    ],
)
def test_results_are_those_of_the_cpu(compute: Callable[[torch.Tensor], torch.Tensor], queued: bool) -> None:
    x = torch.randn(8, 8)
    on_device = x.cuda()
    if queued:
        busy()
    result = compute(on_device)
    assert result.device.type == "cuda"
    torch.testing.assert_close(result.cpu(), compute(x))


def test_whole_numbers_are_counted_as_others_are() -> None:
    assert torch.histc(torch.tensor([0, 1, 1, 3], device="cuda:0"), 4, 0, 3).tolist() == [1, 2, 0, 1]


def test_tensors_of_two_devices_do_not_mix() -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda:0")
    for mix in (torch.add, torch.matmul, lambda a, b: torch.cat([a, b]), lambda a, b: a.mul_(b)):
        for pair in ((here, there), (there, here)):
            with pytest.raises(RuntimeError, match="on the same device"):
                mix(*pair)
    assert (there + torch.tensor(1)).sum() == 8, "but numbers do"
    assert there[torch.tensor([0])].sum() == 2, "and indices"


def test_a_number_counts_as_it_was_when_the_kernel_was_asked_for() -> None:
    x, number = torch.ones(4, device="cuda:0"), torch.tensor(3.0)
    busy()
    product = x * number
    number.fill_(5)
    assert product.unique().tolist() == [3]


def test_shapes_that_do_not_fit_are_told_at_once() -> None:
    x = torch.ones(4, 3, device="cuda:0")
    busy()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x


@pytest.mark.parametrize("queued", [False, True])
def test_outputs_that_are_given_are_made_large_enough(queued: bool) -> None:
    x, out = torch.ones(4, device="cuda:0"), torch.empty(0, device="cuda:0")
    if queued:
        busy()
    assert torch.add(x, x, out=out) is out
    assert out.tolist() == [2] * 4


def test_views_show_the_memory_of_what_they_are_views_of() -> None:
    x = torch.zeros(4, 4, device="cuda:0")
    for view in (x.t(), x[1:], x.view(2, 8), x.unfold(0, 2, 2), x.diagonal(), x.detach(), x.real):
        assert view.untyped_storage().data_ptr() == x.data_ptr()
        assert view.is_cuda
    x.t()[1].fill_(3)
    assert x[:, 1].tolist() == [3] * 4


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(64, device="cuda:0"),
        lambda: torch.empty(64, device="cuda:0").uniform_(),
        lambda: torch.randperm(64, device="cuda:0"),
        lambda: functional.dropout(torch.ones(64, device="cuda:0"), 0.5),
        lambda: torch.ones(64, device="cuda:0").multinomial(32),
    ],
)
def test_random_numbers_go_back_by_seed_and_offset(draw: Callable[[], torch.Tensor]) -> None:
    (generator,) = torch.cuda.default_generators
    state, offset = torch.cuda.get_rng_state(), generator.get_offset()
    on_cpu = torch.get_rng_state()
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    assert generator.get_offset() > offset
    assert torch.equal(torch.get_rng_state(), on_cpu), "those of the CPU are others"
    generator.set_offset(offset)
    assert torch.equal(draw(), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), first)
    torch.manual_seed(1)
    assert not torch.equal(draw(), first)


def test_dropout_scales_what_it_keeps() -> None:
    dropped = functional.dropout(torch.ones(10_000, device="cuda:0"), 0.25)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert 0.22 < (dropped == 0).float().mean() < 0.28


def test_gradients_are_those_of_the_cpu() -> None:
    gradients = []
    for device in ("cpu", "cuda:0"):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 8).to(device).requires_grad_()
        functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_a_process_that_starts_afresh_has_the_device_too() -> None:
    assert run_program("import torch; print(torch.ones(3, device='cuda').sum().item())") == "3.0\n"

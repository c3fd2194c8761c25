"""What is traced through a rearrangement is read back as torch itself would have made it, whatever way it is read."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.checkpoint import rearranging, traced
from overspill.checkpoint.rearranging import Rearrangement, Run
from overspill.checkpoint.traced import NotARearrangementError, Traced, as_they_are
from overspill.tensors import TensorSpec

Make = Callable[..., Any]
Shape = tuple[int, ...]
SMALL_READS = [16 << 20, 64, 1]
"""All at once, a few elements at a time, and one by one."""


class Sources:
    """Values to rearrange, no two of them equal, and a count of what is read of them."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype = torch.float32) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        first = 1
        for number, shape in enumerate(shapes):
            count = math.prod(shape)
            self.tensors[f"source {number}"] = torch.arange(first, first + count).to(dtype).reshape(shape)
            first += count
        self.read: Counter[tuple[str, int]] = Counter()
        self.longest_read = 0

    def traced(self) -> list[Traced]:
        return [Traced.source(name, TensorSpec.of(tensor)) for name, tensor in self.tensors.items()]

    def elements(self, source: str, start: int, stop: int) -> torch.Tensor:
        whole = self.tensors[source].view(-1)
        assert 0 <= start < stop <= whole.numel(), f"{start} to {stop} of {whole.numel()} elements"
        self.read.update((source, position) for position in range(start, stop))
        self.longest_read = max(self.longest_read, stop - start)
        return whole[start:stop].clone()


@pytest.fixture(params=SMALL_READS, ids=["at once", "64 bytes", "1 byte"])
def read_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rearranging, "_READ_AT_ONCE", request.param)
    return int(request.param)


def rearranged(traced: torch.Tensor) -> Rearrangement:
    assert isinstance(traced, Traced)
    return traced.rearrangement()


def several(made: Any) -> list[Any]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def assert_runs(found: Rearrangement, sources: Sources, expected: torch.Tensor) -> None:
    """Its runs, one after the other, are the tensor, and each stretch of it lies where it says."""
    for position, run in found.stretches():
        stretch = sources.elements(run.source, run.offset, run.offset + run.numel)
        assert torch.equal(stretch, expected.reshape(-1)[position : position + run.numel])
    if found.runs is None:
        return
    assert [run for _, run in found.stretches()] == found.runs
    assert sum(run.numel for run in found.runs) == expected.numel()
    assert all(run.numel > 0 for run in found.runs)
    parts = [sources.elements(run.source, run.offset, run.offset + run.numel) for run in found.runs]
    assert torch.equal(torch.cat(parts) if parts else expected.new_empty(0), expected.reshape(-1))


def assert_reads(found: Rearrangement, sources: Sources, expected: torch.Tensor) -> None:
    """Filled, in chunks, in rows or run by run: always the values of `expected`."""
    assert found.spec == TensorSpec.of(expected)
    target = torch.full(expected.shape, -1).to(expected.dtype)
    found.fill(target, sources.elements)
    assert torch.equal(target, expected)
    chunks = list(found.chunks(sources.elements))
    assert all(chunk.ndim == 1 and chunk.numel() for chunk in chunks)
    assert torch.equal(torch.cat(chunks) if chunks else expected.new_empty(0), expected.reshape(-1))
    assert_runs(found, sources, expected)
    for dim in range(expected.ndim):
        if expected.shape[dim] > 1:
            rest = expected.narrow(dim, 1, expected.shape[dim] - 1)
            target = torch.full_like(rest, -1)
            found.part(dim, 1, expected.shape[dim]).fill(target, sources.elements)
            assert torch.equal(target, rest)


def check(make: Make, *shapes: Shape, dtype: torch.dtype = torch.float32) -> list[Rearrangement]:
    """What `make` does to traced tensors is what it does to real ones."""
    sources = Sources(shapes, dtype)
    expected = several(make(*sources.tensors.values()))
    found = [rearranged(traced) for traced in several(make(*sources.traced()))]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_reads(ours, sources, theirs)
    return found


# ---------------------------------------------------------------- what conversions do


def fused_experts(*experts: torch.Tensor) -> torch.Tensor:
    half = len(experts) // 2
    return torch.cat([torch.stack(experts[:half]), torch.stack(experts[half:])], dim=1)


def permuted_for_rope(weight: torch.Tensor, heads: int = 3) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(weight.shape[0], 2, -1).transpose(1, 2).reshape(weight.shape).contiguous()


NAMED: list[tuple[str, Make, list[Shape]]] = [
    ("itself", lambda a: a, [(3, 4)]),
    ("a copy", lambda a: a.detach().clone().contiguous(), [(3, 4)]),
    ("fused experts", fused_experts, [*[(3, 4)] * 4, *[(5, 4)] * 4]),
    ("experts side by side", lambda *all_of: torch.stack(all_of, dim=1), [(3, 4)] * 3),
    ("stacked at the end", lambda *all_of: torch.stack(all_of, dim=-1), [(3, 4)] * 3),
    ("joined at the end", lambda a, b: torch.cat([a, b], dim=-1), [(3, 4), (3, 2)]),
    ("twice the same", lambda a: torch.cat([a, a]), [(3, 4)]),
    ("experts one by one", lambda a: [part.squeeze() for part in torch.chunk(a, 4)], [(4, 3, 5)]),
    ("fused experts one by one", lambda a: [e for h in a.chunk(2, dim=1) for e in h.unbind(0)], [(4, 6, 5)]),
    ("uneven chunks", lambda a: torch.chunk(a, 4), [(9, 2)]),
    ("chunks of the last dimension", lambda a: torch.chunk(a, 3, dim=-1), [(2, 9)]),
    ("more chunks than rows", lambda a: torch.chunk(a, 5), [(3, 2)]),
    ("split by sizes", lambda a: torch.split(a, [2, 3, 4]), [(9, 4)]),
    ("split by sizes across", lambda a: torch.split(a, [1, 3], dim=1), [(3, 4)]),
    ("split by one size", lambda a: torch.split(a, 4), [(9, 2)]),
    ("nothing split", lambda a: torch.split(a, 4), [(0, 2)]),
    ("nothing in chunks", lambda a: torch.chunk(a, 3), [(0, 2)]),
    ("split and put together", lambda a: torch.cat(torch.split(a, [2, 3, 4])[::-1]), [(9, 4)]),
    ("interleaved", interleaved, [(4, 6)]),
    ("interleaved and back", lambda a: a.reshape(4, -1, 2).transpose(1, 2).reshape(4, 6), [(4, 6)]),
    ("interleaved halves", lambda a: interleaved(a).chunk(2, dim=1), [(4, 6)]),
    ("transposed", lambda a: a.transpose(1, 2).contiguous(), [(3, 4, 5)]),
    ("transposed far", lambda a: a.transpose(0, -1), [(3, 4, 5)]),
    ("transposed matrix", lambda a: a.t(), [(3, 4)]),
    ("transposed vector", lambda a: a.t(), [(3,)]),
    ("permuted", lambda a: a.permute(2, 0, -2), [(3, 4, 5)]),
    ("permuted for RoPE", permuted_for_rope, [(24, 5)]),
    ("permuted for RoPE and fused", lambda a, b: torch.cat([permuted_for_rope(a), b]), [(24, 5), (8, 5)]),
    ("a bias permuted for RoPE", lambda a: a.view(3, 4, 2).transpose(1, 2).reshape(24), [(24,)]),
    ("flattened", lambda a: a.flatten(), [(3, 4, 5)]),
    ("a convolution as a linear layer", lambda a: a.reshape(a.shape[0], -1), [(4, 3, 2, 2, 2)]),
    ("a linear layer as a convolution", lambda a: a.reshape(4, 3, 2, 2, 2), [(4, 24)]),
    ("cut across its rows", lambda a: a.reshape(8, 3), [(4, 6)]),
    ("cut so that rows mix", lambda a: a.reshape(9, 4), [(6, 6)]),
    ("cut so that rows of several mix", lambda a, b: torch.cat([a, b]).reshape(4, 5), [(2, 4), (3, 4)]),
    ("cut into ones", lambda a: a.reshape(1, 3, 1, 4, 1), [(3, 4)]),
    ("transposed and flattened", lambda a: a.t().reshape(-1), [(3, 4)]),
    ("transposed, flattened and cut", lambda a: a.t().reshape(6, 2), [(3, 4)]),
    ("a slice", lambda a: a[1:3, 2:], [(4, 5)]),
    ("slices with steps", lambda a: a[::2, 1::3], [(5, 8)]),
    ("a slice of a slice with steps", lambda a: a[1::2][1::2], [(11, 2)]),
    ("slices with steps of several", lambda a, b: torch.cat([a, b])[1::3], [(4, 2), (5, 2)]),
    ("a slice with steps, flattened", lambda a: a[:, ::2].reshape(-1), [(4, 7)]),
    ("a slice beyond the end", lambda a: a[2:100], [(4, 5)]),
    ("a slice from behind", lambda a: a[-2:], [(4, 5)]),
    ("a row", lambda a: a[1], [(4, 5)]),
    ("a column from behind", lambda a: a[:, -1], [(4, 5)]),
    ("one element", lambda a: a[1, 2], [(4, 5)]),
    ("narrowed", lambda a: a.narrow(1, 1, 3), [(4, 5)]),
    ("unbound", lambda a: torch.unbind(a, dim=-1), [(4, 5)]),
    ("without ones", lambda a: a.squeeze(), [(1, 3, 1, 4)]),
    ("without one of its ones", lambda a: a.squeeze(-2), [(1, 3, 1, 4)]),
    ("without two of its ones", lambda a: a.squeeze((0, 1, 2)), [(1, 3, 1, 4)]),
    ("with ones", lambda a: a.unsqueeze(0).unsqueeze(-1).unsqueeze(2), [(3, 4)]),
    ("a number", lambda a: a, [()]),
    ("a number as a vector", lambda a: a.reshape(1), [()]),
    ("a vector as a number", lambda a: a.squeeze(), [(1,)]),
    ("numbers stacked", lambda a, b: torch.stack([a, b]), [(), ()]),
    ("nothing", lambda a: a, [(0, 3)]),
    ("nothing of something", lambda a: a[2:2], [(4, 5)]),
    ("nothing, cut", lambda a: a[:, 1:2], [(0, 3)]),
    ("nothing, reshaped", lambda a: a.reshape(3, 0, 5), [(0, 3)]),
    ("nothing beside something", lambda a, b: torch.cat([a, b]), [(0, 3), (2, 3)]),
]


@pytest.mark.parametrize(
    ("make", "shapes"), [(make, shapes) for _, make, shapes in NAMED], ids=[n for n, _, _ in NAMED]
)
def test_a_rearrangement_reads_what_torch_makes(make: Make, shapes: list[Shape], read_at_once: int) -> None:
    check(make, *shapes)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn], ids=str
)
def test_every_width_of_element(dtype: torch.dtype, read_at_once: int) -> None:
    sources = Sources([(2, 3)] * 4)
    tensors = [tensor.to(dtype) for tensor in sources.tensors.values()]
    sources.tensors = dict(zip(sources.tensors, tensors, strict=True))
    found = rearranged(fused_experts(*sources.traced()))
    target = torch.zeros(found.spec.shape, dtype=dtype)
    found.fill(target, sources.elements)
    assert torch.equal(target.view(torch.uint8), fused_experts(*tensors).view(torch.uint8))
    assert [run.numel for run in found.runs or ()] == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("make", "shapes"), [(make, shapes) for _, make, shapes in NAMED], ids=[n for n, _, _ in NAMED]
)
def test_the_caller_may_be_in_inference_mode(make: Make, shapes: list[Shape]) -> None:
    with torch.inference_mode():
        check(make, *shapes)


def test_tensors_as_they_are() -> None:
    sources = Sources([(3, 4), (), (0,)])
    found = as_they_are({name: TensorSpec.of(tensor) for name, tensor in sources.tensors.items()})
    assert list(found) == list(sources.tensors)
    for name, tensor in sources.tensors.items():
        assert_reads(found[name], sources, tensor)
        assert found[name].sources == ([name] if tensor.numel() else [])


# ---------------------------------------------------------------- chains of anything


def factors(draw: st.DrawFn, numel: int) -> list[int]:
    """Some shape of `numel` elements."""
    shape: list[int] = []
    while numel > 1 and len(shape) < 5:
        factor = draw(st.sampled_from([size for size in range(2, numel + 1) if numel % size == 0]))
        shape.append(factor)
        numel //= factor
        if draw(st.booleans()):
            shape.append(1)
    return shape if numel == 1 else [*shape, numel]


def reshaped(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    shape = factors(draw, tensor.numel()) if tensor.numel() else [*tensor.shape, 2]
    return lambda tensor: tensor.reshape(shape)


def sliced(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    bounds = slice(draw(st.integers(0, tensor.shape[dim])), draw(st.integers(0, 7)), draw(st.integers(1, 3)))
    return lambda tensor: tensor.movedim(dim, 0)[bounds].movedim(0, dim)


def doubled(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    return lambda tensor: torch.cat([tensor, tensor.narrow(dim, 0, (tensor.shape[dim] + 1) // 2)], dim)


def stacked(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim = draw(st.integers(-tensor.ndim - 1, tensor.ndim))
    return lambda tensor: torch.stack([tensor, tensor], dim)


def reordered(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dims = draw(st.permutations(range(tensor.ndim)))
    return lambda tensor: tensor.permute(dims)


def cut_and_swapped(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim, size = draw(st.integers(0, tensor.ndim - 1)), draw(st.integers(1, 3))
    return lambda tensor: torch.cat(torch.split(tensor, size, dim)[::-1], dim)


def one_of_them(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    index = draw(st.integers(-tensor.shape[dim], tensor.shape[dim] - 1)) if tensor.shape[dim] else None
    return lambda tensor: tensor if index is None else tensor.select(dim, index)


def without_ones(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    return lambda tensor: tensor.squeeze()


def with_a_one(draw: st.DrawFn, tensor: torch.Tensor) -> Make:
    dim = draw(st.integers(-tensor.ndim - 1, tensor.ndim))
    return lambda tensor: tensor.unsqueeze(dim)


STEPS = [reshaped, sliced, doubled, stacked, reordered, cut_and_swapped, one_of_them, without_ones, with_a_one]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Shape], Make]:
    """Some sources, and what is done to them in turn."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shapes = [shape] * draw(st.integers(1, 3))
    steps: list[Make] = []

    def make(*tensors: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(tensors)
        for step in steps:
            joined = step(joined)
        return joined

    tensor = make(*Sources(shapes).tensors.values())
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)):
        tensor = tensor if tensor.ndim else tensor.unsqueeze(0)
        steps.append(lambda tensor: tensor if tensor.ndim else tensor.unsqueeze(0))
        if tensor.numel() > 300 and step in (doubled, stacked):
            continue
        steps.append(step(draw, tensor))
        tensor = steps[-1](tensor)
    return shapes, make


@settings(max_examples=300)
@given(chain=chains(), read_at_once=st.sampled_from(SMALL_READS))
def test_any_chain_of_moves(chain: tuple[list[Shape], Make], read_at_once: int) -> None:
    shapes, make = chain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rearranging, "_READ_AT_ONCE", read_at_once)
        check(make, *shapes)


# ---------------------------------------------------------------- what is read, and in what pieces


def test_fused_experts_are_one_run_each() -> None:
    (found,) = check(fused_experts, *[(3, 4)] * 2, *[(5, 4)] * 2)
    runs = [(run.source, run.offset, run.numel) for run in found.runs or ()]
    assert runs == [("source 0", 0, 12), ("source 2", 0, 20), ("source 1", 0, 12), ("source 3", 0, 20)]


def test_where_runs_are_too_many_the_blocks_that_are_one_are_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rearranging, "_FEW_RUNS", 4)
    sources = Sources([(2, 8), (8, 2), (3, 8)])
    first, second, third = sources.traced()
    found = rearranged(torch.cat([first, second.t(), third]))
    assert found.runs is None
    assert list(found.stretches()) == [(0, Run("source 0", 0, 16)), (32, Run("source 2", 0, 24))]


def test_runs_that_touch_in_their_source_are_one() -> None:
    (found,) = check(lambda a: torch.cat(a.split([2, 3, 4])), (9, 4))
    assert [(run.offset, run.numel) for run in found.runs or ()] == [(0, 36)]


@pytest.mark.parametrize("make", [lambda a: a.t(), lambda a: a.transpose(0, 1).unsqueeze(0), lambda a: a.view(-1)])
def test_dimensions_of_one_break_no_run(make: Make) -> None:
    (found,) = check(make, (1, rearranging._FEW_RUNS + 1))
    assert [(run.offset, run.numel) for run in found.runs or ()] == [(0, rearranging._FEW_RUNS + 1)]


def test_many_short_runs_are_none_and_many_long_ones_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def columns(a: torch.Tensor) -> torch.Tensor:
        return a[:, :3]

    (found,) = check(columns, (rearranging._FEW_RUNS, 4))
    assert len(found.runs or ()) == rearranging._FEW_RUNS
    (found,) = check(columns, (rearranging._FEW_RUNS + 1, 4))
    assert found.runs is None
    monkeypatch.setattr(rearranging, "_LONG_RUN", 3 * 4)
    (found,) = check(columns, (rearranging._FEW_RUNS + 1, 4))
    assert len(found.runs or ()) == rearranging._FEW_RUNS + 1


@pytest.mark.parametrize(
    "make",
    [interleaved, lambda a: a.t(), lambda a: a.reshape(4, -1, 2).transpose(1, 2).reshape(4, 30), lambda a: a[::2].t()],
    ids=["interleaved", "transposed", "deinterleaved", "every other row, transposed"],
)
def test_what_blocks_share_is_read_once(make: Make) -> None:
    sources = Sources([(4, 30)])
    (weight,) = sources.traced()
    found = rearranged(make(weight))
    found.fill(torch.empty(found.spec.shape), sources.elements)
    assert set(sources.read.values()) == {1}


def reads_of(found: Rearrangement, sources: Sources) -> list[tuple[int, int]]:
    """The elements that are asked for to fill a tensor, request by request."""
    reads = []

    def elements(source: str, start: int, stop: int) -> torch.Tensor:
        reads.append((start, stop))
        return sources.elements(source, start, stop)

    found.fill(torch.empty(found.spec.shape), elements)
    return reads


def test_rows_that_lie_behind_each_other_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for every two rows, which lie too far apart to be read together: each would be requests of its own."""
    monkeypatch.setattr(rearranging, "_READ_AT_ONCE", 30 * 4)
    sources = Sources([(40, 3)])
    (weight,) = sources.traced()
    found = rearranged(weight.view(2, 20, 3).transpose(0, 1).reshape(40, 3))
    assert reads_of(found, sources) == [(0, 30), (30, 60), (60, 90), (90, 120)]


def test_a_block_is_cut_only_where_it_is_too_large_and_then_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources([(16, 16)])
    (weight,) = sources.traced()
    monkeypatch.setattr(rearranging, "_READ_AT_ONCE", 64 * 4)
    assert reads_of(rearranged(weight.t()), sources) == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert reads_of(rearranged(weight[12:].t()), sources) == [(192, 256)]
    assert reads_of(rearranged(weight[12:, 4:8].t()), sources) == [(196, 248)]


@pytest.mark.parametrize("make", [interleaved, lambda a: a.t(), lambda a: a.reshape(-1), lambda a: a.reshape(3, 40)])
def test_no_read_is_longer_than_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rearranging, "_READ_AT_ONCE", 10 * 4)
    sources = Sources([(4, 30)])
    (weight,) = sources.traced()
    found = rearranged(make(weight))
    found.fill(torch.empty(found.spec.shape), sources.elements)
    list(found.chunks(sources.elements))
    assert sources.longest_read <= 10


def test_chunks_are_no_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where a single row is larger: an expert of a fused tensor may be a hundred megabytes."""
    sources = Sources([(3, 4, 30)])
    (weight,) = sources.traced()
    for limit, lengths in ((400, [360]), (250, [240, 120]), (70, [60, 60] * 3), (20, [20, 10] * 12), (1, [1] * 360)):
        monkeypatch.setattr(rearranging, "_READ_AT_ONCE", limit * 4)
        assert [len(chunk) for chunk in weight.rearrangement().chunks(sources.elements)] == lengths


def test_sources_are_named_once_in_order() -> None:
    a, b, c = Sources([(2, 3)] * 3).traced()
    assert rearranged(torch.cat([c, a, c])).sources == ["source 2", "source 0"]
    assert b.rearrangement().sources == ["source 1"]


# ---------------------------------------------------------------- what does more than to move


def source(*shape: int, dtype: torch.dtype = torch.float32) -> Traced:
    return Traced.source("weight", TensorSpec(shape, dtype))


COMPUTES: list[tuple[str, Callable[[], Any]]] = [
    ("add", lambda: source(4, 3) + 1),
    ("mul", lambda: source(4, 3) * source(4, 3)),
    ("exp", lambda: source(4, 3).exp()),
    ("neg", lambda: -source(4)),
    ("index", lambda: source(4, 3)[torch.tensor([1, 0])]),
    ("flip", lambda: source(4, 3).flip(0)),
    ("roll", lambda: source(4).roll(1)),
    ("sum", lambda: source(4).sum()),
    ("expand", lambda: source(4).expand(2, 4)),
    ("_to_copy", lambda: source(4).to(torch.bfloat16)),
    ("copy_", lambda: source(4).copy_(torch.zeros(4))),
    ("copy_", lambda: torch.zeros(4).copy_(source(4))),
    ("zero_", lambda: source(4).zero_()),
    ("_local_scalar_dense", lambda: source(1).item()),
]


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize(("name", "compute"), COMPUTES, ids=[name for name, _ in COMPUTES])
def test_an_operation_that_computes_is_refused_by_name(name: str, compute: Callable[[], Any], inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(NotARearrangementError, match=rf"aten\.{name}\."):
        compute()


def test_joining_dtypes_is_refused_with_both() -> None:
    with pytest.raises(NotARearrangementError, match=r"it joins float32\[4\] and bfloat16\[4\]$"):
        torch.cat([source(4), source(4), source(4, dtype=torch.bfloat16), source(4)])


def test_joining_with_values_that_are_not_stored_is_refused() -> None:
    with pytest.raises(NotARearrangementError, match="with others"):
        torch.cat([source(4), torch.zeros(4)])


def test_more_blocks_than_can_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_MOST_BOXES", 10)
    source(10, 3).t().reshape(-1)
    with pytest.raises(NotARearrangementError, match="more than 10 blocks"):
        source(3, 11).t().reshape(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: torch.cat([a, b], dim=1),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: a.view(3, 2),
        lambda a, b: a.view(5, -1),
        lambda a, b: a.reshape(7, 2),
        lambda a, b: a.split([1, 2]),
        lambda a, b: torch.cat([a, b[0]]),
    ],
    ids=["cat", "stack", "view", "view inferred", "reshape", "split", "cat of a vector"],
)
def test_what_torch_cannot_do_is_an_error_here_too(make: Make) -> None:
    sources = Sources([(4, 3), (5, 3)])
    with pytest.raises(RuntimeError):
        make(*sources.tensors.values())
    with pytest.raises(RuntimeError):
        make(*sources.traced())


def test_a_traced_tensor_shows_what_it_is_without_values() -> None:
    assert repr(source(4, 3)) == "Traced(float32[4, 3] of 1 boxes)"

import gc
import time
import timeit
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overspill.config import MIB
from overspill.errors import PlanError
from overspill.tensors import tensor_groups
from overspill.units import Cut, Cutter, Unit, cut, cut_by, root_needs
from overspill.windows import in_a_row, least_window, usual_window

LARGE = 1024  # a square float32 matrix of this width takes 4 MiB


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Net(nn.Module):
    _no_split_modules: Any

    def __init__(self, blocks: int = 4, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Holder(nn.Module):
    """A container with what a test gives it."""

    _no_split_modules: Any

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(autouse=True)
def _on_meta():
    with torch.device("meta"):
        yield


def by_name(found: Cut) -> dict[str, Unit]:
    assert len({unit.name for unit in found.units}) == len(found.units), "names are unique"
    return {unit.name: unit for unit in found.units}


def assert_each_tensor_is_somewhere_once(model: nn.Module, found: Cut) -> None:
    placed = [*found.stays, *(name for unit in found.units for name in unit.tensors)]
    assert sorted(placed) == sorted(tensor_groups(model))


def test_blocks_of_a_module_list_are_units_however_small():
    found = cut(Net())
    assert [unit.name for unit in found.units] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert found.units[0].roots == ("blocks.0",)
    assert found.units[0].tensors[0] == "blocks.0.norm.weight"
    assert set(found.stays) == {"embed.weight", "norm.weight", "norm.bias", "head.weight"}


def test_children_of_a_sequential_are_units():
    found = cut(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert [unit.name for unit in found.units] == ["0", "2"]


def test_large_leaf_modules_outside_blocks_are_units_in_definition_order():
    found = cut(Net(width=64, vocabulary=8192))
    assert [unit.name for unit in found.units] == ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    assert found.stays == ("norm.weight", "norm.bias")


def test_the_outermost_list_wins():
    inner = [nn.Sequential(Block(), Block()) for _ in range(3)]
    assert [unit.name for unit in cut(nn.ModuleList(inner)).units] == ["0", "1", "2"]


def test_a_list_of_lists_has_its_blocks_inside():
    model = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)]) for _ in range(2))
    assert [unit.name for unit in cut(model).units] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_list_with_one_odd_block_keeps_that_block_whole():
    model = nn.Sequential(Block(), Block(), Holder(a=nn.Linear(8, 8), b=nn.Linear(8, 8)), nn.LayerNorm(8))
    found = cut(model)
    assert [unit.name for unit in found.units] == ["0", "1", "2"]
    assert found.stays == ("3.weight", "3.bias")


def test_a_list_of_trifles_in_a_large_model_is_not_special():
    norms = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64))
    found = cut(Holder(norms=norms, large=nn.Linear(LARGE, LARGE)))
    assert [unit.name for unit in found.units] == ["large"]
    assert len(found.stays) == 4


def test_small_blocks_are_units_beside_a_large_embedding():
    assert len(cut(Net(vocabulary=64 * LARGE)).units) == 6


def test_no_split_classes_of_the_user_make_the_blocks():
    found = cut(Net(), no_split_modules=["Linear"])
    names = [unit.name for unit in found.units]
    assert names == [*(f"blocks.{i}.{part}" for i in range(4) for part in ("up", "down")), "head"]


@pytest.mark.parametrize("kind", [list, set, tuple])
def test_no_split_classes_are_read_from_the_model_and_from_its_parts(kind):
    model, part = Holder(first=Block(), second=Block()), Net(blocks=1)
    part._no_split_modules = kind(["Block"])
    model.part = part
    model._no_split_modules = None
    assert [unit.name for unit in cut(model).units] == ["first", "second", "part.blocks.0"]


def test_lists_without_a_named_class_are_still_cut_into_blocks():
    model = Holder(text=Net(blocks=2), vision=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    model._no_split_modules = ["Block"]
    assert [unit.name for unit in cut(model).units] == ["text.blocks.0", "text.blocks.1", "vision.0", "vision.1"]


def test_a_no_split_class_that_the_model_has_not_is_an_error_with_what_is_near():
    with pytest.raises(PlanError, match=r"'Blok'.*Near: Block"):
        cut(Net(), no_split_modules=["Blok"])


def test_a_name_that_only_the_model_carries_may_be_missing():
    model = Net()
    model._no_split_modules = ["SomethingElse"]
    assert len(cut(model).units) == 4


def test_a_no_split_class_that_nobody_calls_is_an_error():
    with pytest.raises(PlanError, match="'ModuleList', which has no forward"):
        cut(Net(), no_split_modules=["ModuleList"])


def test_one_name_instead_of_a_collection_is_an_error():
    with pytest.raises(PlanError, match=r"write \['Block'\]"):
        cut(Net(), no_split_modules="Block")


def test_a_block_larger_than_the_limit_is_cut_into_its_children():
    block = cut(Net()).units[0]
    found = cut(Net(), limit=block.nbytes - 1)
    assert [unit.name for unit in found.units][:3] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    assert found.stays == cut(Net()).stays, "the parts of a tiny block are units too"


def test_a_limit_that_the_blocks_keep_changes_nothing():
    assert cut(Net(), limit=cut(Net()).units[0].nbytes) == cut(Net())


def test_cutting_goes_as_deep_as_the_limit_asks():
    model = nn.ModuleList(Holder(attention=Block(), mlp=Block()) for _ in range(2))
    half = cut(model).units[0].nbytes // 2
    assert [unit.name for unit in cut(model, limit=half).units] == [
        "0.attention", "0.mlp", "1.attention", "1.mlp",
    ]  # fmt: skip
    assert len(cut(model, limit=half - 1).units) == 12


def test_trifles_of_a_large_block_stay_when_it_is_cut():
    block = Holder(norm=nn.LayerNorm(8), up=nn.Linear(LARGE, LARGE), down=nn.Linear(LARGE, LARGE))
    found = cut(nn.ModuleList([block, Block(LARGE)]), limit=5 * MIB)
    assert [unit.name for unit in found.units][:2] == ["0.up", "0.down"]
    assert "0.norm.weight" in found.stays


def test_own_tensors_of_a_cut_block_are_read_in_place_if_large():
    class WithScale(Block):
        def __init__(self) -> None:
            super().__init__(LARGE)
            self.scale = nn.Parameter(torch.empty(LARGE, LARGE))
            self.shift = nn.Parameter(torch.empty(LARGE))

    found = cut(nn.ModuleList([WithScale(), WithScale()]), limit=9 * MIB)
    assert by_name(found)["0.scale"].roots == ()
    assert "0.shift" in found.stays


def test_a_leaf_larger_than_the_limit_stays_whole():
    assert [unit.name for unit in cut(nn.Linear(LARGE, LARGE), limit=1).units] == [""]


def test_attention_and_recurrent_modules_are_never_cut():
    model = Holder(attention=nn.MultiheadAttention(LARGE, 4), rnn=nn.LSTM(LARGE, LARGE, num_layers=2))
    assert [unit.roots for unit in cut(model, limit=1).units] == [("attention",), ("rnn",)]


def test_a_module_with_parameters_of_its_own_beside_children_is_one_unit():
    embeddings = Holder(patches=nn.Linear(LARGE, LARGE))
    embeddings.register_parameter("position", nn.Parameter(torch.empty(LARGE)))
    found = cut(Holder(embeddings=embeddings, head=nn.Linear(LARGE, LARGE)))
    assert by_name(found)["embeddings"].tensors == (
        "embeddings.position", "embeddings.patches.weight", "embeddings.patches.bias",
    )  # fmt: skip


def test_large_tensors_of_a_container_are_units_without_roots_and_small_ones_stay():
    model = Net()
    model.register_parameter("table", nn.Parameter(torch.empty(LARGE, LARGE)))
    model.register_parameter("token", nn.Parameter(torch.empty(4)))
    model.register_buffer("mask", torch.empty(LARGE, LARGE))
    found = cut(model)
    assert by_name(found)["table"].roots == by_name(found)["mask"].roots == ()
    assert "token" in found.stays


def test_parameters_of_a_parameter_list_are_units_without_roots():
    found = cut(Holder(tables=nn.ParameterList(torch.empty(LARGE, LARGE) for _ in range(2)), block=Block()))
    assert [(unit.name, unit.roots) for unit in found.units] == [("tables.0", ()), ("tables.1", ())]


def test_small_buffers_stay_wherever_they_are_and_large_ones_move_with_their_block():
    model = Net()
    model.blocks[1].register_buffer("scale", torch.empty(4))
    model.blocks[1].register_buffer("mask", torch.empty(LARGE, LARGE))
    found = cut(model)
    assert "blocks.1.scale" in found.stays
    assert "blocks.1.mask" in by_name(found)["blocks.1"].tensors


def test_an_embedding_tied_to_a_head_is_one_unit_with_two_roots():
    model = Net(width=64, vocabulary=8192)
    model.head.weight = model.embed.weight
    found = cut(model)
    assert by_name(found)["embed"].roots == ("embed", "head")
    assert by_name(found)["embed"].tensors == ("embed.weight",)
    assert_each_tensor_is_somewhere_once(model, found)


def test_a_bias_beside_a_tied_weight_does_not_move_with_it():
    model: Any = Holder(embed=nn.Embedding(8192, 64), head=nn.Linear(64, 8192))
    model.head.weight = model.embed.weight
    found = cut(model)
    assert [(unit.roots, unit.tensors) for unit in found.units] == [(("embed", "head"), ("embed.weight",))]
    assert found.stays == ("head.bias",)


def test_a_weight_that_two_blocks_share_is_a_unit_that_both_need():
    model = Net(width=64)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = cut(model)
    shared = by_name(found)["blocks.0.up.weight"]
    assert shared.roots == ("blocks.0", "blocks.2")
    assert by_name(found)["blocks.0"].roots == ("blocks.0",)
    needs = root_needs(found.units)
    assert needs["blocks.2"] == by_name(found)["blocks.2"].nbytes + shared.nbytes
    assert least_window(found.units) == max(needs.values())
    assert_each_tensor_is_somewhere_once(model, found)


def test_a_trifle_that_blocks_share_stays():
    model = Net(width=LARGE)
    for block in model.blocks[1:]:
        block.norm = model.blocks[0].norm
    assert {"blocks.0.norm.weight", "blocks.0.norm.bias"} <= set(cut(model).stays)


def test_a_block_that_hangs_at_several_paths_is_one_unit():
    model = nn.ModuleList([Block()] * 3)
    found = cut(model)
    assert [(unit.name, unit.roots, len(unit.tensors)) for unit in found.units] == [("0", ("0", "1", "2"), 6)]
    assert len(cut(model, limit=found.units[0].nbytes - 1).units) == 3


def test_a_tie_within_a_block_is_counted_once():
    model = Net()
    before = cut(model).units[0].nbytes
    extra = nn.Linear(8, 16)
    extra.weight = model.blocks[0].up.weight
    extra.bias = model.blocks[0].up.bias
    model.blocks[0].extra = extra
    assert cut(model).units[0].nbytes == before


def test_sizes_are_aligned_and_those_of_the_dtype_that_is_loaded():
    model = nn.ModuleList(nn.Linear(10, 30) for _ in range(2))
    assert cut(model).units[0].nbytes == 1280 + 256
    assert cut(model, dtype=torch.bfloat16).units[0].nbytes == 768 + 256


def test_a_buffer_that_no_checkpoint_stores_keeps_its_dtype():
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    model[0].register_buffer("cache", torch.empty(LARGE, LARGE), persistent=False)
    assert cut(model, dtype=torch.bfloat16).units[0].nbytes == 256 + 4 * MIB


def test_compute_is_that_of_matrices_and_looking_up_costs_none():
    model = Net(width=64, vocabulary=8192)
    units = by_name(cut(model))
    assert units["embed"].compute == 0
    assert units["head"].compute == 64 * 8192
    assert units["blocks.0"].compute == 2 * 64 * 128


def test_a_dtype_that_weights_cannot_have_is_an_error():
    with pytest.raises(PlanError, match=r"cast to torch\.int8"):
        cut(Net(), dtype=torch.int8)


def test_a_lazy_module_is_an_error():
    with pytest.raises(PlanError, match="weight has no shape yet"):
        cut(nn.Sequential(nn.LazyLinear(4)))


def test_a_model_without_tensors_has_no_units():
    assert cut(nn.ReLU()) == Cut(units=(), stays=(), stays_nbytes=0)


def test_a_cutter_measures_once_and_cuts_like_cut():
    model = Net()
    cut_within = Cutter(model)
    for limit in (None, 700, 2000):
        assert cut_within(limit) == cut(model, limit=limit)


def test_places_that_differ_within_a_block_open_it():
    model = Net(blocks=2)
    where = {name: "far" if ".up." in name else "home" for name in tensor_groups(model)}
    found = cut_by(model, where, home="home")
    assert by_name(found)["blocks.0.up"].tensors == ("blocks.0.up.weight", "blocks.0.up.bias")


def test_places_that_differ_within_a_leaf_make_two_units_with_one_root():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    where = {"0.weight": "a", "0.bias": "b", "1.weight": "a", "1.bias": "a"}
    assert [(unit.name, unit.roots) for unit in cut_by(model, where, home="c").units] == [
        ("0", ("0",)), ("0.bias", ("0",)), ("1", ("1",)),
    ]  # fmt: skip


def test_a_small_module_that_is_sent_away_is_a_unit():
    where = dict.fromkeys(tensor_groups(Net()), "home") | {"head.weight": "far"}
    assert "head" in by_name(cut_by(Net(), where, home="home"))


def unit(name: str, nbytes: int, *roots: str) -> Unit:
    return Unit(name=name, roots=roots or (name,), tensors=(f"{name}.w",), nbytes=nbytes, compute=1.0)


def test_the_usual_window_holds_any_three_units_in_a_row_round_the_end():
    assert usual_window([unit(str(i), size) for i, size in enumerate([5, 1, 1, 1, 4])]) == 5 + 1 + 4
    assert usual_window([unit("a", 5), unit("b", 1)]) == 6
    assert usual_window([]) == 0


def test_the_usual_window_holds_all_that_one_module_needs():
    small = [unit(name, 1) for name in "abcdef"]
    units = [unit("y", 5, "x"), *small[:3], unit("z", 9, "x"), *small[3:]]
    assert in_a_row(units, 3) == 9 + 1 + 1
    assert usual_window(units) == 5 + 9


@given(data=st.data())
def test_however_a_model_is_tied_and_cut_each_tensor_is_somewhere_once(data):
    model = Net(blocks=data.draw(st.integers(1, 4)), width=data.draw(st.sampled_from([8, 64])))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(data.draw(st.integers(0, 4))):
        one, other = data.draw(st.sampled_from(linears)), data.draw(st.sampled_from(linears))
        one.weight = other.weight
    if data.draw(st.booleans()):
        model.blocks.append(model.blocks[0])
    limit = data.draw(st.none() | st.integers(0, 70_000))
    found = cut(model, limit=limit)
    assert_each_tensor_is_somewhere_once(model, found)
    by_name(found)
    modules = dict(model.named_modules(remove_duplicate=False))
    assert all(root in modules for unit in found.units for root in unit.roots)


def test_cutting_takes_time_in_proportion_to_the_tensors():
    def seconds(blocks: int) -> float:
        model = nn.ModuleList(Block() for _ in range(blocks))
        gc.collect()
        gc.disable()  # it would look through all that other tests have left
        try:
            return min(timeit.repeat(lambda: cut(model), timer=time.process_time, number=1, repeat=3))
        finally:
            gc.enable()

    seconds(100)
    assert seconds(4000) < 32 * seconds(500), "eight times the tensors; a quadratic cut would take 64 times as long"

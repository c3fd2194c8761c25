"""Models that Transformers stores in another form: loaded to every tier, edited, and saved as Transformers would."""

import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import core_model_loading
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Interleave, Transpose, WeightConverter, WeightRenaming

import overspill
from overspill import units
from overspill.errors import CheckpointMismatchError, ConversionError
from overspill.homes import DiskTensor
from overspill.plan import Plan
from overspill.tensors import TensorSpec, tensor_groups
from stored_otherwise import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    ERNIE_VL,
    FORMS,
    LLAMA,
    LLAMA_TIED,
    MIXTRAL,
    NOMIC_BERT,
    QWEN3_VL,
    RESNET,
    STEP_VISION,
    WAV2VEC2,
    Form,
)
from support import aligned, narrow, placed

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLACEMENTS = ["resident", "disk", "mixed"]
State = dict[str, torch.Tensor]
Change = Callable[[Any, Form], None]

pytestmark = [
    pytest.mark.usefixtures("everything_moves"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*"),  # Transformers' own
]


@pytest.fixture(autouse=True, scope="module")
def _no_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is too small to move."""
    for module in (units, sys.modules[Plan.__module__]):  # `overspill.plan` is the verb
        monkeypatch.setattr(module, "SMALL_TENSOR", 1)


# ---------------------------------------------------------------- files


def read_file(path: Path) -> State:
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def read(folder: Path) -> State:
    """The checkpoint as Transformers finds it. The index must be right, and no key may be there twice."""
    if (folder / WHOLE).exists():
        assert not (folder / INDEX).exists()
        return read_file(folder / WHOLE)
    index = json.loads((folder / INDEX).read_text())
    found: State = {}
    shards = {entry.name for entry in folder.glob("*.safetensors")}
    assert shards == set(index["weight_map"].values())
    for shard in sorted(shards):
        content = read_file(folder / shard)
        assert not found.keys() & content.keys(), "a key is stored twice"
        assert {index["weight_map"].get(name) for name in content} == {shard}
        found |= content
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert TensorSpec.of(found[name]) == TensorSpec.of(tensor), name
    assert [name for name, tensor in expected.items() if not torch.equal(bits(found[name]), bits(tensor))] == []


def write_shards(state: State, folder: Path, count: int) -> None:
    """`state` dealt out to files in turn, so that whatever belongs together is spread over all of them."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    weight_map = {key: names[position % count] for position, key in enumerate(state)}
    for name in names:
        part = {key: tensor.contiguous() for key, tensor in state.items() if weight_map[key] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    metadata = {"total_size": sum(tensor.nbytes for tensor in state.values())}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


# ---------------------------------------------------------------- models


def randomized(model: Any) -> Any:
    """No tensor that is all ones or zeros: one that was lost or mixed up would not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var", "e_score_correction_bias")):
                buffer.add_(torch.rand_like(buffer))
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.randint_like(buffer, 4))
    return model


def run(model: Any, form: Form) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**form.inputs)[0]
    return output


def plainly_loaded(form: Form, folder: Path, **options: Any) -> Any:
    """By Transformers, in memory in which kernels round as in any other."""
    return aligned(form.model.from_pretrained(folder, **options)).eval()


def skeleton(form: Form, dtype: torch.dtype | None = None) -> Any:
    """Without values; of `dtype`, but for what the model always has in float32."""
    with overspill.empty_weights():
        model = form.build() if dtype is None else form.model._from_config(form.config(), dtype=dtype)
    if dtype is not None and (islands := model._get_dtype_plan(dtype)):
        pattern = re.compile("|".join(islands))
        for group in tensor_groups(model).values():
            place, values = group.places[0], group.tensor.detach().float()
            if pattern.search(place.path) and group.tensor.is_floating_point():
                setattr(place.module, place.name, values if group.kind == "buffer" else nn.Parameter(values))
    return model.eval()


def loaded(form: Form, folder: Path, placement: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """By us."""
    model = skeleton(form, dtype)
    if placement == "mixed":
        options["plan"] = placed(narrow(overspill.plan(model, {}, device="cpu")), "mixed")
    else:
        options["max_memory"] = {"cpu": "1GB"} if placement == "resident" else {}
    return overspill.load(model, folder, progress=False, **options)


def save(model: Any, folder: Path, **options: Any) -> None:
    """As save_pretrained will, which writes the config too."""
    overspill.save(model, folder, progress=False, **options)
    model.config.save_pretrained(folder)


def disk_homes(model: nn.Module) -> dict[str, DiskTensor]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if isinstance(tensor, DiskTensor)}


def forget_open_files(model: nn.Module) -> None:
    """A file that is read after this must be there under its name."""
    for home in disk_homes(model).values():
        reader: Any = home._overspill_values.reader
        reader.close()


def reads_only_what_is_there(change: Change, form: Form) -> bool:
    """Else it still reads files that a save in place has replaced, which is why they are kept open."""
    return change is not replaced


def files_read(home: DiskTensor) -> set[Path]:
    values = home._overspill_values
    return {span.file.path for span in values.spans} if values.memory is None else set()


# ---------------------------------------------------------------- edits


def untouched(model: Any, form: Form) -> None:
    """Before any forward."""


def after_a_forward(model: Any, form: Form) -> None:
    """One that changes running statistics, where there are any."""
    model.train(form is RESNET)
    run(model, form)
    model.eval()


def worth_an_edit(model: Any) -> list[str]:
    """Of each kind of parameter the last: what is fused, transposed, tied, and a norm."""
    names = [group.name for group in tensor_groups(model).values() if group.kind == "parameter"]
    return list({re.sub(r"\.\d+\.", ".*.", name): name for name in names}.values())


def edited_in_place(model: Any, form: Form) -> None:
    with torch.no_grad():
        for number, name in enumerate(worth_an_edit(model)):
            parameter = model.get_parameter(name)
            if number % 2:
                parameter.mul_(1.25)
            else:
                parameter.data.view(-1)[-1] += 0.5
        for group in tensor_groups(model).values():
            if group.kind == "buffer" and group.persistent:
                group.tensor.add_(1 if not group.tensor.is_floating_point() else 0.25)
        for group in tensor_groups(model).values():
            if group.name.endswith("tid2eid"):  # numbers of experts
                group.tensor.remainder_(4)


def loaded_in_part(model: Any, form: Form) -> None:
    """What a user has of one part of the model, put in by load_state_dict."""
    largest = max((g for g in tensor_groups(model).values() if g.kind == "parameter"), key=lambda g: g.spec.nbytes)
    for place in {id(place.module): place for place in [largest.places[0], *_last_places(model)]}.values():
        state = {name: tensor.detach().clone() for name, tensor in place.module.state_dict().items()}
        place.module.load_state_dict({n: t * 0.75 if t.is_floating_point() else t for n, t in state.items()})


def replaced(model: Any, form: Form) -> None:
    """New parameters at the place of old ones."""
    for number, place in enumerate(_last_places(model)):
        old = getattr(place.module, place.name)
        setattr(place.module, place.name, nn.Parameter(old.detach().clone() * 0.5 + 0.001 * number))


def _last_places(model: Any) -> list[Any]:
    groups = tensor_groups(model)
    return [groups[name].places[0] for name in worth_an_edit(model) if len(groups[name].places) == 1]


CHANGES: list[Change] = [untouched, edited_in_place, after_a_forward, replaced, loaded_in_part]


@dataclasses.dataclass
class Case:
    """A model's checkpoints, in one file and in shards, and what Transformers makes of them."""

    form: Form
    one: Path
    shards: Path
    folder: Path
    tiny: int
    """Bytes of a shard, of which there are then several."""
    _expected: dict[str, tuple[State, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def expected(self, change: Change) -> tuple[State, torch.Tensor]:
        """What Transformers writes of its own resident model after `change`, and what that computes."""
        name = change.__name__
        if name not in self._expected:
            reference = plainly_loaded(self.form, self.shards)
            change(reference, self.form)
            reference.save_pretrained(self.folder / name)
            self._expected[name] = read(self.folder / name), run(reference, self.form)
        return self._expected[name]


_cases: dict[str, Case] = {}


def case_of(form: Form, factory: pytest.TempPathFactory) -> Case:
    """Made once for all tests."""
    if form.name not in _cases:
        torch.manual_seed(0)
        folder = factory.mktemp(form.name)
        model = randomized(form.build()).eval()
        model.save_pretrained(folder / "one")
        tiny = (folder / "one" / WHOLE).stat().st_size // 5
        model.save_pretrained(folder / "shards", max_shard_size=tiny)
        _cases[form.name] = Case(form, folder / "one", folder / "shards", folder, tiny)
    return _cases[form.name]


@pytest.fixture(params=FORMS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(request.param, tmp_path_factory)


@pytest.fixture
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(MIXTRAL, tmp_path_factory)


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---------------------------------------------------------------- the matrix


def test_the_forms_are_what_they_are_said_to_be(case: Case) -> None:
    """So that the matrix cannot become a matrix of models that are stored as they are."""
    stored = read(case.one)
    built = {name: TensorSpec.of(tensor) for name, tensor in skeleton(case.form).state_dict().items()}
    moved = {name for name, tensor in stored.items() if built.get(name) != TensorSpec.of(tensor)}
    made = {spec.numel for name, spec in built.items() if name not in stored}
    converts = bool(moved) and made != {stored[name].numel() for name in moved}
    assert converts == case.form.converts, sorted(moved)[:3]
    assert len(list(case.shards.glob("*.safetensors"))) > 2


MODES = ["one file", "shards", "in place"]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_is_what_transformers_writes_of_the_resident_model(
    case: Case, placement: str, mode: str, tmp_path: Path
) -> None:
    """Each model in each placement and mode; the changes take turns, so that each model has them all."""
    turn = 4 * PLACEMENTS.index(placement) + MODES.index(mode) + FORMS.index(case.form)
    change = CHANGES[turn % len(CHANGES)]
    source = shutil.copytree(case.one if mode == "shards" else case.shards, tmp_path / "source")
    state, output = case.expected(change)
    model = loaded(case.form, source, placement)
    change(model, case.form)

    folder = source if mode == "in place" else tmp_path / "saved"
    save(model, folder, max_shard_size="1GB" if mode == "one file" else case.tiny)

    assert (folder / WHOLE).exists() == (mode == "one file")
    assert_same(read(folder), state)
    if reads_only_what_is_there(change, case.form):
        forget_open_files(model)
    assert torch.equal(run(model, case.form), output), "the model that was saved computes otherwise now"
    if turn % 3 == 0:  # the bits are those of Transformers' own save: once in each mode and in each placement will do
        again = plainly_loaded(case.form, folder)
        assert torch.equal(run(again, case.form), output), "what was saved computes otherwise"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "form", [MIXTRAL, DEEPSEEK_V4, ERNIE_VL, NOMIC_BERT, STEP_VISION, LLAMA_TIED], ids=lambda form: form.name
)
def test_every_change_is_saved_in_place_from_the_disk(
    form: Form, change: Change, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(form, tmp_path_factory)
    source = shutil.copytree(case.shards, tmp_path / "source")
    state, output = case.expected(change)
    model = loaded(form, source, "disk")
    change(model, form)
    for _ in range(2):  # the second save reads what the first has written
        save(model, source, max_shard_size=case.tiny)
        assert_same(read(source), state)
        if reads_only_what_is_there(change, form):
            forget_open_files(model)
    assert torch.equal(run(model, form), output)


def test_the_models_own_form(case: Case, tmp_path: Path) -> None:
    """Names and shapes of state_dict, ties once; read by both libraries, and saved in that form again."""
    form = case.form
    placement = PLACEMENTS[FORMS.index(form) % 3]
    _, output = case.expected(edited_in_place)
    model = loaded(form, case.shards, placement)
    edited_in_place(model, form)
    save(model, tmp_path / "own", original_format=False, max_shard_size=case.tiny)

    found = read(tmp_path / "own")
    reference = plainly_loaded(form, case.shards)
    edited_in_place(reference, form)
    groups = tensor_groups(reference).values()
    assert found.keys() == {next(n for n in g.names if n in found) for g in groups if g.persistent}
    assert_same(found, {name: tensor for name, tensor in reference.state_dict().items() if name in found})

    again = loaded(form, tmp_path / "own", placement)
    assert torch.equal(run(again, form), output)
    assert_same(overspill.state_dict(again, original_format=False), found)
    plain = plainly_loaded(form, tmp_path / "own")
    assert torch.equal(run(plain, form), output)
    plain.save_pretrained(tmp_path / "theirs")
    assert_same(overspill.state_dict(again), read(tmp_path / "theirs"))


@pytest.mark.parametrize("form", [MIXTRAL, NOMIC_BERT, ERNIE_VL], ids=str)
def test_one_form_over_the_other_in_place(form: Form, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    case = case_of(form, tmp_path_factory)
    state, output = case.expected(untouched)
    source = shutil.copytree(case.shards, tmp_path / "source")
    model = loaded(form, source, "disk")
    for original in (False, True, True, False):
        save(model, source, original_format=original, max_shard_size=case.tiny)
        forget_open_files(model)
        assert (read(source).keys() == state.keys()) == original
        assert torch.equal(run(model, form), output)
    model = loaded(form, source, "disk")
    save(model, source, max_shard_size=case.tiny)
    assert read(source).keys() != state.keys(), "it was loaded in its own form, and stays in it"


@pytest.mark.parametrize("form", [MIXTRAL, NOMIC_BERT, ERNIE_VL, STEP_VISION], ids=str)
@pytest.mark.parametrize("made", ["loaded by Transformers", "built"])
def test_a_model_in_memory_that_was_offloaded(
    form: Form, made: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(form, tmp_path_factory)
    model = plainly_loaded(form, case.one) if made == "loaded by Transformers" else randomized(form.build())
    model.save_pretrained(tmp_path / "theirs")
    overspill.offload(model, to="disk", folder=tmp_path / "offload", min_bytes=0)
    assert disk_homes(model)
    save(model, tmp_path / "ours", max_shard_size=case.tiny)
    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    edited_in_place(model, form)
    save(model, tmp_path / "ours")
    overspill.restore(model)
    model.save_pretrained(tmp_path / "theirs")
    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))


@pytest.mark.parametrize("form", [MIXTRAL, NOMIC_BERT, LLAMA_TIED], ids=str)
def test_a_model_that_transformers_has_put_on_disk_and_we_adopt(
    form: Form, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(form, tmp_path_factory)
    state, output = case.expected(edited_in_place)
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    model = form.model.from_pretrained(case.shards, **options).eval()
    overspill.adopt(model)
    edited_in_place(model, form)
    save(model, tmp_path / "saved", max_shard_size=case.tiny)
    assert_same(read(tmp_path / "saved"), state)
    assert torch.equal(run(model, form), output)


def test_a_state_dict_is_what_a_save_would_write(case: Case) -> None:
    state, _ = case.expected(untouched)
    model = loaded(case.form, case.one, PLACEMENTS[(FORMS.index(case.form) + 1) % 3])
    found = overspill.state_dict(model)
    assert {name: TensorSpec.of(tensor) for name, tensor in state.items()} == found.specs()
    assert_same(found, state)


# ---------------------------------------------------------------- loads


GATHERED = [form for form in FORMS if form.gathers]


@pytest.mark.parametrize("form", GATHERED, ids=str)
def test_what_is_fused_or_cut_is_read_where_it_lies(
    form: Form, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, moved: Counter[str]
) -> None:
    case = case_of(form, tmp_path_factory)
    _, output = case.expected(untouched)
    model = loaded(form, case.shards, "disk", offload_folder=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()
    assert moved.total() == 0, "nothing is read before it is needed"
    homes = disk_homes(model)
    assert {file for home in homes.values() for file in files_read(home)} <= {*case.shards.glob("*.safetensors")}
    assert homes.keys() >= {name for name, _ in model.named_parameters()}
    assert torch.equal(run(model, form), output)
    assert moved["disk"] >= sum(span.nbytes for home in homes.values() for span in home._overspill_values.spans) > 0


def test_experts_that_are_spread_over_all_shards(mixtral: Case, tmp_path: Path) -> None:
    write_shards(read(mixtral.one), tmp_path / "spread", 5)
    _, output = mixtral.expected(untouched)
    model = loaded(MIXTRAL, tmp_path / "spread", "disk")
    fused = disk_homes(model)["model.layers.1.mlp.experts.gate_up_proj"]
    assert len(files_read(fused)) == 5
    assert len(fused._overspill_values.spans) == 2 * 4
    assert torch.equal(run(model, MIXTRAL), output)
    save(model, tmp_path / "spread", max_shard_size=mixtral.tiny)
    assert_same(read(tmp_path / "spread"), read(mixtral.one))
    forget_open_files(model)
    assert torch.equal(run(model, MIXTRAL), output)


TRANSPOSED = {
    ERNIE_VL: r"moe\.gate\.weight$",
    STEP_VISION: r"\.[qk]_proj\.(weight|bias)$",
}


@pytest.mark.parametrize("form", TRANSPOSED, ids=str)
def test_what_lies_in_another_order_is_converted_once(
    form: Form, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, moved: Counter[str]
) -> None:
    case = case_of(form, tmp_path_factory)
    _, output = case.expected(untouched)
    model = loaded(form, case.shards, "disk", offload_folder=tmp_path / "offload")
    homes = disk_homes(model)
    converted = {name for name, home in homes.items() if files_read(home) == {*(tmp_path / "offload").rglob("*.bin")}}
    assert converted == {name for name in homes if re.search(TRANSPOSED[form], name)} != set()
    others = {file for name in homes.keys() - converted for file in files_read(homes[name])}
    assert others <= {*case.shards.glob("*.safetensors")}
    assert moved["disk"] == sum(homes[name].nbytes for name in converted), "more was read than was to be converted"
    reference = plainly_loaded(form, case.shards).state_dict()
    assert_same(
        {name: homes[name].detach().clone() for name in converted}, {name: reference[name] for name in converted}
    )
    assert torch.equal(run(model, form), output)


@pytest.mark.parametrize("form", [MIXTRAL, STEP_VISION], ids=str)
def test_a_cast_on_the_way(
    form: Form, placement: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(form, tmp_path_factory)
    model = skeleton(form)
    plan = placed(
        overspill.plan(model, {}, device="cpu", dtype=torch.bfloat16), placement.replace("resident", "device")
    )
    overspill.load(model, case.shards, plan, offload_folder=tmp_path / "offload", progress=False)
    reference = plainly_loaded(form, case.shards, dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path / "theirs")
    save(model, tmp_path / "ours")
    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    assert {tensor.dtype for tensor in read(tmp_path / "ours").values()} == {torch.bfloat16}


def test_files_of_torch_save(mixtral: Case, tmp_path: Path) -> None:
    _, output = mixtral.expected(untouched)
    torch.save(read(mixtral.one), tmp_path / "pytorch_model.bin")
    model = loaded(MIXTRAL, tmp_path / "pytorch_model.bin", "disk", offload_folder=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()
    assert torch.equal(run(model, MIXTRAL), output)
    save(model, tmp_path / "saved", max_shard_size=mixtral.tiny)
    assert_same(read(tmp_path / "saved"), read(mixtral.one))


@pytest.mark.parametrize("form", [MIXTRAL, STEP_VISION, NOMIC_BERT], ids=str)
def test_a_caller_in_inference_mode(form: Form, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    case = case_of(form, tmp_path_factory)
    state, output = case.expected(untouched)
    with torch.inference_mode():
        model = loaded(form, case.shards, "mixed")
        save(model, tmp_path / "saved")
    assert_same(read(tmp_path / "saved"), state)
    assert torch.equal(run(model, form), output)


def assert_round_trip(form: Form, source: Path, folder: Path, placement: str) -> None:
    """We load `source` and save it again just as Transformers does."""
    reference = plainly_loaded(form, source)
    reference.save_pretrained(folder / "theirs")
    model = loaded(form, source, placement)
    assert torch.equal(run(model, form), run(reference, form))
    save(model, folder / "ours")
    assert_same(read(folder / "ours"), read(folder / "theirs"))


def test_transposed_experts_of_old_checkpoints(
    placement: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(QWEN3_VL, tmp_path_factory)
    state, output = case.expected(untouched)
    old = {n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in state.items()}
    assert any(".mlp.experts." in name for name in old)
    write_shards(old, tmp_path / "old", 3)
    shutil.copy(case.one / "config.json", tmp_path / "old")
    assert_round_trip(QWEN3_VL, tmp_path / "old", tmp_path, placement)
    assert torch.equal(run(loaded(QWEN3_VL, tmp_path / "old", placement), QWEN3_VL), output)


def test_names_of_old_checkpoints(placement: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    case = case_of(WAV2VEC2, tmp_path_factory)
    state, _ = case.expected(untouched)
    old = {n.replace("parametrizations.weight.original0", "weight_g"): t for n, t in state.items()}
    old = {n.replace("parametrizations.weight.original1", "weight_v"): t for n, t in old.items()}
    assert old.keys() != state.keys()
    write_shards(old, tmp_path / "old", 1)
    shutil.copy(case.one / "config.json", tmp_path / "old")
    assert_round_trip(WAV2VEC2, tmp_path / "old", tmp_path, placement)
    assert read(tmp_path / "ours").keys() == old.keys(), "it comes back under the names that it had"


def test_a_base_models_checkpoint_in_a_model_with_a_head(placement: str, tmp_path: Path) -> None:
    base = randomized(transformers.LlamaModel(LLAMA_TIED.config()))
    base.save_pretrained(tmp_path / "base")
    assert_round_trip(LLAMA_TIED, tmp_path / "base", tmp_path, placement)


def test_a_checkpoint_with_a_head_in_a_base_model(
    placement: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(NOMIC_BERT, tmp_path_factory)
    body = dataclasses.replace(NOMIC_BERT, model=transformers.NomicBertModel)
    without_head = {n: t for n, t in read(case.one).items() if n.startswith("nomic_bert.")}
    assert len(without_head) > 20
    write_shards(without_head, tmp_path / "body", 2)
    shutil.copy(case.one / "config.json", tmp_path / "body")
    assert_round_trip(body, tmp_path / "body", tmp_path, placement)


def test_of_two_keys_for_one_tensor_the_first_counts_as_with_transformers(mixtral: Case, tmp_path: Path) -> None:
    state = read(mixtral.one)
    key = "model.layers.0.block_sparse_moe.gate.weight"
    state[key.replace("block_sparse_moe", "mlp")] = state[key] + 1
    write_shards(state, tmp_path / "source", 1)
    shutil.copy(mixtral.one / "config.json", tmp_path / "source")
    found = loaded(MIXTRAL, tmp_path / "source", "resident").get_parameter("model.layers.0.mlp.gate.weight")
    expected = plainly_loaded(MIXTRAL, tmp_path / "source").get_parameter("model.layers.0.mlp.gate.weight")
    assert torch.equal(found, expected)


# ---------------------------------------------------------------- conversions that a user has registered


class Halve(core_model_loading.ConversionOps):
    """A conversion that computes."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> Any:
        (values,) = input_dict.values()
        values = values[0] if isinstance(values, list) else values
        return {target_patterns[0]: values * 0.5}

    @property
    def reverse_op(self) -> "Halve":
        return self


class Registered:
    """Conversions for one class of models, until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mapping = sys.modules["transformers.conversion_mapping"]
        assert mapping.get_checkpoint_conversion_mapping("LlamaForCausalLM") is None
        monkeypatch.setattr(
            mapping, "_checkpoint_conversion_mapping_cache", dict(mapping._checkpoint_conversion_mapping_cache)
        )

    def __call__(self, *transforms: Any) -> None:
        register_checkpoint_conversion_mapping("LlamaForCausalLM", list(transforms))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Registered:
    return Registered(monkeypatch)


def halve() -> WeightConverter:
    return WeightConverter("mlp.double_proj.weight", "mlp.down_proj.weight", [Halve()])


def test_a_conversion_that_computes_is_refused_at_load(register: Registered, tmp_path: Path) -> None:
    state = LLAMA.build().state_dict()
    state = {name.replace("down_proj", "double_proj"): tensor for name, tensor in state.items()}
    write_shards(state, tmp_path / "source", 1)
    register(halve())
    model = skeleton(LLAMA)
    with pytest.raises(ConversionError, match=r"(?s)layers\.0\.mlp\.down_proj.*double_proj.*aten\.mul") as raised:
        overspill.load(model, tmp_path / "source", max_memory={}, progress=False)
    assert "save_original_format=False" in str(raised.value)
    assert all(parameter.is_meta for parameter in model.parameters()), "the model was touched"


def test_a_conversion_that_computes_is_refused_at_save(register: Registered, tmp_path: Path) -> None:
    model = LLAMA.build()
    register(halve())
    with pytest.raises(ConversionError, match=r"(?s)aten\.mul.*layers\.0\.mlp\.down_proj.*original_format=False"):
        save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ConversionError, match=r"aten\.mul"):
        overspill.state_dict(model)
    save(model, tmp_path / "saved", original_format=False)
    assert_same(read(tmp_path / "saved"), model.state_dict())


CUSTOM: dict[str, Callable[[], WeightConverter]] = {
    "interleaved": lambda: WeightConverter(
        "mlp.w13.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        [Interleave(dim=0), core_model_loading.Chunk(dim=0)],
    ),
    "transposed": lambda: WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
    "in many parts": lambda: WeightConverter(
        ["mlp.down_a.weight", "mlp.down_b.weight"], "mlp.down_proj.weight", [core_model_loading.Concatenate(dim=1)]
    ),
}


@pytest.mark.parametrize("kind", CUSTOM)
def test_a_conversion_that_a_user_has_registered(
    kind: str, placement: str, register: Registered, tmp_path: Path
) -> None:
    register(CUSTOM[kind](), WeightRenaming("final_norm.weight", "model.norm.weight"))
    randomized(LLAMA.build()).save_pretrained(tmp_path / "source")
    assert_same(read(tmp_path / "source"), load_file(tmp_path / "source" / WHOLE))
    assert "final_norm.weight" in read(tmp_path / "source")
    assert_round_trip(LLAMA, tmp_path / "source", tmp_path, placement)
    model = loaded(LLAMA, tmp_path / "source", placement)
    edited_in_place(model, LLAMA)
    reference = plainly_loaded(LLAMA, tmp_path / "source")
    edited_in_place(reference, LLAMA)
    reference.save_pretrained(tmp_path / "theirs")
    save(model, tmp_path / "source")
    assert_same(read(tmp_path / "source"), read(tmp_path / "theirs"))
    assert torch.equal(run(model, LLAMA), run(reference, LLAMA))


# ---------------------------------------------------------------- what does not fit


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    "absent",
    [EXPERT, EXPERT.replace("w3", "w1"), EXPERT.replace("w3", "w2"), EXPERT.replace(".2.w3", ".3.w2")],
    ids=["up", "gate", "down", "the last one's down"],
)
def test_an_expert_that_is_missing_is_named(absent: str, placement: str, mixtral: Case, tmp_path: Path) -> None:
    state = read(mixtral.one)
    del state[absent]
    write_shards(state, tmp_path / "source", 2)
    with pytest.raises(ConversionError, match=rf"has no {re.escape(absent)}\. ") as raised:
        loaded(MIXTRAL, tmp_path / "source", placement, strict=False)
    assert str(tmp_path / "source") in str(raised.value)


def test_all_of_an_expert_and_all_of_its_layer(mixtral: Case, tmp_path: Path) -> None:
    state = read(mixtral.one)
    last = {name: tensor for name, tensor in state.items() if ".layers.1.block_sparse_moe.experts.3." not in name}
    write_shards(last, tmp_path / "one", 1)
    with pytest.raises(ConversionError, match=r"has no \S+\.experts\.3\.w1\.weight, \S+\.experts\.3\.w3\.weight\. "):
        loaded(MIXTRAL, tmp_path / "one", "disk")
    none = {name: tensor for name, tensor in state.items() if ".layers.1.block_sparse_moe.experts." not in name}
    write_shards(none, tmp_path / "none", 1)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)2 missing.*model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        loaded(MIXTRAL, tmp_path / "none", "disk")


def test_one_expert_too_many(mixtral: Case, tmp_path: Path) -> None:
    state = read(mixtral.one)
    for weight in ("w1", "w2", "w3"):
        name = f"model.layers.0.block_sparse_moe.experts.4.{weight}.weight"
        state[name] = state[name.replace(".4.", ".3.")] + 1
    write_shards(state, tmp_path / "source", 1)
    with pytest.raises(CheckpointMismatchError, match=r"mlp\.experts\.gate_up_proj: \[5, 80, 32\] in .* \[4, 80, 32\]"):
        loaded(MIXTRAL, tmp_path / "source", "disk")


@pytest.mark.parametrize("shape", [(40, 31), (41, 32), (40,)], ids=str)
def test_an_expert_of_another_shape(shape: tuple[int, ...], mixtral: Case, tmp_path: Path) -> None:
    write_shards({**read(mixtral.one), EXPERT: torch.zeros(shape)}, tmp_path / "source", 1)
    with pytest.raises(ConversionError, match=r"(?s)model\.layers\.1\.mlp\.experts\.gate_up_proj.*cannot be stacked"):
        loaded(MIXTRAL, tmp_path / "source", "disk")


def test_experts_of_two_dtypes(mixtral: Case, tmp_path: Path) -> None:
    state = read(mixtral.one)
    write_shards({**state, EXPERT: state[EXPERT].bfloat16()}, tmp_path / "source", 1)
    with pytest.raises(
        ConversionError, match=r"(?s)model\.layers\.1\.mlp\.experts\.gate_up_proj.*bfloat16\[1, 40, 32\]"
    ):
        loaded(MIXTRAL, tmp_path / "source", "disk")


def test_a_stored_projection_of_another_shape(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    state = read(case_of(NOMIC_BERT, tmp_path_factory).one)
    key = next(name for name in state if name.endswith("layers.1.attn.Wqkv.weight"))
    write_shards({**state, key: state[key][:93]}, tmp_path / "source", 1)
    with pytest.raises(CheckpointMismatchError, match=r"q_proj\.weight: \[31, 32\] in the checkpoint, \[32, 32\]"):
        loaded(NOMIC_BERT, tmp_path / "source", "disk")


def test_keys_that_transformers_ignores_and_keys_that_it_does_not(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    case = case_of(LLAMA, tmp_path_factory)
    state, output = case.expected(untouched)
    old = {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_shards(old, tmp_path / "old", 1)
    model = loaded(LLAMA, tmp_path / "old", "disk")
    assert torch.equal(run(model, LLAMA), output)
    save(model, tmp_path / "saved")
    assert_same(read(tmp_path / "saved"), state)

    write_shards({**old, "model.layers.7.mlp.up_proj.weight": torch.ones(4)}, tmp_path / "other", 1)
    with pytest.raises(
        CheckpointMismatchError, match=r"(?s)1 not in the model.*model\.layers\.7\.mlp\.up_proj\.weight"
    ) as e:
        loaded(LLAMA, tmp_path / "other", "disk")
    assert "inv_freq" not in str(e.value)
    assert torch.equal(run(loaded(LLAMA, tmp_path / "other", "disk", strict=False), LLAMA), output)


def test_experts_of_layers_that_the_model_does_not_have(mixtral: Case, tmp_path: Path) -> None:
    state, output = mixtral.expected(untouched)
    extra = {n.replace(".layers.1.", ".layers.9."): t + 1 for n, t in state.items() if ".layers.1.block_sparse" in n}
    write_shards(state | extra, tmp_path / "source", 1)
    with pytest.raises(CheckpointMismatchError, match=r"model\.layers\.9\.block_sparse_moe\.experts\.0\.w1\.weight"):
        loaded(MIXTRAL, tmp_path / "source", "disk")
    assert torch.equal(run(loaded(MIXTRAL, tmp_path / "source", "disk", strict=False), MIXTRAL), output)


# ---------------------------------------------------------------- float32 among bfloat16


@pytest.mark.parametrize(
    ("placement", "source"),
    [("resident", "of float32"), ("disk", "of float32"), ("disk", "of bfloat16"), ("mixed", "of bfloat16")],
)
@pytest.mark.parametrize("form", [DEEPSEEK_V3, DEEPSEEK_V4, ERNIE_VL], ids=str)
def test_what_is_always_float32_stays_so(
    form: Form, source: str, placement: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = case_of(form, tmp_path_factory).shards
    if source == "of bfloat16":
        plainly_loaded(form, folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
        folder = tmp_path / "source"
    reference = plainly_loaded(form, folder, dtype=torch.bfloat16)
    model = loaded(form, folder, placement, dtype=torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kinds == {name: tensor.dtype for name, tensor in reference.state_dict().items()}
    assert {torch.bfloat16, torch.float32} <= {*kinds.values()}
    for change in (untouched, edited_in_place):
        change(model, form)
        change(reference, form)
        assert torch.equal(run(model, form), run(reference, form))
        reference.save_pretrained(tmp_path / "theirs")
        save(model, tmp_path / "ours", max_shard_size=case_of(form, tmp_path_factory).tiny)
        assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))


# ---------------------------------------------------------------- where others fail


def test_a_projection_that_straddles_shards_is_whole_and_there_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Transformers writes it in parts, under one key in several shards, and says nothing."""
    case = case_of(NOMIC_BERT, tmp_path_factory)
    state, _ = case.expected(untouched)
    model = loaded(NOMIC_BERT, case.one, "disk")
    whole = 3 * 32 * 32 * 4
    for size in (whole // 3, whole - 4, whole, whole + 4, 2 * whole):
        save(model, tmp_path / "saved", max_shard_size=size)
        assert_same(read(tmp_path / "saved"), state)


def test_a_save_over_the_shards_that_the_model_reads(mixtral: Case, tmp_path: Path) -> None:
    """Transformers deletes them before it reads them."""
    state, output = mixtral.expected(edited_in_place)
    source = shutil.copytree(mixtral.shards, tmp_path / "source")
    model = loaded(MIXTRAL, source, "disk")
    edited_in_place(model, MIXTRAL)
    for size in (mixtral.tiny * 2, "1GB", mixtral.tiny // 2):
        save(model, source, max_shard_size=size)
        forget_open_files(model)
        assert_same(read(source), state)
        assert torch.equal(run(model, MIXTRAL), output)
    files = {file for home in disk_homes(model).values() for file in files_read(home)}
    assert files <= {*source.glob("*.safetensors")}


def test_two_models_share_an_offload_folder(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """With Transformers the second overwrites the first one's experts."""
    case = case_of(STEP_VISION, tmp_path_factory)
    _, output = case.expected(untouched)
    other = plainly_loaded(STEP_VISION, case.one)
    edited_in_place(other, STEP_VISION)
    other.save_pretrained(tmp_path / "other")
    models = [
        loaded(STEP_VISION, f, "disk", offload_folder=tmp_path / "offload") for f in (case.one, tmp_path / "other")
    ]
    assert len(list((tmp_path / "offload").iterdir())) == 2
    assert torch.equal(run(models[0], STEP_VISION), output)
    assert torch.equal(run(models[1], STEP_VISION), run(other, STEP_VISION))
    for model, source in zip(models, (case.one, tmp_path / "other"), strict=True):
        save(model, tmp_path / "saved")
        assert_same(read(tmp_path / "saved"), read(source))


def test_a_merged_adapter_is_saved(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Transformers drops the merge into weights that are on disk."""
    import peft

    case = case_of(MIXTRAL, tmp_path_factory)
    saved = {}
    for whose, model in (
        ("ours", loaded(MIXTRAL, case.shards, "disk")),
        ("theirs", plainly_loaded(MIXTRAL, case.shards)),
    ):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for number, (name, parameter) in enumerate(sorted(adapted.named_parameters())):
                if "lora_" in name:
                    torch.manual_seed(number)
                    parameter.copy_(torch.randn(parameter.shape))
        merged: Any = adapted.merge_and_unload()
        if whose == "ours":
            save(merged, tmp_path / whose)
        else:
            merged.save_pretrained(tmp_path / whose)
        saved[whose] = read(tmp_path / whose)
    assert_same(saved["ours"], saved["theirs"])
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(saved["ours"][key], read(case.one)[key])


def test_ties_hold_after_a_forward(tmp_path_factory: pytest.TempPathFactory, placement: str, tmp_path: Path) -> None:
    case = case_of(LLAMA_TIED, tmp_path_factory)
    model = loaded(LLAMA_TIED, case.shards, placement)
    run(model, LLAMA_TIED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    save(model, tmp_path / "saved")
    found, before = read(tmp_path / "saved"), read(case.one)
    assert found.keys() == before.keys()
    key = "model.embed_tokens.weight"
    assert torch.equal(found[key], before[key] + 1)

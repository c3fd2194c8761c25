"""Hundreds of megabytes that are stored in another form: a load and a save take a fixed buffer, whatever the form."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overspill.checkpoint import open_checkpoint
from overspill.devices import buffer_of

ALLOWED = 100_000_000  # bytes: chunks, threads, Python's own

COMMON = """
    import json, sys, threading
    from pathlib import Path

    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    import overspill

    SMALL = dict(vocab_size=1000, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)

    from memory_watch import Watch
"""

EXPERTS = """
    def build():
        return MixtralForCausalLM(MixtralConfig(
            **SMALL, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_local_experts=8,
        ))
"""

TRANSPOSED = """
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [
        WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        WeightConverter("mlp.up.weight", "mlp.up_proj.weight", [Transpose(0, 1)]),
    ])

    def build():
        return LlamaForCausalLM(LlamaConfig(**SMALL, hidden_size=1024, intermediate_size=8192, num_hidden_layers=4))
"""

SKELETON = """
    with overspill.empty_weights():
        model = build()
"""

STORED = """
    from overspill.integrations.transformers import reverted
    from overspill.tensors import TensorSpec

    made = reverted(model, {name: TensorSpec.of(tensor) for name, tensor in model.state_dict().items()})
    print(json.dumps({name: part.spec.shape for name, part in made.items()}))
"""

LOAD_AND_SAVE = """
    source, folder = sys.argv[1:]
    with Watch() as load:
        overspill.load(model, source, max_memory={}, offload_folder=folder + "/offload", progress=False)
    growth = {"load": load.growth}
    for name, original_format in (("original", True), ("own", False)):
        with Watch() as save:
            overspill.save(model, folder + "/" + name, original_format=original_format, progress=False)
        growth[name] = save.growth
    print(json.dumps(growth))
"""


def run(*programs: str, arguments: tuple[object, ...] = ()) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, (COMMON, *programs))), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def write_checkpoint(shapes: Mapping[str, list[int]], folder: Path, shards: int = 4) -> int:
    """Files in seconds: the same random numbers over and over. Neighbours are in different files."""
    numbers = torch.randn(5_000_003)
    values = buffer_of(numbers)
    total, weight_map = 0, {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, end = {}, 0
        for name, shape in list(shapes.items())[shard::shards]:
            nbytes = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
            weight_map[name] = file_name
            end += nbytes
        raw = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            total += end
            while end > 0:
                end -= file.write(values[:end])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


@pytest.fixture(params=[EXPERTS, TRANSPOSED], ids=["experts", "transposed"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_load_to_the_disk_and_a_save_take_a_fixed_buffer(model: str, tmp_path: Path) -> None:
    shapes = run(model, SKELETON, STORED)
    (tmp_path / "source").mkdir()
    assert write_checkpoint(shapes, tmp_path / "source") > 4 * ALLOWED - ALLOWED // 2

    growth = run(model, SKELETON, LOAD_AND_SAVE, arguments=(tmp_path / "source", tmp_path))
    print(growth)  # noqa: T201
    assert growth.keys() == {"load", "original", "own"}
    assert max(growth.values()) < ALLOWED

    source, saved = open_checkpoint(tmp_path / "source"), load_file(tmp_path / "original" / "model.safetensors")
    assert saved.keys() == source.keys()
    for shard in sorted({file.path for file in source.files}):
        for name, tensor in load_file(shard).items():
            assert torch.equal(saved[name], tensor), name
    shutil.rmtree(tmp_path)

"""Parts of Diffusers' pipelines, with the same verbs as every other model: a UNet with skips, a transformer."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from support import aligned

diffusers = pytest.importorskip("diffusers")


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


def transformer() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, sample_size=8
    )


def run_unet(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    image, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 32, generator=generator)
    with torch.no_grad():
        result: torch.Tensor = model(image, torch.tensor(3), text).sample
    return result


def run_transformer(model: Any) -> torch.Tensor:
    image = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = model(image, torch.tensor([3]), torch.tensor([7])).sample
    return result


CASES = pytest.mark.parametrize(
    ("build", "run"), [(unet, run_unet), (transformer, run_transformer)], ids=["unet", "transformer"]
)


@CASES
@pytest.mark.parametrize("budget", [{}, {"cpu": "600KiB"}], ids=["disk", "mixed"])
def test_a_part_of_a_pipeline_runs_from_its_checkpoint(
    build: Callable[[], Any],
    run: Callable[[Any], torch.Tensor],
    budget: dict[int | str, int | str],
    tmp_path: Path,
    moved: Counter[str],
) -> None:
    reference: Any = aligned(build()).eval()
    reference.save_pretrained(tmp_path)
    with overspill.empty_weights():
        model = type(reference).from_config(reference.config).eval()
    overspill.load(model, tmp_path, max_memory=budget)
    moved.clear()
    assert torch.equal(run(model), run(reference))
    assert moved["disk"] > 0


@CASES
def test_it_goes_and_comes_back(
    build: Callable[[], Any], run: Callable[[Any], torch.Tensor], tmp_path: Path, moved: Counter[str]
) -> None:
    model: Any = aligned(build()).eval()
    expected = run(model)
    overspill.offload(model, to="disk", folder=tmp_path / "offload")
    moved.clear()
    assert torch.equal(run(model), expected)
    assert moved["disk"] > 0
    overspill.save(model, tmp_path / "saved")
    overspill.restore(model, delete=True)
    assert torch.equal(run(model), expected)
    with overspill.empty_weights():
        again = type(model).from_config(model.config).eval()
    overspill.load(again, tmp_path / "saved", max_memory={})
    assert torch.equal(run(again), expected)

"""The peers, used as their documentation says: Accelerate's and Diffusers' offloading, Transformers' loading."""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload, infer_auto_device_map
from common import Shape
from torch import nn
from transformers import LlamaForCausalLM


def pretrained(folder: Path, shape: Shape, device_map: Mapping[str, int | str] | None = None) -> nn.Module:
    """Transformers' own loading; with several devices in the map, Accelerate dispatches the model."""
    model: nn.Module = LlamaForCausalLM.from_pretrained(
        folder,
        dtype=shape.dtype,
        device_map=None if device_map is None else dict(device_map),
        offload_folder=folder.parent / "offload",
        local_files_only=True,
    )
    return model.eval()


def accelerate_cpu_offload(folder: Path, shape: Shape, device: torch.device) -> nn.Module:
    """All weights in host memory, computing on `device`."""
    model: nn.Module = cpu_offload(pretrained(folder, shape), execution_device=device)
    return model


def accelerate_disk_offload(folder: Path, shape: Shape, offload_folder: Path) -> nn.Module:
    """All weights on disk, in files of Accelerate's own, computing on the CPU."""
    model: nn.Module = disk_offload(pretrained(folder, shape), offload_folder, execution_device=torch.device("cpu"))
    return model


def accelerate_auto(folder: Path, shape: Shape, max_memory: Mapping[int | str, int]) -> nn.Module:
    """Placed by Accelerate's automatic device map within `max_memory`; the disk tier reads the checkpoint itself."""
    skeleton = shape.skeleton()
    blocks = [type(skeleton.get_submodule("model.layers.0")).__name__]
    placed: dict[str, int | str] = infer_auto_device_map(skeleton, dict(max_memory), no_split_module_classes=blocks)
    return pretrained(folder, shape, placed)


def diffusers_group_offload(
    folder: Path, shape: Shape, device: torch.device, offload_folder: Path | None = None
) -> nn.Module:
    """Diffusers' group offloading, leaf by leaf, which is its fastest: from pinned memory on a stream, or from disk.

    An ImportError where Diffusers is not installed.
    """
    from diffusers.hooks import apply_group_offloading

    model = pretrained(folder, shape)
    streams = {} if device.type == "cpu" else {"use_stream": True, "record_stream": True, "non_blocking": True}
    apply_group_offloading(
        model,
        onload_device=device,
        offload_type="leaf_level",
        offload_to_disk_path=None if offload_folder is None else str(offload_folder),
        **streams,
    )
    return model


def offloaded_bytes(model: nn.Module, state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the weights that `model` does not keep on its device: Accelerate shows those on meta."""
    return sum(state[name].nbytes for name, parameter in model.named_parameters() if parameter.is_meta)

"""A Transformers model from its config alone, before there are any weights: enough to plan it."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.checkpoint import CheckpointIndex, open_checkpoint
from overspill.checkpoint.safetensors_header import parse_json_object
from overspill.errors import CheckpointError, CheckpointNotFoundError, PlanError
from overspill.integrations.transformers import converted, keep_islands
from overspill.matching import match
from overspill.skeleton import empty_weights
from overspill.tensors import tensor_groups

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def skeleton_from_config(path: str | os.PathLike[str], dtype: torch.dtype | None) -> nn.Module:
    """The model that the config at `path` describes, without weights.

    A config.json, the folder of one, or a model of the hub, of which the config alone is fetched. No code of a
    checkpoint is run, so a model whose code Transformers does not have is refused.
    """
    config = read_config(path)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise PlanError(
            f"{path} is quantized ({method}), and its packed weights are unpacked by code that overspill does not run. "
            "Load it with Transformers, and pass the model to overspill.plan"
        )
    wanted = dtype or _dtype(config, Path(path))
    model_class = model_class_of(config, path)
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with empty_weights():
        model: nn.Module = build(config, dtype=wanted)
    keep_islands(model, wanted)
    return model.eval()


def read_config(path: str | os.PathLike[str]) -> Any:
    """The config at `path`."""
    from transformers import AutoConfig

    source = _config_file(Path(path))
    try:
        return AutoConfig.from_pretrained(os.fspath(path) if source is None else source, trust_remote_code=False)
    except Exception as error:  # Transformers', the hub's, the network's: all mean that there is no config to be had
        raise _unreadable(path, source, error) from error


def _config_file(path: Path) -> Path | None:
    """The config's file; None for a name that may be a model's of the hub."""
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise CheckpointNotFoundError(
                f"{path} has no config.json, which says what the model is. Give the folder that has it, or the file"
            )
    elif path.is_file():
        file = path
        if file.suffix != ".json":
            raise CheckpointNotFoundError(f"{path} is no config. Give the config.json, or the folder that has it")
    elif _HUB_ID.fullmatch(str(path)) and not path.parent.exists():  # else it is a path, and misspelt
        return None
    else:
        open_checkpoint(path)  # raises, and tells what is there instead
        raise AssertionError(f"{path} came into being")
    if "model_type" not in parse_json_object(file.read_bytes(), file):
        raise CheckpointNotFoundError(
            f'{file} has no "model_type", so it is not the config of a Transformers model. Give the config.json that is'
        )
    return file


def _unreadable(path: str | os.PathLike[str], source: Path | None, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    if source is not None:
        return CheckpointError(f"{source} cannot be read as the config of a model: {reason}")
    try:
        open_checkpoint(path)
    except CheckpointNotFoundError as nothing:
        return CheckpointNotFoundError(f"{nothing}. Nor could a config of the hub with this name be fetched: {reason}")
    raise AssertionError(f"{path} came into being")


def model_class_of(config: Any, path: str | os.PathLike[str]) -> Any:
    """The class of Transformers that the config names, else the general one for configs of its kind."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if isinstance(found := getattr(transformers, name, None), type):
            return found
    for general in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in general._model_mapping:
            return general
    raise PlanError(
        f"{path} is a {config.model_type!r}, and Transformers {transformers.__version__} has no model for it. "
        "Install a version that has"
    )


def _dtype(config: Any, path: Path) -> torch.dtype:
    """The config's, else that of the first stored weights, else torch's."""
    configured = getattr(config, "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    try:
        stored = [tensor.spec.dtype for tensor in open_checkpoint(path).values()]
    except CheckpointError:  # a config alone
        stored = []
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.get_default_dtype())


def check_against_config(index: CheckpointIndex, folder: Path) -> None:
    """Raise CheckpointMismatchError unless the tensors are those of the model that the folder's config describes."""
    model = skeleton_from_config(folder, None)
    match(tensor_groups(model), converted(model, index).tensors, folder, dtype=None, strict=True)

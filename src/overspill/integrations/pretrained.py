"""Transformers' way in and its way out: a model from a config and a checkpoint, `save_pretrained` of a managed one."""

import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from overspill.checkpoint import CheckpointIndex, open_checkpoint
from overspill.errors import CheckpointNotFoundError, PlanError, SaveError
from overspill.homes import DiskTensor
from overspill.integrations.compute_device import teach_classes_of
from overspill.integrations.transformers import is_transformers_model, keep_islands
from overspill.managed import METHODS, WHEN_MANAGED, Method
from overspill.saving import save_model
from overspill.skeleton import empty_weights

_FROM_THE_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_FOR_THE_MODEL = ("attn_implementation", "trust_remote_code")
_FOR_THE_UPLOAD = ("commit_message", "create_pr", "token")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


# ---------------------------------------------------------------- from_pretrained


def skeleton_from_pretrained(
    model_class: Any, path: str | os.PathLike[str], dtype: torch.dtype | str | None, options: Mapping[str, Any]
) -> tuple[nn.Module, CheckpointIndex]:
    """The model that a checkpoint's config describes, without weights, and the checkpoint."""
    options = dict(options)
    _refuse_what_has_no_meaning(options)
    hub = {name: options.pop(name) for name in _FROM_THE_HUB if name in options}
    folder = _local(path, hub)
    generation_config = options.pop("generation_config", None)
    building = {name: options.pop(name) for name in _FOR_THE_MODEL if name in options}
    config, options = _config(model_class, folder, options, building)
    index = open_checkpoint(folder)
    resolved = _dtype(dtype, config, index)
    build = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with empty_weights():
        model = build(config, dtype=resolved, **building, **options)
    keep_islands(model, resolved)
    model.config.name_or_path = os.fspath(path)
    _set_generation_config(model, folder, generation_config)
    return model.eval(), index


def _refuse_what_has_no_meaning(options: Mapping[str, Any]) -> None:
    cures = {
        "device_map": "pass max_memory, or a plan to overspill.load",
        "quantization_config": "load it with Transformers, and pass the model to overspill.offload",
        "gguf_file": "convert it once: load it with Transformers, then overspill.save and model.config.save_pretrained",
        "state_dict": "pass the path of the checkpoint",
        "torch_dtype": "pass dtype",
        "tp_plan": "overspill streams one model through one process",
    }
    for name, cure in cures.items():
        if options.get(name) is not None:
            raise PlanError(f"from_pretrained has no use for {name} here: {cure}")


def _local(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    """The folder of a checkpoint, fetched from the hub if it is not here."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointNotFoundError(f"{folder} is a file. Give the folder that holds it and its config.json")
    name = os.fspath(path)
    if not _HUB_ID.fullmatch(name):
        open_checkpoint(folder)  # raises, and tells what is there instead
    return _downloaded(name, hub)


def _downloaded(name: str, hub: Mapping[str, Any]) -> Path:
    """A model of the hub, in the cache: safetensors, or pickles where it has none."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.py", "*.safetensors"], **hub))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"], **hub)
        return folder
    except Exception as error:  # the hub's, the network's, the disk's: all mean that there is no such checkpoint here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointNotFoundError(
            f"{_nothing_at(name)}. Nor could a model of the hub with this name be fetched: {reason}"
        ) from error


def _nothing_at(name: str) -> str:
    """That there is no such folder, with what has a similar name."""
    try:
        open_checkpoint(name)
    except CheckpointNotFoundError as error:
        return str(error)
    return f"there is no folder {name}"


def _config(
    model_class: Any, folder: Path, options: dict[str, Any], building: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, PreTrainedConfig

    given = options.pop("config", None)
    if isinstance(given, PreTrainedConfig):
        config = given
    else:
        source = folder if given is None else Path(given)
        if not (source / "config.json").is_file():
            raise CheckpointNotFoundError(f"{source} has no config.json. Pass config=, or the folder that has it")
        kind = getattr(model_class, "config_class", None) or AutoConfig
        trust = {"trust_remote_code": building["trust_remote_code"]} if "trust_remote_code" in building else {}
        config, options = kind.from_pretrained(source, return_unused_kwargs=True, **trust, **options)
        options.pop("trust_remote_code", None)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise PlanError(
            f"{folder} is quantized ({method}), and its packed weights are unpacked by code that overspill does not "
            "run. Load it with Transformers, and pass the model to overspill.offload"
        )
    return config, options


def _dtype(dtype: torch.dtype | str | None, config: Any, index: CheckpointIndex) -> torch.dtype:
    """As Transformers chooses: what is asked for, else the config's, else that of the first weights."""
    if isinstance(dtype, str) and dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise PlanError(f"{dtype!r} is no dtype of torch. Pass torch.bfloat16, or its name")
        return named
    if isinstance(dtype, torch.dtype):
        return dtype
    configured = getattr(config, "dtype", None)
    if isinstance(configured, torch.dtype):
        return configured
    stored = (tensor.spec.dtype for tensor in index.values())
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.get_default_dtype())


def _set_generation_config(model: Any, folder: Path, given: Any) -> None:
    if not model.can_generate():
        return
    from transformers import GenerationConfig

    if given is None:
        if (folder / "generation_config.json").is_file():
            given = GenerationConfig.from_pretrained(folder)
        else:
            given = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    model.generation_config = given


# ---------------------------------------------------------------- save_pretrained


def save_pretrained(  # Transformers' own arguments, in their order
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    token: str | bool | None = None,
    save_peft_format: bool = True,
    save_original_format: bool = True,
    **others: Any,
) -> None:
    """What Transformers' method of this name does, with the weights streamed from where they lie."""
    _refuse(state_dict=state_dict, variant=variant, others=others)
    if not is_main_process:
        return
    folder = Path(save_directory)
    token_given = {} if token is None else {"token": token}
    hub = _Upload(model, folder, {**others, **token_given}) if push_to_hub else None
    if getattr(model, "_hf_peft_config_loaded", False):
        _save_adapter(model, folder, save_peft_format=save_peft_format)
    else:
        save_model(
            model,
            folder,
            max_shard_size=max_shard_size,
            original_format=save_original_format,
            metadata=None,
            progress=True,
        )
        _save_the_rest(model, folder)
    if hub is not None:
        hub.send()


def _refuse(*, state_dict: object, variant: str | None, others: dict[str, Any]) -> None:
    if others.pop("safe_serialization", True) is False:
        raise SaveError(
            "safe_serialization=False would write pickles, which run code when they are loaded, and which cannot be "
            "streamed. Leave it out: safetensors files are read by everything that reads pickles"
        )
    if others.pop("distributed_checkpoint", False):
        raise SaveError("distributed_checkpoint has no meaning for a model that one process holds. Leave it out")
    if state_dict is not None:
        raise SaveError(
            "state_dict would be saved instead of the model, whose weights are streamed from where they lie. Leave it "
            "out, or write it with safetensors.torch.save_file"
        )
    if variant is not None:
        raise SaveError(f"variant={variant!r} would need other file names. Save to a folder of its own instead")


def _save_the_rest(model: Any, folder: Path) -> None:
    """Config, generation config and code: Transformers writes them aside, without any weights, and they are moved."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".overspill-") as aside:
        with warnings.catch_warnings():
            # An adopted model has a device map, from which Transformers infers that a whole shard would go to memory.
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            type(model).save_pretrained(model, aside, state_dict={})
        for file in sorted(Path(aside).iterdir()):
            if not file.name.endswith(_WEIGHTS):
                file.replace(folder / file.name)


def _save_adapter(model: Any, folder: Path, *, save_peft_format: bool) -> None:
    """An adapter alone, which is small: Transformers' own way, where what lies on disk is read first."""
    state = model.state_dict()
    adapter = {
        id(value._overspill_values)
        for value in model.get_adapter_state_dict(state_dict=state).values()
        if _on_disk(value)
    }
    read = {
        name: value.clone() if _on_disk(value) and id(value._overspill_values) in adapter else value
        for name, value in state.items()
    }
    type(model).save_pretrained(model, folder, state_dict=read, save_peft_format=save_peft_format)


def _on_disk(tensor: torch.Tensor) -> TypeGuard[DiskTensor]:
    return isinstance(tensor, DiskTensor)


class _Upload:
    """What `push_to_hub=True` adds: a repository, and the files in it that were written since."""

    def __init__(self, model: Any, folder: Path, options: dict[str, Any]) -> None:
        from huggingface_hub import create_repo

        self._model, self._folder = model, folder
        self._how = {name: options[name] for name in _FOR_THE_UPLOAD if name in options}
        for_the_repository = {name: options[name] for name in options if name not in ("commit_message", "create_pr")}
        wanted = for_the_repository.pop("repo_id", folder.name)
        self._repository = create_repo(wanted, exist_ok=True, **for_the_repository).repo_id
        folder.mkdir(parents=True, exist_ok=True)
        self._before = model._get_files_timestamps(folder)

    def send(self) -> None:
        self._model._upload_modified_files(self._folder, self._repository, self._before, **self._how)


METHODS["save_pretrained"] = Method(is_transformers_model, save_pretrained)
WHEN_MANAGED.append(teach_classes_of)

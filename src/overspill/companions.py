"""Files beside a checkpoint's weights, config and tokenizer above all: copied along when the weights are made anew."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch

from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.safetensors_header import parse_json_object
from overspill.errors import SaveError

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ckpt")
_INDEX: Final = ".index.json"
_ASIDE: Final = ".overspill-companions-"
_CONFIG: Final = "config.json"
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")  # Transformers 5, and before


class Companions:
    """Written aside while the weights are, and put in place once those stand. Leaving the `with` block clears up.

    Not copied: hidden files, weights in other formats, and subfolders that hold any, which are checkpoints of their
    own. All but the hidden ones are named in `left_out`.
    """

    def __init__(
        self, source: Path | None, target: Path, dtype: torch.dtype | None, *, weights: Collection[SourceFile]
    ) -> None:
        self._source, self._target = source, target
        self._aside: Path | None = None
        self._config = None if source is None or dtype is None else _config_with(source / _CONFIG, dtype)
        self._files: list[Path] = []
        left_out: list[str] = []
        own = {file.path.name for file in weights}
        for path in sorted(source.iterdir()) if source is not None else ():
            if path.name.startswith(".") or path.name in own or path.name.endswith(_INDEX) or _holds(path, target):
                continue
            files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
            if any(file.name.endswith(_WEIGHTS) for file in files):
                left_out.append(f"{path.name}/" if path.is_dir() else path.name)
            else:
                self._files += files
        if source is not None and target.exists() and source.samefile(target):
            self._files = [source / _CONFIG] if self._config is not None else []  # the others are there
        self.left_out = tuple(left_out)

    @property
    def copied(self) -> tuple[str, ...]:
        """Their paths below the folder."""
        return tuple(str(file.relative_to(self._source)) for file in self._files) if self._source else ()

    def stage(self) -> None:
        """Copy them to a folder of ours in the target, once."""
        if self._aside is not None:
            return
        try:
            for left in self._target.glob(f"{_ASIDE}*"):  # by a save that was killed; nobody else saves here now
                shutil.rmtree(left)
            self._aside = Path(tempfile.mkdtemp(dir=self._target, prefix=_ASIDE))
            for name, file in zip(self.copied, self._files, strict=True):
                copy = self._aside / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            if self._config is not None:
                (self._aside / _CONFIG).write_text(self._config)
        except OSError as error:
            raise SaveError(
                f"cannot copy {error.filename or self._source} to {self._target} ({error.strerror}). "
                "The checkpoint that was there is whole"
            ) from error

    def put_in_place(self) -> None:
        """Give them their names in the target."""
        assert self._aside is not None
        try:
            for name in self.copied:
                (self._target / name).parent.mkdir(parents=True, exist_ok=True)
                (self._aside / name).replace(self._target / name)
        except OSError as error:
            raise SaveError(
                f"the weights in {self._target} stand, but {error.filename} could not be put beside them "
                f"({error.strerror}). Copy it there from {self._source}"
            ) from error

    def __enter__(self) -> "Companions":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)


def _holds(path: Path, target: Path) -> bool:
    """Whether `path` is the target, or has it within: a checkpoint may be saved inside its source."""
    return target.resolve().is_relative_to(path.resolve())


def _config_with(path: Path, dtype: torch.dtype) -> str | None:
    """The config at `path`, if there is one, with its weights' dtype named anew. A quantized model's is refused."""
    if not path.is_file():
        return None
    config = parse_json_object(path.read_bytes(), path)
    if config.get("quantization_config") is not None:
        raise SaveError(
            f"{path} describes a quantized model, whose packed weights mean nothing once they are cast. "
            "Save it without a dtype"
        )
    name = str(dtype).removeprefix("torch.")
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = name
    _rename_dtypes(config, name)
    return json.dumps(config, indent=2) + os.linesep


def _rename_dtypes(config: dict[str, Any], name: str) -> None:
    for key, value in config.items():
        if key in _DTYPE_KEYS:
            config[key] = name
        elif isinstance(value, dict):  # the parts of a model with several have dtypes of their own
            _rename_dtypes(value, name)

"""Which stored tensor belongs to which tensor of the model; everything that does not fit, in one error."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from overspill.checkpoint.conversion import Stored
from overspill.errors import CheckpointMismatchError
from overspill.tensors import TensorGroup, TensorSpec

logger = logging.getLogger(__name__)

_SHOWN = 20  # keys of each kind in the error's text


@dataclass(frozen=True)
class Match:
    """A tensor of the model, where its values are stored, and what it is to be in memory."""

    group: TensorGroup
    stored: Stored
    spec: TensorSpec

    @property
    def is_cast(self) -> bool:
        return self.stored.spec.dtype != self.spec.dtype

    @property
    def is_converted(self) -> bool:
        """Whether its bytes lie in no file as they are to be in memory."""
        return self.is_cast or self.stored.spans is None


def match(
    groups: Mapping[str, TensorGroup],
    stored: Mapping[str, Stored],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    strict: bool,
) -> dict[str, Match]:
    """The stored tensor of each parameter and persistent buffer, by the model's name for it.

    A tied tensor may be stored under any of its names. Raises CheckpointMismatchError for what is missing, unexpected
    or wrongly shaped. With `strict=False` unexpected keys are ignored, and a missing tensor keeps the values that the
    model already holds; one that is only a meta placeholder has none, and is an error all the same.
    """
    matches: dict[str, Match] = {}
    missing, problems = [], []
    for name, group in groups.items():
        found = next((stored[key] for key in group.names if key in stored), None)
        if found is not None and group.persistent:
            problems += _misfit(group, found)
            matches[name] = Match(group, found, group.spec.cast(dtype))
        elif group.tensor.is_meta or (strict and group.persistent):
            missing.append(_missing(group))
    known = {key for group in groups.values() for key in group.names}
    unexpected = [key for key in stored if key not in known]
    if not strict:
        _log_ignored("not in the model, and ignored", unexpected)
        kept = [name for name, group in groups.items() if group.persistent and name not in matches]
        _log_ignored("not in the checkpoint, and as the model has them", [name for name in kept if name not in missing])
        unexpected = []
    if missing or unexpected or problems:
        raise CheckpointMismatchError(_message(folder, missing, unexpected, problems))
    return matches


def _log_ignored(what: str, keys: list[str]) -> None:
    if keys:
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        logger.warning("%d tensors are %s: %s%s", len(keys), what, ", ".join(keys[:_SHOWN]), more)


def _misfit(group: TensorGroup, stored: Stored) -> list[str]:
    ours, theirs = group.spec, stored.spec
    if ours.shape != theirs.shape:
        return [f"{stored.name}: {list(theirs.shape)} in the checkpoint, {list(ours.shape)} in the model"]
    if ours.dtype != theirs.dtype and not (ours.dtype.is_floating_point and theirs.dtype.is_floating_point):
        return [f"{stored.name}: {theirs.dtype} in the checkpoint, {ours.dtype} in the model"]
    return []


def _missing(group: TensorGroup) -> str:
    if group.persistent:
        return group.name
    return f"{group.name} (a buffer that no checkpoint stores: build the skeleton with include_buffers=False)"


def _message(folder: Path, missing: list[str], unexpected: list[str], problems: list[str]) -> str:
    lines = [f"the checkpoint in {folder} does not fit the model; nothing was loaded."]
    for title, keys in (
        ("missing from the checkpoint", missing),
        ("not in the model (strict=False ignores these)", unexpected),
        ("of another shape or kind", problems),
    ):
        if keys:
            more = [f"  … and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
            lines += [f"{len(keys)} {title}:", *(f"  {key}" for key in keys[:_SHOWN]), *more]
    return "\n".join(lines)

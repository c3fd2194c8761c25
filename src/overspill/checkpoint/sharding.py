"""Cuts a list of tensors into the files of a checkpoint, before any of them is written."""

import logging
from collections.abc import Iterable, Mapping

from overspill.checkpoint.writer import FileLayout, by_alignment, lay_out
from overspill.config import format_size
from overspill.tensors import TensorSpec

logger = logging.getLogger(__name__)


def cut_into_files(
    tensors: Iterable[tuple[str, TensorSpec]], limit: int, metadata: Mapping[str, str]
) -> list[FileLayout]:
    """The files, each of at most `limit` bytes of tensors, unless a single tensor is larger: that has its own."""
    parts: list[list[tuple[str, TensorSpec]]] = [[]]
    size = 0
    for name, spec in tensors:
        if spec.nbytes > limit:
            logger.warning(
                "%s takes %s, more than max_shard_size (%s): it gets a file of its own",
                name,
                format_size(spec.nbytes),
                format_size(limit),
            )
        if parts[-1] and size + spec.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append((name, spec))
        size += spec.nbytes
    return [lay_out(by_alignment(part), metadata) for part in parts]

"""What a managed model has on disk: a folder of converted tensors, and bundles of the modules that were offloaded."""

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from overspill.bundles import Bundle, BundleTensor, OffloadRoot
from overspill.checkpoint.index import SourceFile
from overspill.checkpoint.reader import FileReader
from overspill.offload_folder import OffloadFolder


class Files:
    """The files of one model. Temporary ones go with it, those in a user's folder stay until they are to be deleted."""

    def __init__(self, converted: OffloadFolder | None = None) -> None:
        self.reader = FileReader()
        self._converted = [] if converted is None else [converted]
        self._temporary: list[OffloadRoot] = []
        self._roots: dict[Path, OffloadRoot] = {}
        self._bundles: list[tuple[OffloadRoot, Bundle]] = []

    def has(self, folder: str | os.PathLike[str] | None) -> bool:
        """Whether this model writes to `folder` already."""
        return folder is not None and Path(folder).resolve() in self._roots

    def take_over(self, other: "Files") -> None:
        """What `other` has is this model's from now on."""
        self._converted += other._converted
        self._temporary += other._temporary
        self._roots |= other._roots
        self._bundles += other._bundles

    def write(
        self,
        modules: Mapping[str, Sequence[BundleTensor]],
        folder: str | os.PathLike[str] | None,
        *,
        fingerprint: str,
    ) -> list[Bundle]:
        """All of `modules`, or nothing."""
        root = self._root(folder, fingerprint)
        used = {bundle.module for other, bundle in self._bundles if other is root}
        bundles = root.write({_free_name(name, used): tensors for name, tensors in modules.items()})
        self._bundles += [(root, bundle) for bundle in bundles]
        return bundles

    def forget(self, used: Collection[SourceFile], *, delete: bool) -> None:
        """Let go of the bundles that are not in `used`. Of those in a user's folder, `delete` the files too."""
        for root, bundle in [entry for entry in self._bundles if entry[1].file not in used]:
            self._bundles.remove((root, bundle))
            if delete or root in self._temporary:
                root.remove([bundle])
        for path, root in [*self._roots.items()]:
            if not any(other is root for other, _ in self._bundles):
                root.close()
                del self._roots[path]

    def _root(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> OffloadRoot:
        if folder is None:
            if not self._temporary:
                self._temporary.append(OffloadRoot(None, fingerprint=fingerprint))
            return self._temporary[0]
        path = Path(folder).resolve()
        if path not in self._roots:
            self._roots[path] = OffloadRoot(path, fingerprint=fingerprint)
        return self._roots[path]


def _free_name(name: str, used: Collection[str]) -> str:
    """Not that of a bundle that is still read: parts of models have other names than in the whole, and may collide."""
    candidates = (name if count == 1 else f"{name} ({count})" for count in itertools.count(1))
    return next(candidate for candidate in candidates if candidate not in used)

"""What a managed model has on disk: a folder of converted tensors, and bundles of the modules that were offloaded."""

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
        self._converted = converted
        self._temporary: OffloadRoot | None = None
        self._roots: dict[Path, OffloadRoot] = {}
        self._bundles: list[tuple[OffloadRoot, Bundle]] = []

    def write(
        self,
        modules: Mapping[str, Sequence[BundleTensor]],
        folder: str | os.PathLike[str] | None,
        *,
        fingerprint: str,
    ) -> list[Bundle]:
        """All of `modules`, or nothing."""
        root = self._root(folder, fingerprint)
        bundles = root.write(modules)
        self._bundles += [(root, bundle) for bundle in bundles]
        return bundles

    def forget(self, used: Collection[SourceFile], *, delete: bool) -> None:
        """Let go of the bundles that are not in `used`. Of those in a user's folder, `delete` the files too."""
        for root, bundle in [entry for entry in self._bundles if entry[1].file not in used]:
            self._bundles.remove((root, bundle))
            if delete or root is self._temporary:
                root.remove([bundle])
        for path, root in [*self._roots.items()]:
            if not any(other is root for other, _ in self._bundles):
                root.close()
                del self._roots[path]

    def _root(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> OffloadRoot:
        if folder is None:
            if self._temporary is None:
                self._temporary = OffloadRoot(None, fingerprint=fingerprint)
            return self._temporary
        path = Path(folder).resolve()
        if path not in self._roots:
            self._roots[path] = OffloadRoot(path, fingerprint=fingerprint)
        return self._roots[path]

"""Every error that overspill raises on purpose.

OverspillError
├── BudgetError               a size, device or memory budget that cannot be read or met
├── PlanError                 a plan that does not fit the model it is used with
├── StateError                a verb used on a model that is in the wrong state for it
├── OffloadFolderError        the folder for offloaded tensors cannot be used
├── SaveError                 a checkpoint cannot be written where it was to go
└── CheckpointError           anything wrong with the files of a checkpoint
    ├── CheckpointNotFoundError   there is no checkpoint at that path, or a shard of it is missing
    ├── CheckpointCorruptError    the bytes contradict themselves: truncated, overlapping, lying headers
    ├── CheckpointUnsafeError     loading it would run code or leave its folder
    ├── CheckpointMismatchError   its tensors are not the model's: missing, unexpected, wrongly shaped
    ├── ConversionError           it is stored in a form that cannot be followed into the model's, or back
    ├── CheckpointChangedError    a file was modified after the model was loaded from it
    └── CheckpointReadError       the operating system failed to read a range of a file

A message names the culprit (file, tensor, key, device) and the cure. `assert` is for mistakes of our own.
"""


class OverspillError(Exception):
    """The root of the tree: catch this to catch everything that overspill raises on purpose."""


class BudgetError(OverspillError, ValueError):
    """A size, device or memory budget that cannot be read or met."""


class PlanError(OverspillError, ValueError):
    """A plan that does not fit the model it is used with."""


class StateError(OverspillError, RuntimeError):
    """A verb used on a model that is in the wrong state for it."""


class OffloadFolderError(OverspillError, OSError):
    """The folder for offloaded tensors cannot be used."""


class SaveError(OverspillError, OSError):
    """A checkpoint cannot be written where it was to go."""


class CheckpointError(OverspillError):
    """Anything wrong with the files of a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path, or a shard of it is missing."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """The bytes of a file contradict themselves: truncated, overlapping, a header that lies."""


class CheckpointUnsafeError(CheckpointError):
    """Loading the checkpoint would run code or read outside its folder."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint's tensors are not the model's: missing, unexpected or wrongly shaped."""


class ConversionError(CheckpointError, ValueError):
    """The checkpoint is stored in a form that cannot be followed into the model's, or back."""


class CheckpointChangedError(CheckpointError):
    """A file was modified after the model was loaded from it."""


class CheckpointReadError(CheckpointError, OSError):
    """The operating system failed to read a range of a file."""

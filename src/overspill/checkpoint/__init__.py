"""The files of a checkpoint. Knows no nn.Module."""

from overspill.checkpoint.index import CheckpointIndex, SourceFile, StoredTensor, open_checkpoint

__all__ = ["CheckpointIndex", "SourceFile", "StoredTensor", "open_checkpoint"]

"""Checkpoints: running requests on disk, so that a crash costs a few seconds and no answer."""

from draftwood.engine.checkpoint.background import CheckpointStats
from draftwood.engine.checkpoint.maker import Maker
from draftwood.engine.checkpoint.saved import Offset, SavedRequest
from draftwood.engine.checkpoint.store import Checkpoint, CheckpointStore
from draftwood.engine.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointStats",
    "CheckpointStore",
    "CheckpointWriter",
    "Maker",
    "Offset",
    "SavedRequest",
]

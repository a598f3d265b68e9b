"""Packed batches and attention over token trees."""

from draftwood.attention.batch import Batch, Segment, Work, pack
from draftwood.attention.tree_attention import AttentionRule, tree_attention

__all__ = ["AttentionRule", "Batch", "Segment", "Work", "pack", "tree_attention"]

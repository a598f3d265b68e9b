"""Packed batches and attention over token trees."""

from draftwood.attention.batch import Batch, Segment, Work, pack
from draftwood.attention.rule import AttentionRule
from draftwood.attention.tree_attention import tree_attention

__all__ = ["AttentionRule", "Batch", "Segment", "Work", "pack", "tree_attention"]

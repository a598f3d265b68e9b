"""The token tree: the unit of drafting, verification and commit. Pure data, no tensors."""

from draftwood.tree.token_tree import TokenTree

__all__ = ["TokenTree"]

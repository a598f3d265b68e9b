"""Drafters: who proposes the tree."""

"""Torch's functions over nested containers; their module is private in torch 2.13 and imported here only."""

from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_leaves", "tree_map", "tree_unflatten"]

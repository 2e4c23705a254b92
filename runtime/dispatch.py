"""Torch's modes that see every operation. Their names are half private: imported here only."""

from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass"]

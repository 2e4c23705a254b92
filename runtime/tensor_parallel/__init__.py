"""Tensor parallelism derived from the exported graph of any block."""

"""Applies a plan to a PyTorch model, on stock torch.distributed."""

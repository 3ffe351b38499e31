"""Reads and writes slots as torch.distributed.checkpoint's planners request."""

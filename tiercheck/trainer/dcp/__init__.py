"""torch.distributed.checkpoint's planners over slots."""

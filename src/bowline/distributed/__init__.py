"""Ties across processes, on `torch.distributed`: what to shard together, what to check before, and what to keep equal."""

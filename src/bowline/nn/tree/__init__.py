"""The module tree: the place of each tensor, tensors that share memory, and each parameter once."""

"""The module tree: where each tensor hangs, which tensors share memory, and each parameter once."""

"""Tensors in, tensors out, as `torch.nn.functional` is to `torch.nn`: the tied loss and lookup, deferred logits."""

"""Programs of torch.export (`.pt2`): the archive, its stored tensors and its graph, without torch."""

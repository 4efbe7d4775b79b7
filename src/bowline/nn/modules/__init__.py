"""Modules for tied models: heads, the tied lookup, the loss, a quantised table, the split of the gradient."""

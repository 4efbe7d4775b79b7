"""Keeps ties while a model is converted, loaded and trained: `keep_tied` and `TieGuard`."""

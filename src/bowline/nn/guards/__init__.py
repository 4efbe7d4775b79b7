"""Keeping ties while people convert, load and train a model: `keep_tied` and `TieGuard`."""

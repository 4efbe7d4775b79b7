"""Ties between live modules: found, declared, checked, made, undone and kept."""

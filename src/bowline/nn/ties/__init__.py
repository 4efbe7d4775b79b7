"""Ties between live modules: find, declare, check, make and undo them."""

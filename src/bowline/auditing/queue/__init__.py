"""Audits of many checkpoints: a list of places, a process for each, and a file of results to continue."""

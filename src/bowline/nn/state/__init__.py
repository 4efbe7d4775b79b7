"""Loads and saves a model's state without losing an end of a tie or leaving a half-written file."""

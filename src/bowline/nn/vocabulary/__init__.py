"""The vocabulary of a live model: finds its axes, and resizes them all at once."""

"""The vocabulary of a live model: its axes found, and made longer or shorter all at once."""

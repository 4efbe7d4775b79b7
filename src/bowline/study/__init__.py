"""Questions about the tie, answered by measurement."""

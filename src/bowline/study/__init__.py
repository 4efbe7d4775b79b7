"""Questions about weight tying, answered by measurement."""

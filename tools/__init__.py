"""Scripts that make the data and sweep over it; not part of the package."""

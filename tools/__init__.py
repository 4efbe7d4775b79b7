"""Scripts that generate the package's data and check it against transformers; not part of the package."""

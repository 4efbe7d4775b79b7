"""Facts about model classes, read from tiny instances under the running version of transformers."""

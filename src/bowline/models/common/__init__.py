"""Code that all families share: configuration, loading and saving, attention, caches, outputs, tokenizer."""

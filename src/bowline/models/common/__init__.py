"""What the families share: configuration, loading and saving, attention, caches, outputs, the tokenizer."""

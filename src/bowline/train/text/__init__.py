"""From plain text to batches: corpus, tokenizer, packed tokens, and the objectives that make batches of them."""

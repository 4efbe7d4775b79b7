"""Plain text to batches: the corpus, its tokenizer, packed tokens, and the objectives that cut them into batches."""

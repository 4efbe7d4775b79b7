"""The config of a live model: `tie_word_embeddings` at every level, and the scale that some families tie to it."""

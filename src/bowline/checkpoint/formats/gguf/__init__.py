"""Reads GGUF, the format of llama.cpp: the header, its arrays of texts on demand, and the rows of tables."""

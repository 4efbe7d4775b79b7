"""Loads tiny checkpoints in vLLM, llama.cpp and mlx-lm, and holds the audit's predictions against what they did."""

"""Merges PEFT adapters into the tensors of their base, and extracts them; no torch."""

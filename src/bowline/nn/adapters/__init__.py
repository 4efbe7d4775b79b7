"""Adapters of a live model with a tie: merging LoRA into the base."""

"""Adapters of a live model that has a tie: LoRA, merged into the base."""

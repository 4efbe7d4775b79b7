"""What a PEFT adapter makes of the tensors of its base; no torch."""

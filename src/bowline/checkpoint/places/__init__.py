"""Access to a checkpoint's bytes, on this machine or on the Hugging Face Hub."""

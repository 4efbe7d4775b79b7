"""Where a checkpoint's bytes are: on this machine, or on the Hugging Face Hub."""

"""The training loop for any module with `labels`: the trainer, its checkpoints, log, optimizer and processes."""

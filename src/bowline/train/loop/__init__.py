"""The training loop for any module that takes `labels`: trainer, checkpoints, log and optimizer."""

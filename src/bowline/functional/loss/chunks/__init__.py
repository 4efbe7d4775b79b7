"""What `chunked` does: one pass over the tokens of a job, on a CPU or a GPU, without the logits of them all."""

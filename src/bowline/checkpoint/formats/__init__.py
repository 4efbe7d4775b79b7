"""What a checkpoint's bytes mean: safetensors, PyTorch's pickles (never executed), strict JSON, dtypes."""

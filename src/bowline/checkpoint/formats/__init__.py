"""The file formats of checkpoints: safetensors, PyTorch's pickles (never executed), strict JSON, and dtypes."""

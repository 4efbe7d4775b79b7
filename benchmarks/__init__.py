"""Speed and memory, shown as ratios against named peers in the same run: `python -m benchmarks NAME`."""

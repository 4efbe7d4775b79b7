"""What the functions run on: Triton, huge pages, sums of rows, half precision where the processor has none."""

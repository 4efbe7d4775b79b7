"""Low-level support: Triton, huge pages, sums of rows, half-precision products on CPUs without them."""

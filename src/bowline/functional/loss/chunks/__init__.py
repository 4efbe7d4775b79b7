"""The chunk loops of the backend "chunked", on a CPU or a GPU, which never hold the logits of all tokens.

- `loss_job`: the input and the result of a loop; `chunk_loop` picks the loop; `chunk_size` sets its sizes.
- `cpu_loop`: chunks of tokens on a CPU, by `transposed_logits` or, for options that need it, `row_major`.
- `gpu_loop`: chunks of tokens on a GPU; `vocabulary_blocks`: blocks of the vocabulary, if chunks exceed the budget.
- `softmax_formulas`, `softmax`: from logits to losses and gradients; `triton_row_kernels`, `triton_block_kernels` and
  `label_gradient` do it on a GPU.
- `matmul`, `cpu_matmul`, `gpu_matmul`: the three products; `matmul_choice` times the libraries of a CPU.
"""

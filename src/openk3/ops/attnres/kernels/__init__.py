"""AttnRes on the GPU: `one_query` and `bank` are kernels, `rows` what they share, `operator` calls them."""

"""Attention of MLA on the GPU: `forward` and `backward` are kernels, `blocks` deals out, `operator` calls."""

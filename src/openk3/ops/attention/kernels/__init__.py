"""Attention of MLA on the GPU: `operator` calls the kernels of the other modules.

`forward` and `backward` are plain Triton and the twins of those for Hopper; `blocks` says who does what.
"""

"""Attention of MLA on the GPU: `forward` and `backward` are kernels, `blocks` who does what, `operator` calls.
"""

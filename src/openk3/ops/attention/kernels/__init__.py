"""Attention of MLA on the GPU; only its operators import this, which needs Triton.

`operator` calls `forward` and `backward`, plain Triton and the twins of those for Hopper; `blocks` says who
does what there. `paged_operator` calls `paged`, and its twin `paged_hopper`, for decoding.
"""

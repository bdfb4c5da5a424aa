"""What a card gives a program: the one place that the tables of tiles ask. Imports no triton.

Cards fall into three classes by the shared memory that a program may have: 99 KB (sm_86, sm_89, sm_120),
163 KB (sm_80), 227 KB (sm_90, sm_100). `tools/compile_kernels.py` compiles every kernel for cards of each and
holds what it takes against its class.
"""

from __future__ import annotations

import torch

LARGE = 227


def shared_kilobytes(x: torch.Tensor) -> int:
    """KB of shared memory that a program may have where x lies; the largest class off CUDA."""
    if not x.is_cuda:
        return LARGE
    properties = torch.cuda.get_device_properties(x.device)
    return (
        int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)) // 1024
    )


def generation(x: torch.Tensor) -> int:
    """The major number of the compute capability where x lies, 0 off CUDA."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0

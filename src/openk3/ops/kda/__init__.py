"""Kimi Delta Attention: the recurrence with per-channel decay and a delta-rule write (report §2.1.1 eq. 1-6).

    S <- diag(exp g) S;    S <- S + beta k (v - S^T k)^T;    o = scale * S^T q

shown with S as [K, V]; stored states are V-first. `gated_kda` starts from raw projections and is what a model
calls; `kda` and `kda_step` are the recurrence alone; `kda_decode` and `kda_verify` take tokens through all of
a layer but its projections, on states in pools; `kda_fragments` and `kda_reverse_fragments` say what a slice
of tokens does to any state.
"""

from __future__ import annotations

# First of all: decoding takes `kda_step` from here.
from openk3.ops.kda.recurrence import kda, kda_step  # isort: split

from openk3.ops.dispatch import Kernel
from openk3.ops.kda.decoding import DraftWindow, MixerWeights, kda_decode, kda_verify
from openk3.ops.kda.fragments import KERNEL as FRAGMENTS_KERNEL
from openk3.ops.kda.fragments import Fragments, kda_fragments, kda_reverse_fragments
from openk3.ops.kda.gated import CHECKPOINT_GRID, gated_kda

__all__ = [
    "CHECKPOINT_GRID",
    "DraftWindow",
    "Fragments",
    "MixerWeights",
    "gated_kda",
    "kda",
    "kda_decode",
    "kda_fragments",
    "kda_reverse_fragments",
    "kda_step",
    "kda_verify",
]

_COMPILES_FOR = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")

KERNELS = (
    Kernel(
        "gated_kda",
        takes="K = V in {64, 128}, the bounded gate, bf16 or fp32; gradients: bf16",
        checked_on="H200 (sm_90)",
        compiles_for=_COMPILES_FOR,
    ),
    Kernel(
        "kda_decode",
        takes="K = V in {64, 128}, 4 taps, either gate",
        checked_on="H200 (sm_90)",
        compiles_for=_COMPILES_FOR,
    ),
    Kernel(
        "kda_verify",
        takes="as kda_decode, windows of 1 to 8 tokens",
        checked_on="H200 (sm_90)",
        compiles_for=_COMPILES_FOR,
    ),
    Kernel("gated_kda", takes="the same without a bound (Kimi Linear)", checked_on="H200 (sm_90)"),
    FRAGMENTS_KERNEL,
)

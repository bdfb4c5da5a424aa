"""The parts of a training step, and how a piece of work is known to belong to one.

What surrounds the launch of a kernel decides, innermost first: names of functions (`openk3.ops.traces`) and
of modules (`openk3.train.profile.scopes`). Where one function does several parts' work, names of kernels do.
Knows names only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from openk3.ops.traces import PREFIX

MODULE = PREFIX + "part: "
"""What a scope around a module begins with; the part follows."""

EMBEDDING = "embedding"
ATTNRES = "attention residuals"
NORMS = "norms"
RESIDUAL = "residual sums"
KDA_PROJECTIONS = "KDA projections"
KDA_CONVOLUTION = "KDA convolution"
KDA_RECURRENCE = "KDA recurrence"
KDA_NORM = "KDA gated norm"
MLA_PROJECTIONS = "MLA projections"
MLA_ATTENTION = "MLA attention"
DENSE = "dense feed-forward"
ROUTER = "router and latent"
EXPERT_DISPATCH = "expert dispatch"
EXPERT_PRODUCTS = "expert products"
EXPERT_COMBINE = "expert combine"
SHARED = "shared experts"
MTP = "MTP projection"
HEAD = "head and cross-entropy"
GRADIENT_SUMS = "gradient sums"
CLIPPING = "gradient norm"
NEWTON_SCHULZ = "Newton-Schulz"
UPDATE = "optimizer update"
QK_CLIP = "QK-clip"
BALANCE = "balance biases"
COPIES = "copies"
OTHER = "other"

MODEL_PARTS = (
    EMBEDDING, ATTNRES, NORMS, RESIDUAL, KDA_PROJECTIONS, KDA_CONVOLUTION, KDA_RECURRENCE, KDA_NORM,
    MLA_PROJECTIONS, MLA_ATTENTION, DENSE, ROUTER, EXPERT_DISPATCH, EXPERT_PRODUCTS, EXPERT_COMBINE, SHARED,
    MTP, HEAD,
)  # fmt: skip
STEP_PARTS = (GRADIENT_SUMS, CLIPPING, NEWTON_SCHULZ, UPDATE, QK_CLIP, BALANCE, COPIES, OTHER)
PARTS = MODEL_PARTS + STEP_PARTS

FUNCTIONS = {
    "attnres_add_mix_norm": ATTNRES,
    "attnres_mix": ATTNRES,
    "attnres_bank_mixes": ATTNRES,
    "rms_norm": NORMS,
    "short_conv": KDA_CONVOLUTION,
    "gated_kda": KDA_RECURRENCE,
    "gated_rms_norm": KDA_NORM,
    "attention": MLA_ATTENTION,
    "gated_mla": MLA_ATTENTION,
    "route": ROUTER,
    "route_and_project": ROUTER,
    "plan": EXPERT_DISPATCH,
    "expert_ffn": EXPERT_PRODUCTS,
    "linear_cross_entropy": HEAD,
    "global_norm": CLIPPING,
    "Optimizer.step": UPDATE,
    "Optimizer.qk_clip": QK_CLIP,
    "update_biases": BALANCE,
    "widen_gradients": GRADIENT_SUMS,
}
"""Part by a function's qualified name. A function that is not here belongs to what calls it."""

WITHIN: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    EXPERT_PRODUCTS: (
        (re.compile(r"combine|embedding_?bag", re.IGNORECASE), EXPERT_COMBINE),
        (re.compile(r"gather|permute|index_?select", re.IGNORECASE), EXPERT_DISPATCH),
    ),
    UPDATE: ((re.compile(r"orthogonalize|iterate_"), NEWTON_SCHULZ),),
}
"""Of a function with several parts: which one, by names of kernels or of what is around them in it."""

ACCUMULATION = "AccumulateGrad"


def part_of(work: str, around: Sequence[str], *, copy: bool = False) -> str:
    """The part of a kernel or operator called `work`.

    Args:
        around: names of operators and scopes around its launch, innermost first; from a backward operator on
            those around its forward.
        copy: it is a copy between host and device, or a fill; counted as such where nothing else is known.
    """
    inside: list[str] = [work]
    found: str | None = None
    names: list[str] = []
    for name in around:
        if name.startswith(MODULE):
            return _refined(found, names) if found else name.removeprefix(MODULE)
        inside.append(name)
        if (part := FUNCTIONS.get(name.removeprefix(PREFIX))) and name.startswith(PREFIX):
            found, names = part, list(inside)  # the outermost function of a module has it
    if found:
        return _refined(found, names)
    if any(ACCUMULATION in name for name in inside):
        return GRADIENT_SUMS
    return COPIES if copy else OTHER


def _refined(part: str, names: Sequence[str]) -> str:
    for pattern, inner in WITHIN.get(part, ()):
        if any(pattern.search(name) for name in names):
            return inner
    return part

"""A model's modules by their parts in a profiler's trace, while a context lasts; the model is not changed.

Functions name themselves (`openk3.ops.traces`); a module's scope says whose the rest is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from openk3.model import K3
from openk3.model.decoder import DecoderLayer
from openk3.model.ffn import GatedFfn
from openk3.model.kda import KdaAttention
from openk3.model.layers import Embedding, RmsNorm
from openk3.model.mla import MlaAttention
from openk3.model.moe import LatentMoe, Router
from openk3.model.mtp import MtpBlock, MtpLayer
from openk3.train.profile import parts

BY_CLASS: dict[type[nn.Module], str] = {
    Embedding: parts.EMBEDDING,
    RmsNorm: parts.NORMS,
    DecoderLayer: parts.RESIDUAL,
    MtpBlock: parts.RESIDUAL,
    MtpLayer: parts.MTP,
    KdaAttention: parts.KDA_PROJECTIONS,
    MlaAttention: parts.MLA_PROJECTIONS,
    Router: parts.ROUTER,
    LatentMoe: parts.ROUTER,
    GatedFfn: parts.DENSE,
}


def part_of_module(name: str, module: nn.Module) -> str | None:
    """Whose the work of `module` is that no function or module in it has; None: what calls it has it."""
    if isinstance(module, GatedFfn) and name.endswith("shared_experts"):
        return parts.SHARED
    return BY_CLASS.get(type(module))


@contextmanager
def named_modules(model: K3) -> Iterator[None]:
    """Calls of the model's modules open scopes for a profiler."""
    open_: list[Any] = []

    def enter(part: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            scope = record_function(parts.MODULE + part)
            scope.__enter__()  # type: ignore[no-untyped-call]
            open_.append(scope)

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        if (part := part_of_module(name, module)) is not None:
            handles.append(module.register_forward_pre_hook(enter(part)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""The peer of the KDA benchmarks, fla 0.6.0: its own Triton kernels, tuned where they run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from kda_inputs import Chunkwise, Tokens

os.environ["FLA_FLASH_KDA"] = "0"  # or it hands inference to FlashKDA where that is installed

Tensor = torch.Tensor
RAW: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


def compile_candidates_together(workers: int = 16) -> None:
    """Have Triton compile all configurations of an autotuned kernel at once before it times them one by one.

    The peer tries dozens for each number of heads; which one wins, and its time, stay the same.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    choose = Autotuner.prune_configs

    def choose_and_compile(self: Any, options: dict[str, Any]) -> list[Any]:
        candidates: list[Any] = choose(self, options)
        if isinstance(self.fn, JITFunction):
            with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for candidate in candidates:
                    # A candidate that does not compile is the tuner's to discard.
                    with contextlib.suppress(Exception):
                        self.fn.run(**{**self.nargs, **options, **candidate.all_kwargs(), "warmup": True})
        return candidates

    Autotuner.prune_configs = choose_and_compile


def chunkwise(x: Chunkwise, *, final_state: bool = False) -> tuple[Tensor, Tensor | None]:
    """o `[T, H, V]` and, if asked for, the states `[N, H, V, K]`, by `chunk_kda`."""
    from fla.ops.kda import chunk_kda

    packed = {} if x.is_one_sequence else {"cu_seqlens": x.long_offsets, "cu_seqlens_cpu": x.host_offsets}
    o, state = chunk_kda(
        *(part[None] for part in (x.q, x.k, x.v, x.z, x.b)),
        A_log=x.A_log,
        dt_bias=x.dt_bias.flatten(),
        initial_state=x.initial_state,
        output_final_state=final_state,
        safe_gate=True,
        lower_bound=x.lower_bound,
        **packed,
        **RAW,
    )
    return o[0], state


def decode(x: Tokens, state: Tensor) -> Callable[[], object]:
    """One token of each of N sequences, states `[N, H, V, K]` moved on in place; no conv, no output norm."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    parts = [part.unsqueeze(1) for part in (x.q, x.k, x.v, x.z, x.b)]  # [N, 1, ...]
    out = torch.empty_like(parts[2])
    return lambda: fused_recurrent_kda_fwd(
        *parts,
        x.A_log,
        x.dt_bias.flatten(),
        initial_state=state,
        inplace_final_state=True,
        lower_bound=x.lower_bound,
        out=out,
        **RAW,
    )


def verify(x: Tokens, window: int, states: Tensor, accepted: Tensor) -> Callable[[], object]:
    """`window` tokens of each sequence; a state is kept after every one: `states` `[N * window, H, V, K]`."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    parts = [part[None] for part in (x.q, x.k, x.v, x.z, x.b)]  # [1, N * window, ...]
    out = torch.empty_like(parts[2])
    slots = torch.arange(len(states), device="cuda", dtype=torch.int32).view(-1, window)
    offsets = torch.arange(0, len(states) + 1, window, device="cuda")
    return lambda: fused_recurrent_kda_fwd(
        *parts,
        x.A_log,
        x.dt_bias.flatten(),
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=offsets,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        lower_bound=x.lower_bound,
        out=out,
        **RAW,
    )

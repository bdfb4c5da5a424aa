"""Attention Residuals: attention over depth, in place of the residual sum (report §2.2 eq. 8-10).

The operator mixes the sources that a sublayer sees. Which sources those are (the bank of finished blocks and
the running prefix) is the model's protocol; eq. 9 and eq. 10 differ in nothing else. It comes alone, with the
addition before it and the norm behind it, and in two phases: all queries of a block against the bank at once,
then each query's mix with the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.precision import own_dtypes

__all__ = ["BankMix", "SublayerInput", "attnres_add_mix_norm", "attnres_bank_mixes", "attnres_mix"]

KERNELS = tuple(
    Kernel(
        function,
        takes=f"even widths to 16,384, up to 32 sources; not float64{more}",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    )
    for function, more in (
        ("attnres_mix", ""),
        ("attnres_add_mix_norm", ""),
        ("attnres_bank_mixes", "; up to 32 queries, without gradient"),
    )
)

Tensor = torch.Tensor


class BankMix(NamedTuple):
    """What a query makes of the bank alone: stands for the bank where the prefix is known.

    values: `[T, d]` the mix. lse: `[T]`, at least fp32, the log of the sum of exponentials of its scores.
    """

    values: Tensor
    lse: Tensor


class SublayerInput(NamedTuple):
    """normed: `[T, d]`, or None without a norm. prefix: `[T, d]` after the addition. mixed: `[T, d]`, or
    None. weights: `[T, S]`, at least fp32, the softmax, without gradient; or None. bank: its rows as they
    were given, none for a `BankMix`; a later reader that takes these has its gradients to them added here."""

    normed: Tensor | None
    prefix: Tensor
    mixed: Tensor | None
    weights: Tensor | None = None
    bank: tuple[Tensor, ...] = ()


@own_dtypes
def attnres_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    *,
    eps: float = 1e-5,
    return_weights: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """h = sum_i a_i V_i with a = softmax_i(query . RMSNorm(V_i; key_gain)), for each token on its own.

    Scores, softmax and sum are computed in at least fp32. A zero query gives the plain average.

    Args:
        sources: S >= 1 tensors `[T, d]` of one floating dtype and device: the bank's rows, then the prefix.
        query: pseudo-query `[d]`, the layer's own parameter (`*_res_proj.weight` of the release).
        key_gain: gain `[d]` of the keys' RMSNorm (`*_res_norm.weight`).
        eps: of that norm; positive.
        return_weights: also return the softmax.
        implementation: force "reference", "eager" or "triton" (d even and at most 16,384, S at most 32, not
            float64); by default the fastest that takes the inputs on their device.

    Returns:
        h `[T, d]` in the sources' dtype, and the weights `[T, S]` in at least fp32, without gradient (None
        unless asked for). The backward keeps the given sources and two scalars per token and source.

    Raises:
        InvalidInput: no source, or shapes, dtypes or devices that do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "attnres_mix"
    _check_sources(name, sources)
    _check_vectors(name, sources[0], query=query, key_gain=key_gain)
    _check_eps(name, eps=eps)
    chosen = _choose(name, sources, implementation, (query, key_gain))
    if chosen == "triton":
        from openk3.ops.attnres.kernels.operator import attnres

        *bank, last = sources
        h, _, scalars, _ = attnres(bank, last, None, query, key_gain, None, None, eps, eps, True)
        return h, scalars[..., 0].detach().softmax(-1) if return_weights else None
    if chosen == "reference":
        from openk3.ops.attnres.reference import attnres_mix as run
    else:
        from openk3.ops.attnres.eager import attnres_mix as run
    h, weights = run(sources, query, key_gain, eps)
    return h, weights if return_weights else None


@own_dtypes
def attnres_add_mix_norm(
    bank: Sequence[Tensor] | BankMix,
    prefix: Tensor,
    output: Tensor | None,
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    *,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
    return_mixed: bool = False,
    return_weights: bool = False,
    implementation: Implementation | None = None,
) -> SublayerInput:
    """What stands between two sublayers: prefix + output, the mix of bank and prefix, and its RMSNorm.

    Args:
        bank: rows `[T, d]` of finished blocks, the embedding first; or this query's mix of them.
        prefix: `[T, d]`, the running sum of the current block.
        output: `[T, d]` of the sublayer before, to be added to the prefix; None if it is in it.
        query, key_gain, eps: as in `attnres_mix`.
        norm_gain: `[d]`, of the sublayer's input norm; None for no norm.
        norm_eps: of that norm; positive.
        return_mixed: also return the mix itself, as is done without a norm.
        return_weights: also return the softmax over all sources, for which the bank must be rows.
        implementation: as in `attnres_mix`.

    Returns:
        The norm, the new prefix in its dtype, the mix, the weights, and the bank's rows, which a chain of
        readers hands on: the kernel's backward adds what reaches them and the prefix through later ones, for
        which autograd would need passes of its own. The kernel's norm reads the mix before it is rounded. All
        but the weights are differentiable; the backward keeps the bank, the new prefix and two scalars per
        token and source.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "attnres_add_mix_norm"
    rows, lse = ([bank.values], bank.lse) if isinstance(bank, BankMix) else (list(bank), None)
    given = [prefix] if output is None else [output, prefix]
    _check_sources(name, [*rows, *given])
    gains = {} if norm_gain is None else {"norm_gain": norm_gain}
    _check_vectors(name, prefix, query=query, key_gain=key_gain, **gains)
    _check_eps(name, eps=eps, norm_eps=norm_eps)
    if lse is not None:
        check_floating(name, prefix=prefix, lse=lse)
        if lse.shape != prefix.shape[:1]:
            raise InvalidInput(f"{name}: lse is {tuple(lse.shape)}, must be ({len(prefix)},)")
        if return_weights:
            raise InvalidInput(f"{name}: a mix of the bank does not know the weights of its rows")
    want_mix = return_mixed or norm_gain is None
    arguments = (rows, prefix, output, query, key_gain, norm_gain, lse, eps, norm_eps)
    chosen = _choose(name, [*rows, *given], implementation, (query, key_gain, *gains.values()))
    if chosen == "triton":
        from openk3.ops.attnres.kernels.operator import attnres

        mixed, normed, scalars, passed = attnres(*arguments, want_mix)
        return SublayerInput(
            None if norm_gain is None else normed,
            passed[-1],
            mixed if want_mix else None,
            scalars[..., 0].detach().softmax(-1) if return_weights else None,
            passed[:-1] if lse is None else (),
        )
    if chosen == "reference":
        from openk3.ops.attnres.reference import attnres_add_mix_norm as run
    else:
        from openk3.ops.attnres.eager import attnres_add_mix_norm as run
    mix, norm, new_prefix, weights = run(*arguments)
    return SublayerInput(
        norm,
        new_prefix,
        mix if want_mix else None,
        weights if return_weights else None,
        tuple(rows) if lse is None else (),
    )


@own_dtypes
def attnres_bank_mixes(
    bank: Sequence[Tensor],
    queries: Tensor,
    key_gains: Tensor,
    *,
    eps: float = 1e-5,
    implementation: Implementation | None = None,
) -> list[BankMix]:
    """What each query makes of the bank, in one go: the first phase of a block (report §5.4.2).

    While a block runs its bank does not change, so all its queries can be asked at once. A query's mix then
    stands for the bank in `attnres_add_mix_norm`, which reads two rows a token instead of all.

    Args:
        bank: S >= 1 rows `[T, d]` of one floating dtype and device.
        queries: `[Q, d]`, Q >= 1.
        key_gains: `[Q, d]`.
        eps: of the keys' norm; positive.
        implementation: as in `attnres_mix`; the kernel has no gradient and takes up to 32 queries.

    Returns:
        Q mixes, each `[T, d]` in the bank's dtype with its `[T]` log-sum-exp in at least fp32.

    Raises:
        InvalidInput: no source, or shapes, dtypes or devices that do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "attnres_bank_mixes"
    _check_sources(name, bank)
    check_floating(name, bank=bank[0], queries=queries, key_gains=key_gains)
    if queries.dim() != 2 or queries.shape[1] != bank[0].shape[1] or queries.shape != key_gains.shape:
        raise InvalidInput(
            f"{name}: queries and key_gains must be [Q, {bank[0].shape[1]}], "
            f"got {tuple(queries.shape)} and {tuple(key_gains.shape)}"
        )
    if not len(queries):
        raise InvalidInput(f"{name}: got no query")
    _check_eps(name, eps=eps)
    no_kernel = None
    if len(queries) > 32:
        no_kernel = f"the kernel takes up to 32 queries, got {len(queries)}"
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (*bank, queries, key_gains)):
        no_kernel = "the kernel has no gradient"
    chosen = _choose(name, bank, implementation, (queries, key_gains), no_kernel)
    if chosen == "triton":
        from openk3.ops.attnres.kernels.operator import bank_mixes as run
    elif chosen == "reference":
        from openk3.ops.attnres.reference import attnres_bank_mixes as run
    else:
        from openk3.ops.attnres.eager import attnres_bank_mixes as run
    values, lse = run(bank, queries, key_gains, eps)
    return [BankMix(*pair) for pair in zip(values.unbind(0), lse.unbind(0), strict=True)]


def _choose(
    name: str,
    sources: Sequence[Tensor],
    wanted: Implementation | None,
    vectors: Sequence[Tensor],
    problem: str | None = None,
) -> Implementation:
    d = sources[0].shape[1]
    if d % 2 or d > 16384 or not d:
        problem = f"the kernel takes even widths to 16,384, got {d}"
    elif len(sources) > 33:
        problem = f"the kernel takes up to 32 sources, got {len(sources)}"
    elif torch.float64 in [x.dtype for x in (sources[0], *vectors)]:
        problem = "the kernel computes in fp32, not float64"
    if wanted == "triton" and problem:
        raise KernelUnavailable(f"{name}: {problem}; ask for implementation='eager'")
    checked = all(kernel.checked for kernel in KERNELS)
    return choose(name, sources[0], wanted, kernels=problem is None, by_default=checked)


def _check_sources(name: str, sources: Sequence[Tensor]) -> None:
    if not sources:
        raise InvalidInput(f"{name}: got no source; it needs the prefix at least")
    first = sources[0]
    if first.dim() != 2 or not first.is_floating_point():
        raise InvalidInput(f"{name}: sources must be floating [T, d], got {tuple(first.shape)} {first.dtype}")
    for i, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype or source.device != first.device:
            raise InvalidInput(
                f"{name}: source {i} is {tuple(source.shape)} {source.dtype} on {source.device}, "
                f"source 0 is {tuple(first.shape)} {first.dtype} on {first.device}; they must match"
            )


def _check_vectors(name: str, source: Tensor, **vectors: Tensor) -> None:
    check_floating(name, sources=source, **vectors)
    for vector_name, vector in vectors.items():
        if vector.shape != source.shape[1:]:
            raise InvalidInput(
                f"{name}: {vector_name} is {tuple(vector.shape)}, must be ({source.shape[1]},) as the sources"
            )


def _check_eps(name: str, **values: float) -> None:
    for eps_name, eps in values.items():
        if not eps > 0:
            raise InvalidInput(f"{name}: {eps_name} must be positive, got {eps}")

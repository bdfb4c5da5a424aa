"""Between two steps: the next bias from the counts of the last one.

Vectors of E numbers, of one router or of several alike, no tokens. Every rank calls these on the same
all-reduced counts and gets the same bias.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.quantile_balance.bins import bin_range


def bias_from_histogram(histogram: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    """The k/E quantile of each expert's required biases, mean-centred (report Appendix D).

    Picks the bin in which the cumulative count first reaches ceil(q), q = m k / E with m the pooled number
    of tokens, and interpolates inside it. The result (before centring) and the ceil(q)-th smallest required
    bias lie in one bin.

    Args:
        histogram: `[..., E, bins]` int64, summed over micro-batches and ranks: of one router, or of several.
        bias: `[..., E]` the routing bias of that step: it fixes the bins.
        k: experts per token, 1 <= k < E.

    Returns:
        `[..., E]` in bias's dtype; a router's bias itself, bit for bit, when nothing was counted for it.

    Raises:
        InvalidInput: a shape, dtype or device does not fit, or k is not in [1, E).
    """
    E, bins = histogram.shape[-2:] if histogram.dim() >= 2 else (-1, -1)
    if histogram.dtype != torch.int64 or bias.shape != histogram.shape[:-1] or bins < 1:
        raise InvalidInput(
            f"bias_from_histogram: histogram is {tuple(histogram.shape)} {histogram.dtype}, bias is "
            f"{tuple(bias.shape)}; want [..., E, bins] int64 and [..., E]"
        )
    _check_bias("bias_from_histogram", bias, "histogram", histogram)
    if not 1 <= k < E:
        raise InvalidInput(f"bias_from_histogram: {E} experts, k = {k}; want 1 <= k < E")
    low, width = (x.double()[..., None, None] for x in bin_range(bias, bins))
    cumulative = histogram.cumsum(-1)
    assigned = cumulative[..., -1:] * k  # q E, whole
    target = (assigned + E - 1) // E  # ceil(q)
    chosen = (cumulative < target).sum(-1, keepdim=True).clamp(max=bins - 1)
    inside = histogram.gather(-1, chosen)
    before = cumulative.gather(-1, chosen) - inside
    # The chosen bin is empty only if its whole row is: that expert keeps what it had.
    fraction = ((assigned.double() / E - before) / inside.clamp(min=1)).clamp(0, 1)
    estimate = (low + (chosen + fraction) * width).squeeze(-1)
    estimate = torch.where(inside.squeeze(-1) > 0, estimate, bias.double())
    centred = (estimate - estimate.mean(-1, keepdim=True)).to(bias.dtype)
    return torch.where(cumulative[..., -1].any(-1, keepdim=True), centred, bias)


def sign_update(bias: torch.Tensor, load: torch.Tensor, step: float) -> torch.Tensor:
    """The rule that QB replaces: b + step sign(mean load - load), `load [E]` int64 (report §2.3.3).

    It is a sign-descent step on the dual whose exact minimiser per expert QB takes (eq. 27).

    Raises:
        InvalidInput: bias and load are not `[E]` each, on one device.
    """
    if bias.dim() != 1 or load.shape != bias.shape:
        raise InvalidInput(
            f"sign_update: bias is {tuple(bias.shape)}, load is {tuple(load.shape)}; want [E] and [E]"
        )
    _check_bias("sign_update", bias, "load", load)
    short = load.sum() - load * load.numel()  # E times too few, whole: the sign is exact
    return bias + step * short.sign().to(bias.dtype)


def average_bias(average: torch.Tensor, bias: torch.Tensor, updates: int, decay: float) -> torch.Tensor:
    """Exponential moving average of centred biases, `[E]` each: less noise of sampling (Appendix D).

    `updates` is how many biases the average holds already. The first is taken whole and the next weigh 2/3,
    2/4, ... down to 1 - decay: no slow start from zero when balance is needed most, and what was found at the
    cut-offs of an unbalanced router fades soon. Averages of centred biases stay centred.
    """
    if not 0 <= decay < 1:
        raise InvalidInput(f"average_bias: decay is {decay}; want 0 <= decay < 1")
    return average.lerp(bias, max(1 - decay, 2 / (updates + 2)))


def _check_bias(operator: str, bias: torch.Tensor, name: str, counts: torch.Tensor) -> None:
    if not bias.is_floating_point() or bias.device != counts.device:
        raise InvalidInput(
            f"{operator}: bias is {bias.dtype} on {bias.device}, {name} on {counts.device}; want a floating "
            "point bias on the same device"
        )

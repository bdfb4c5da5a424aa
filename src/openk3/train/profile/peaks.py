"""What a device does at best: bytes of a copy and operations of a product, a second.

A device in the table was measured at length, with its power limit in force; another one is measured now, for
a second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peaks:
    """bandwidth: bytes per second of a copy, those read and those written. flops: of a dense product.

    `source`: where the figures are from, for people.
    """

    bandwidth: float
    flops: float
    source: str

    def floor(self, moved: float, flops: float) -> float:
        """The least seconds for so many bytes and operations."""
        return max(moved / self.bandwidth, flops / self.flops)


KNOWN = {
    ("H200", torch.bfloat16): Peaks(
        4.25e12, 693e12, "H200, bf16: copy 4.25 TB/s, sustained 8192^3 product 693 TFLOP/s (bench/LOG.md)"
    ),
}
"""By a word of the device's name and the dtype of the products."""

PRODUCT = 1024
COPY = 1 << 26
"""Edge of the probe's product and bytes of its copy on a CPU; a GPU takes 8 times either."""


def peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Of `device` for products of `dtype`: from the table, or by a probe of about a second."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return known_peaks(name, dtype) or probe(device, dtype)


def known_peaks(device_name: str, dtype: torch.dtype) -> Peaks | None:
    """Of the device with this name, if it is in the table."""
    return next((p for (word, of), p in KNOWN.items() if word in device_name and of == dtype), None)


def probe(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> Peaks:
    """The best of what fits into `seconds` each."""
    scale = 8 if device.type == "cuda" else 1
    source = torch.zeros(scale * COPY, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(scale * PRODUCT, scale * PRODUCT, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    bandwidth = 2 * source.numel() / _best(lambda: target.copy_(source), device, seconds)
    flops = 2 * (scale * PRODUCT) ** 3 / _best(lambda: torch.mm(a, b, out=out), device, seconds)
    kind = str(dtype).removeprefix("torch.")
    return Peaks(
        bandwidth,
        flops,
        f"measured now: copy {bandwidth / 1e9:,.0f} GB/s, {kind} product {flops / 1e12:,.3g} TFLOP/s",
    )


def _best(call: object, device: torch.device, seconds: float) -> float:
    assert callable(call)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best

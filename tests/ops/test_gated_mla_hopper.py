"""The text of Hopper's MLA kernels, run on torch: against the definition, with small and with real tiles."""

from __future__ import annotations

import math

import pytest
import torch
from test_gated_mla import by_definition, draw, packed, results

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from gluon_on_torch import Boxes, Machine, Pointer

from openk3.ops.attention.kernels import backward_hopper, forward_hopper

K, S = 128, 64
Tensor = torch.Tensor
PACKINGS = {
    "one": [(300, 300)],
    "ragged": [(5, 5), (0, 0), (200, 200), (129, 129), (1, 1)],
    "cached prefixes": [(1, 300), (70, 257), (128, 128)],
    "nothing to see": [(40, 0), (0, 9), (200, 130), (3, 3)],
}
# (queries, keys, stages) of the forward, of gradients to keys and of gradients to queries
TILES = {
    "as launched": ((128, 128, 2), (32, 128, 4), (128, 64, 3)),
    "small": ((64, 32, 3), (32, 64, 3), (64, 32, 2)),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> Machine:
    machine = Machine()
    for module in (backward_hopper, forward_hopper):
        machine.replace(module, monkeypatch)
        monkeypatch.setattr(module, "place", _place)
    return machine


def _place(table: Pointer, slot: Tensor, cu_seqlens_q: Pointer, cu_seqlens_k: Pointer) -> tuple[Tensor, ...]:
    """As `blocks.place`."""
    n, block = table.flat[2 * slot], table.flat[2 * slot + 1]
    (q, end_q), (k, end_k) = (x.flat[n : n + 2].long() for x in (cu_seqlens_q, cu_seqlens_k))
    return block, q, end_q - q, k, end_k - k


def table(cu_seqlens: Tensor, rows: int) -> tuple[Pointer, int]:
    """Blocks in reverse, and a slot without one."""
    lengths = cu_seqlens.diff().tolist()
    blocks = [(n, j) for n, length in enumerate(lengths) for j in range(-(-length // rows))]
    return Pointer(torch.tensor([*blocks[::-1], (-1, -1)]).flatten()), len(blocks) + 1


def run(machine: Machine, inputs: dict[str, Tensor | None], pairs, tiles, d_y: Tensor) -> dict[str, Tensor]:
    """Every output of the three kernels; what lies between them is written out here."""
    q, kv, shared, gate = inputs.values()
    cu_q, cu_k = packed(pairs)
    (Tq, H, _), Tk = q.shape, len(kv)
    offsets = Pointer(cu_q), Pointer(cu_k)
    scale = (K + S) ** -0.5
    factors = scale * math.log2(math.e), scale
    strides = q.stride(1), kv.stride(1)

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, math.nan)

    def flat(x: Tensor | None) -> Pointer | None:
        return None if x is None else Pointer(x.view(-1))

    (rows, keys, stages), of_keys, of_queries = tiles
    slots, count = table(cu_q, rows)
    y, o, lse, largest = empty(Tq, H, K), empty(Tq, H, K), empty(H, Tq), empty(count, H)
    machine.run(
        forward_hopper.attention_forward_hopper, (count, H),
        Boxes(q, rows, K), Boxes(q, rows, S), Boxes(kv, keys, K), Boxes(shared, keys, S), flat(gate),
        *offsets, slots, flat(y), flat(o), flat(lse), flat(largest), *factors, *strides, H * K, K, Tq, H,
        GATED=gate is not None, KEEP=True, ROWS=rows, KEYS=keys, STAGES=stages,
    )  # fmt: skip
    d_o = (d_y if gate is None else d_y * gate.sigmoid()).contiguous()
    sums = Pointer(lse.view(-1)), Pointer((d_o * o).sum(-1).t().reshape(-1))

    rows, keys, stages = of_keys
    slots, count = table(cu_k, keys)
    d_kv, d_shared = empty(Tk, H, 2 * K), empty(Tk, H, S)
    machine.run(
        backward_hopper.key_backward_hopper, (count, H),
        Boxes(q, rows, K), Boxes(q, rows, S), Boxes(kv, keys, K), Boxes(shared, keys, S), Boxes(d_o, rows, K),
        *sums, *offsets, slots, flat(d_kv), flat(d_shared), *factors, *strides, Tq, H,
        ROWS=rows, KEYS=keys, STAGES=stages,
    )  # fmt: skip
    rows, keys, stages = of_queries
    slots, count = table(cu_q, rows)
    d_q = empty(Tq, H, K + S)
    machine.run(
        backward_hopper.query_backward_hopper, (count, H),
        Boxes(q, rows, K), Boxes(q, rows, S), Boxes(d_o, rows, K), Boxes(kv, keys, K), Boxes(shared, keys, S),
        *sums, *offsets, slots, flat(d_q), *factors, *strides, Tq, H, ROWS=rows, KEYS=keys, STAGES=stages,
    )  # fmt: skip
    return {"y": y, "largest": largest.amax(0), "d_q": d_q, "d_kv": d_kv, "d_shared": d_shared.sum(1)}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_outputs_and_gradients_equal_the_definition(machine, packing, gated, tiles):
    pairs = PACKINGS[packing]
    inputs = draw(pairs, K=K, S=S, V=K, gated=gated)
    wide = torch.randn(len(inputs["shared"]), 320)
    inputs["shared"] = wide[:, 256:].copy_(inputs["shared"])  # a part of the latents
    d_y = torch.randn(len(inputs["q"]), 2, K)
    actual = run(machine, inputs, pairs, TILES[tiles], d_y)
    expected = results(by_definition, inputs, pairs, d_y=d_y.double())
    for name, mine in actual.items():
        oracle = expected[name]
        if name == "largest":
            torch.testing.assert_close(mine.double(), oracle, rtol=1e-5, atol=0)
        else:
            assert float((mine - oracle).norm()) < 3e-6 * max(1.0, float(oracle.norm())), name


def test_a_nan_stays_in_its_sequence_in_the_forward(machine):
    pairs = [(100, 100), (300, 300)]
    inputs = draw(pairs, K=K, S=S, V=K)
    for name in ("q", "kv", "shared"):
        inputs[name][100:] = math.nan
    y = run(machine, inputs, pairs, TILES["as launched"], torch.ones(400, 2, K))["y"]
    assert y[:100].isfinite().all() and y[100:].isnan().all()

"""The KDA layer of the model through interpreted kernels: it computes what it does through eager."""

from __future__ import annotations

import pytest
import torch

from model.tiny import built, changed, packed
from openk3.model.protocols import LOCAL, LocalContext, Seams, untagged
from openk3.ops.dispatch import triton_problem
from openk3.ops.kda import gated_kda
from ops.closeness import relative_error

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)


class ThroughKernels(LocalContext):
    """As `LocalContext`, with the kernels asked for by name."""

    def __init__(self) -> None:
        self.calls = 0

    def kda(self, q, k, v, z, b, A_log, dt_bias, lower_bound, cu_seqlens, initial_state):
        self.calls += 1
        return gated_kda(
            q, k, v, z, b, A_log, dt_bias, cu_seqlens,
            lower_bound=lower_bound, initial_state=initial_state, implementation="triton",
        )  # fmt: skip


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_the_layer_gives_the_same_outputs_states_and_gradients_through_kernels_as_through_eager(gate):
    config = changed(kda__num_heads=1, kda__head_dim=64, kda__gate=gate)
    _, cu = packed([67, 0, 2], config.vocab_size)
    x = torch.randn(69, config.hidden_size, generator=torch.Generator().manual_seed(1))
    found, context = [], ThroughKernels()
    for seams in (LOCAL, Seams(LOCAL.dispatch, context, untagged)):
        layer = built(config, dtype=torch.float32, seams=seams).layers[0].self_attn
        own = x.clone().requires_grad_()
        out, first = layer(own, cu, None)
        again, second = layer(own[:2], torch.tensor([0, 1, 1, 2], dtype=torch.int32), first)
        loss = out.square().sum() + again.sin().sum() + second.S.square().sum()
        gradients = torch.autograd.grad(loss, [own, *layer.parameters()])
        names = ["out", "S", "out after", "S after", "x", *(name for name, _ in layer.named_parameters())]
        found.append(dict(zip(names, [out, first.S, again, second.S, *gradients], strict=True)))
    assert context.calls == 2
    for name, eager in found[0].items():
        assert relative_error(found[1][name], eager) < (5e-6 if "out" in name or name[0] == "S" else 1e-4), (
            name
        )

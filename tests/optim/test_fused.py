"""The fused update in Triton's interpreter, against the update rules in float64 and against the eager path.

Products are fp32 here: the interpreter truncates bfloat16 and multiplies it wrongly.
"""

from __future__ import annotations

import pytest
import torch
from tiny_k3 import parameters, set_gradients, tiny_config

from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.optim import OptimConfig, Optimizer, clip_scale, global_norm, orthogonalize
from openk3.optim.newton_schulz import COEFFICIENTS

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

MODEL = tiny_config()
MODEL = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"num_experts": 5})})
EXPERTS = "layers.1.block_sparse_moe.experts.w1"
ODD = {  # every kind of treatment and split, sizes that are and are not multiples of a lane
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.A_log",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attention_res_proj.weight",
    "layers.3.self_attn.kv_b_proj.weight",
    EXPERTS,
    "layers.1.block_sparse_moe.experts.w2",
    "embed_tokens.weight",
    "norm.weight",
}


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    from openk3.optim.fused import kernels, muon, newton_schulz

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "DIRECTION", {"TILE": 256, "num_warps": 1})
        patch.setattr(kernels, "UPDATE", {"TILE": 128, "num_warps": 1})
        patch.setattr(kernels, "ADAMW", {"TILE": 512, "num_warps": 1})
        patch.setattr(kernels, "SYMMETRIC_WIDE", {"EDGE": 32, "DEPTH": 32, "num_warps": 1, "num_stages": 1})
        patch.setattr(muon, "WAVE_ELEMENTS", 4_000)
        patch.setattr(newton_schulz, "CHUNK_ELEMENTS", 1_500)
        yield


@pytest.fixture
def _plain_products(monkeypatch):
    """Newton-Schulz without its kernel, which takes most of an interpreted step; it has tests of its own."""
    from openk3.optim.fused import muon
    from openk3.optim.newton_schulz import _iterate

    def in_place(x, triples):
        x.copy_(_iterate(x.mT, triples).mT if x.shape[1] > x.shape[2] else _iterate(x, triples))

    monkeypatch.setattr(muon, "iterate_", in_place)


def some(dtype=torch.float32, names=ODD):
    return {name: p for name, p in parameters(MODEL, dtype).items() if name in names}


def optimizer_of(named, implementation="triton", **settings):
    return Optimizer(named.items(), OptimConfig(**settings), MODEL, implementation=implementation)


def everything(named, optimizer):
    state = {
        f"{n} {e}": t.clone() for n, entries in optimizer.state_dict().items() for e, t in entries.items()
    }
    return {**{n: p.detach().clone() for n, p in named.items()}, **state}


def in_float64(named):
    wide = {name: torch.nn.Parameter(p.detach().double()) for name, p in named.items()}
    return wide, optimizer_of(wide, "eager")


def relative_error(actual, exact):
    return float((actual.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def step_both(named, optimizer, exact, reference, seed, scale, lr=0.01, absent=()):
    """The same gradients, absent ones None, two experts' zero, through both; float64 gets them scaled."""
    set_gradients(named, seed=seed)
    for name, p in named.items():
        if name == EXPERTS:
            p.grad[[1, 3]] = 0
        if name in absent:
            p.grad = None
        exact[name].grad = None if p.grad is None else p.grad.double() * float(scale)
    optimizer.step(lr, scale)
    reference.step(lr)


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "weight_decay": 0.3}, {"optimizer": "adamw"}])
def test_steps_equal_float64(settings):
    named = some()
    optimizer = optimizer_of(named, **settings)
    exact, _ = in_float64(named)
    reference = optimizer_of(exact, "eager", **settings)
    start = {name: p.detach().clone() for name, p in exact.items()}
    for seed in range(3):
        absent = {"norm.weight", "layers.0.self_attn.o_proj.weight"} if seed == 1 else set()
        step_both(named, optimizer, exact, reference, seed, torch.tensor(0.37), absent=absent)
    for name, p in named.items():
        moved, exactly = p.detach().double() - start[name], exact[name].detach() - start[name]
        assert float((moved - exactly).norm() / exactly.norm()) < 3e-5, name
    wanted = reference.state_dict()
    for name, entries in optimizer.state_dict().items():
        for entry, tensor in entries.items():
            assert tensor.shape == wanted[name][entry].shape
            assert relative_error(tensor, wanted[name][entry].double()) < 1e-6, (name, entry)
        if "step" in entries:
            assert torch.equal(entries["step"], wanted[name]["step"])


@pytest.mark.usefixtures("_plain_products")
def test_masters_and_compute_copies_are_written_together():
    """Within truncation, which is what the interpreter does in place of rounding."""
    named, other = some(torch.bfloat16), some(torch.bfloat16)
    optimizer, eager = optimizer_of(named), optimizer_of(other, "eager")
    for seed in range(2):
        for params, each in ((named, optimizer), (other, eager)):
            set_gradients(params, seed=seed)
            each.step(0.01)
    mine, wanted = optimizer.state_dict(), eager.state_dict()
    for name, p in named.items():
        if p.dtype != torch.float32:
            master = mine[name]["master"]
            assert relative_error(master, wanted[name]["master"].double()) < 1e-6
            assert ((p.float() - master).abs() <= 2**-7 * master.abs()).all()


@pytest.mark.usefixtures("_plain_products")
@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_factor_that_is_zero_or_not_finite_changes_no_bit(scale):
    named = some(torch.bfloat16)
    optimizer = optimizer_of(named)
    set_gradients(named, seed=0)
    optimizer.step(0.01)
    set_gradients(named, seed=1)
    named["norm.weight"].grad[0] = float("nan")
    before = everything(named, optimizer)
    optimizer.step(0.01, torch.tensor(scale, dtype=torch.float64))
    after = everything(named, optimizer)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    set_gradients(named, seed=1)
    optimizer.step(0.01, torch.tensor(1.0))
    assert all(not torch.equal(before[name], named[name]) for name in named)


@pytest.mark.usefixtures("_plain_products")
def test_blocks_and_parameters_without_a_gradient_keep_every_bit():
    named = some(torch.bfloat16)
    optimizer = optimizer_of(named)
    set_gradients(named, seed=0)
    optimizer.step(0.01)
    before = everything(named, optimizer)
    set_gradients(named, seed=1)
    named[EXPERTS].grad[[0, 4]] = 0
    idle = {"norm.weight", "layers.0.self_attn.o_proj.weight"}
    for name in idle:
        named[name].grad = None
    optimizer.step(0.01)
    after = everything(named, optimizer)
    assert {key.split()[0] for key in before if torch.equal(before[key], after[key])} == idle
    for key in (EXPERTS, f"{EXPERTS} master"):
        same = [torch.equal(a, b) for a, b in zip(before[key], after[key], strict=True)]
        assert same == [expert in (0, 4) for expert in range(5)]
    momentum = f"{EXPERTS} momentum"
    assert torch.allclose(after[momentum][0], 0.95 * before[momentum][0], rtol=1e-6)


@pytest.mark.usefixtures("_plain_products")
def test_learning_rate_as_a_number_and_as_a_tensor_are_one():
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        named = some()
        set_gradients(named, seed=0)
        optimizer_of(named).step(lr)
        results.append({name: p.detach().clone() for name, p in named.items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.usefixtures("_plain_products")
def test_a_state_goes_from_one_path_to_the_other(tmp_path):
    """Through a checkpoint and in memory, with fp32 masters; training goes on as it would have."""
    named, other = some(torch.bfloat16), some(torch.bfloat16)
    optimizer, eager = optimizer_of(named), optimizer_of(other, "eager")
    set_gradients(named, seed=0)
    optimizer.step(0.01)
    store = CheckpointStore(tmp_path)
    store.save(1, {"optimizer": optimizer.state_dict()}, config={})
    eager.load_state_dict(store.load(1, into={"optimizer": eager.state_dict()}, config={})["optimizer"])
    for params, each in ((named, optimizer), (other, eager)):
        set_gradients(params, seed=1)
        each.step(0.01)
    optimizer.load_state_dict(eager.state_dict())
    for params, each in ((named, optimizer), (other, eager)):
        set_gradients(params, seed=2)
        each.step(0.01)
    mine, wanted = optimizer.state_dict(), eager.state_dict()
    for name, entries in mine.items():
        for entry, tensor in entries.items():
            assert relative_error(tensor, wanted[name][entry].double()) < 1e-6, (name, entry)


@pytest.mark.parametrize("shape", [(5, 18, 22), (4, 40, 22), (3, 33, 33), (2, 1, 7), (7, 16, 12)])
@pytest.mark.parametrize("name", ["jordan", "polar-express"])
def test_newton_schulz_in_place_equals_float64(shape, name, monkeypatch):
    from openk3.optim.fused import kernels
    from openk3.optim.fused.newton_schulz import iterate_

    monkeypatch.setitem(kernels.SYMMETRIC_WIDE, "EDGE", 16)  # tiles off the diagonal
    torch.manual_seed(0)
    x = torch.randn(shape)
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    exact = orthogonalize([x.double()], name)[0]
    iterate_(x, COEFFICIENTS[name].triples)
    assert relative_error(x, exact) < 1e-5


def test_one_iteration_alone_comes_back_in_place():
    from openk3.optim.fused.newton_schulz import iterate_

    x = torch.eye(4)[None] / 2
    iterate_(x, ((2.0, 0.5, 0.25),))
    assert torch.allclose(x[0], torch.eye(4) / 2 * (2 + 0.5 / 4 + 0.25 / 16))


def test_gradients_that_lie_otherwise_are_copied():
    """Kernels are told that every tensor begins on 16 bytes and has no gaps."""
    results = []
    for lay in (lambda g: g, lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g), transposed):
        named = some(names={"layers.0.self_attn.A_log", "embed_tokens.weight"})
        set_gradients(named, seed=0)
        for p in named.values():
            p.grad = lay(p.grad)
        optimizer_of(named).step(0.01)
        results.append({name: p.detach().clone() for name, p in named.items()})
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def transposed(grad):
    return grad.t().contiguous().t() if grad.dim() == 2 else grad


def test_a_compute_copy_that_was_moved_is_written_where_it_is():
    named = some(torch.bfloat16, names={"embed_tokens.weight"})
    optimizer = optimizer_of(named)
    table = named["embed_tokens.weight"]
    table.data = table.detach().clone()
    before = table.detach().clone()
    set_gradients(named, seed=0)
    optimizer.step(0.01)
    assert not torch.equal(table, before)


def test_the_clip_on_the_device_is_that_on_the_host():
    named = some()
    set_gradients(named, seed=3)
    norm = global_norm(named.items())
    scale = clip_scale(norm, 0.5)
    exact = torch.cat([p.grad.double().flatten() for p in named.values()]).norm()
    assert float(scale) == pytest.approx(0.5 / float(exact), rel=1e-6)


def test_forced_kernels_refuse_what_they_do_not_take():
    with pytest.raises(KernelUnavailable, match="compute in fp32"):
        optimizer_of({"norm.weight": torch.nn.Parameter(torch.ones(4, dtype=torch.float64))})
    apart = torch.nn.Parameter(torch.ones(12, 40).t())
    odd = torch.nn.Parameter(torch.ones(41)[1:])
    with pytest.raises(KernelUnavailable, match="multiple of 16 bytes"):
        optimizer_of({"norm.weight": odd})
    with pytest.raises(KernelUnavailable, match="not contiguous"):
        optimizer_of({"layers.0.self_attn.f_a_proj.weight": apart})

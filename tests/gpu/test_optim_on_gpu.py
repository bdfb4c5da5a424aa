"""The fused optimizer update on a GPU: against float64, and what it promises to the bit and about waiting.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.config import ModelConfig
from openk3.errors import TrainingDiverged
from openk3.optim import (
    COEFFICIENTS,
    OptimConfig,
    Optimizer,
    check_factors,
    clip_scale,
    global_norm,
    grad_norm,
    orthogonalize,
)
from optim.tiny_k3 import MLA_LAYER, parameters, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = "layers.1.block_sparse_moe.experts.w1"


def r1_like() -> ModelConfig:
    """Few experts and heads of r1's shapes: hidden 512, latent 256, width 416, heads of 128."""
    tiny = tiny_config()
    assert tiny.kda and tiny.mla and tiny.moe
    return tiny.model_copy(
        update={
            "hidden_size": 512,
            "dense_width": 832,
            "kda": tiny.kda.model_copy(update={"num_heads": 4, "head_dim": 128}),
            "mla": tiny.mla.model_copy(
                update={
                    "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                }
            ),
            "moe": tiny.moe.model_copy(update={"expert_width": 416, "latent_width": 256}),
        }
    )  # fmt: skip


MODELS = {"tiny, odd sizes": tiny_config(), "sizes of r1": r1_like()}


def on_gpu(model, dtype=torch.bfloat16):
    made = {name: torch.nn.Parameter(p.detach().cuda()) for name, p in parameters(model, dtype).items()}
    for p in made.values():
        p.grad_dtype = torch.float32
    return made


def draw_gradients(named, seed):
    """fp32, each parameter's of its own scale; two experts without tokens."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for i, p in enumerate(named.values()):
        grad = 10.0 ** -(i % 4) * torch.randn(p.shape, device=p.device, generator=generator)
        p.grad = grad.to(torch.promote_types(p.dtype, torch.float32))
    named[EXPERTS].grad[[3, 7]] = 0


def optimizer_of(named, model, implementation="triton", **settings):
    return Optimizer(named.items(), OptimConfig(**settings), model, implementation=implementation)


def everything(named, optimizer):
    state = {
        f"{n} {e}": t.clone() for n, entries in optimizer.state_dict().items() for e, t in entries.items()
    }
    return {**{n: p.detach().clone() for n, p in named.items()}, **state}


def masters(named, optimizer):
    state = optimizer.state_dict()
    return {name: state[name].get("master", p.detach()).double() for name, p in named.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"ns_dtype": "float32"}, 3e-5),
        ({}, 0.03),
        ({"nesterov": False}, 0.03),
        ({"optimizer": "adamw"}, 3e-5),
    ],
    ids=["fp32 products", "bf16 products", "without Nesterov", "AdamW"],
)
def test_movement_equals_float64(model, settings, limit):
    """fp32: a few roundings. bf16: as far as the eager path's, or nearer."""
    model = MODELS[model]
    runs = {}
    for kind in ("triton", "eager", "float64"):
        named = on_gpu(model)
        start = {name: p.detach().double() for name, p in named.items()}
        if kind == "float64":
            named = {name: torch.nn.Parameter(p.detach().double()) for name, p in named.items()}
        optimizer = optimizer_of(named, model, "triton" if kind == "triton" else "eager", **settings)
        for seed in range(3):
            draw_gradients(named, seed)
            optimizer.step(0.01, torch.tensor(0.37, device="cuda", dtype=torch.float64))
        runs[kind] = {name: value - start[name] for name, value in masters(named, optimizer).items()}
        if kind == "triton":
            for name, p in named.items():
                assert torch.equal(p.double(), masters(named, optimizer)[name].to(p.dtype).double()), name
    worst = {}
    for kind in ("triton", "eager"):
        errors = {
            name: float((runs[kind][name] - exact).norm() / exact.norm())
            for name, exact in runs["float64"].items()
        }
        worst[kind] = max(errors.values())
    print(worst)  # noqa: T201  the peer's error beside ours
    assert worst["triton"] < limit, worst


@pytest.mark.parametrize(
    "shape", [(300, 416, 256), (300, 256, 416), (5, 192, 512), (3, 512, 1024), (7, 33, 90), (2, 1, 7)]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
def test_newton_schulz_equals_float64(shape, dtype, limit):
    from openk3.optim.fused.newton_schulz import iterate_

    x = torch.randn(shape, device="cuda")
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    exact = orthogonalize([x.double()])[0]
    mine = x.to(dtype)
    iterate_(mine, COEFFICIENTS["jordan"].triples)
    peer = orthogonalize([x], dtype=dtype)[0]
    error, beside = (float((y.double() - exact).norm() / exact.norm()) for y in (mine, peer))
    print(error, beside)  # noqa: T201
    assert error < limit


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper"
)
@pytest.mark.parametrize(
    "shape", [(300, 416, 256), (300, 256, 416), (5, 256, 256), (5, 264, 256), (5, 256, 584), (140, 704, 256)]
)
def test_whole_matrices_equal_float64_repeat_and_can_be_captured(shape):
    from openk3.optim.fused.polar_hopper import polar_, takes

    triples = COEFFICIENTS["jordan"].triples
    x = torch.randn(shape, device="cuda")
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x[1] = 0
    exact = orthogonalize([x.double()])[0]
    room = torch.full((shape[0] + 2, *shape[1:]), 9.0, device="cuda", dtype=torch.bfloat16)
    mine = room[1:-1].copy_(x)
    assert takes(mine)
    polar_(mine, triples)
    first = mine.clone()
    error = float((first.double() - exact).norm() / exact.norm())
    print(error)  # noqa: T201
    assert error < 0.03
    assert first[1].eq(0).all() and room[0].eq(9).all() and room[-1].eq(9).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        polar_(mine, triples)
    for _ in range(3):
        mine.copy_(x)
        graph.replay()
        assert torch.equal(mine, first)


def test_a_step_repeats_bitwise():
    model, results = MODELS["sizes of r1"], []
    for _ in range(2):
        named = on_gpu(model)
        optimizer = optimizer_of(named, model)
        for seed in range(2):
            draw_gradients(named, seed)
            optimizer.step(0.01, clip_scale(global_norm(named.items()), 1.0))
        results.append(everything(named, optimizer))
    assert [key for key in results[0] if not torch.equal(results[0][key], results[1][key])] == []


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_skipped_step_changes_no_bit(scale):
    model = MODELS["tiny, odd sizes"]
    named = on_gpu(model)
    optimizer = optimizer_of(named, model)
    draw_gradients(named, 0)
    optimizer.step(0.01)
    draw_gradients(named, 1)
    named["norm.weight"].grad[0] = float("nan")
    before = everything(named, optimizer)
    optimizer.step(0.01, torch.tensor(scale, device="cuda"))
    after = everything(named, optimizer)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_blocks_and_parameters_without_a_gradient_keep_every_bit():
    model = MODELS["sizes of r1"]
    named = on_gpu(model)
    optimizer = optimizer_of(named, model)
    draw_gradients(named, 0)
    optimizer.step(0.01)
    before = everything(named, optimizer)
    draw_gradients(named, 1)
    idle = {"norm.weight", "layers.0.self_attn.o_proj.weight"}
    for name in idle:
        named[name].grad = None
    optimizer.step(0.01)
    after = everything(named, optimizer)
    assert {key.split()[0] for key in before if torch.equal(before[key], after[key])} == idle
    for key in (EXPERTS, f"{EXPERTS} master"):
        same = [torch.equal(a, b) for a, b in zip(before[key], after[key], strict=True)]
        assert same == [expert in (3, 7) for expert in range(25)]


def test_a_whole_update_does_not_wait_for_the_device():
    model = MODELS["tiny, odd sizes"]
    named = on_gpu(model)
    optimizer = optimizer_of(named, model)
    logits = {MLA_LAYER: torch.tensor([20.0, 400.0, 20.0, -torch.inf], device="cuda")}

    def update():
        scale = clip_scale(global_norm(named.items()), 1.0)
        optimizer.step(0.01, scale)
        return optimizer.qk_clip(logits, scale)

    draw_gradients(named, 0)
    update()
    draw_gradients(named, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gammas = update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gammas[MLA_LAYER].tolist() == [1, 0.25, 1, 1]


def test_a_bad_logit_changes_nothing_and_is_found_when_read():
    model = MODELS["tiny, odd sizes"]
    named = on_gpu(model)
    optimizer = optimizer_of(named, model)
    before = everything(named, optimizer)
    logits = torch.full((4,), 400.0, device="cuda")
    bad = logits.clone()
    bad[1] = torch.nan
    gammas = optimizer.qk_clip({MLA_LAYER: logits, 4: bad})
    after = everything(named, optimizer)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    with pytest.raises(TrainingDiverged, match="layer 4, head 1 is not finite"):
        check_factors(gammas)


def test_the_norm_on_the_device_is_that_on_the_host():
    named = on_gpu(MODELS["sizes of r1"])
    draw_gradients(named, 0)
    exact = float(torch.cat([p.grad.double().flatten() for p in named.values()]).norm())
    norm = global_norm(named.items())
    assert norm.is_cuda and norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert grad_norm(named.items()) == pytest.approx(exact, rel=1e-6)
    named["norm.weight"].grad[0] = torch.inf
    assert float(clip_scale(global_norm(named.items()), 1.0)) == 0


def test_a_graph_repeats_the_step():
    """Gradients and moments where they were: the graph's table of addresses holds."""
    model, results = MODELS["sizes of r1"], []
    for captured in (False, True):
        named = on_gpu(model)
        optimizer = optimizer_of(named, model)
        draw_gradients(named, 0)
        scale, lr = (torch.tensor(x, device="cuda", dtype=torch.float64) for x in (0.5, 0.01))
        optimizer.step(lr, scale)
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step(lr, scale)
        scale.fill_(0.25)
        for _ in range(2):
            if captured:
                graph.replay()
            else:
                optimizer.step(lr, scale)
        results.append(everything(named, optimizer))
    assert [key for key in results[0] if not torch.equal(results[0][key], results[1][key])] == []


def test_elements_beyond_32_bits():
    """The last experts of 2.2e9 elements move as they do alone, and so does what is far into a table."""
    experts, last = 20_224, 4
    model = r1_like()
    assert model.moe
    results = []
    for count in (experts, last):
        own = model.model_copy(update={"moe": model.moe.model_copy(update={"num_experts": count})})
        p = torch.nn.Parameter(torch.zeros(count, 416, 256, device="cuda"))
        p.grad = torch.empty_like(p)
        generator = torch.Generator("cuda").manual_seed(0)
        p.grad[-last:] = torch.randn(last, 416, 256, device="cuda", generator=generator)
        p.grad[:-last] = 1e-3
        optimizer = optimizer_of({EXPERTS: p}, own)
        optimizer.step(1.0)
        momentum = optimizer.state_dict()[EXPERTS]["momentum"]
        results.append((p.detach()[-last:].clone(), momentum[-last:].clone()))
        del p, optimizer, momentum
        torch.cuda.empty_cache()
    (weight, momentum), (alone, momentum_alone) = results
    assert torch.equal(momentum, momentum_alone)
    assert float((weight - alone).norm() / alone.norm()) < 0.01


def test_gradients_in_half_precision_are_taken_too():
    model = MODELS["tiny, odd sizes"]
    named = {n: torch.nn.Parameter(p.detach().cuda()) for n, p in parameters(model, torch.bfloat16).items()}
    other = {n: torch.nn.Parameter(p.detach().clone()) for n, p in named.items()}
    for params, kind in ((named, "triton"), (other, "eager")):
        generator = torch.Generator("cuda").manual_seed(0)
        for p in params.values():
            p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(p.dtype)
        optimizer_of(params, model, kind, ns_dtype="float32").step(0.01)
    for name, p in named.items():
        assert float((p - other[name]).double().norm() / other[name].double().norm()) < 2e-3, name

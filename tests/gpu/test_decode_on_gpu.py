"""Decoding of many sequences on a GPU: against float64, as a graph and without, to the bit, and by slots.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.config.presets import preset
from openk3.model import K3, DecodeState
from openk3.model.decoding import BatchStepper
from openk3.model.decoding.batch import generate_batch
from openk3.model.generate import Sampling, generate
from openk3.ops.activation import Activation
from openk3.ops.decoding import (
    ExpertLists,
    Joined,
    StreamMix,
    append_latents,
    choose_experts,
    expert_sums,
    experts_into,
    mixed_products,
    most_likely,
    products_into,
)
from ops.closeness import relative_error

many = pytest.importorskip("openk3.ops.decoding.kernels.many")
products = pytest.importorskip("openk3.ops.decoding.kernels.products")
streams = pytest.importorskip("openk3.ops.decoding.kernels.streams")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# r1's widths and layers of both kinds, with a small head.
CONFIG = preset("r1").model_copy(update={"num_layers": 4, "vocab_size": 4096})
GREEDY = Sampling(temperature=0)
f64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def filled(dtype: torch.dtype) -> K3:
    """A random model whose sublayers all matter."""
    make = torch.Generator("cuda").manual_seed(0)
    model = K3(CONFIG, dtype=dtype, device="cuda")
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                x.fill_(1)
            elif "dt_bias" in name:
                x.normal_(-3, 1, generator=make)
            elif "A_log" in name or "e_score_correction_bias" in name:
                x.zero_()
            else:
                x.normal_(0, x.shape[-1] ** -0.5, generator=make)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> K3:
    return filled(torch.bfloat16)


def in_float64(model: K3) -> K3:
    exact = K3(CONFIG, dtype=f64, device="cuda")
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return exact.eval()


def packed(n: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Prompts of 1 to 99 tokens."""
    make = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 100, (n,), generator=make).tolist()
    tokens = torch.randint(0, CONFIG.vocab_size, (sum(lengths),), generator=make)
    return tokens.cuda(), torch.tensor([0, *lengths]).cumsum(0).int().cuda(), lengths


@torch.inference_mode()
def after(model: K3, tokens: torch.Tensor, cu: torch.Tensor, state: DecodeState | None = None):
    out = model(tokens, cu, state=state)
    return model.logits(out.hidden), out.state


def loaded(model: K3, n: int, **options) -> tuple[BatchStepper, torch.Tensor, DecodeState]:
    """A stepper with n prompts in shuffled slots, those slots, and the state that was put in."""
    tokens, cu, lengths = packed(n)
    _, state = after(model, tokens, cu)
    slots = torch.randperm(n + 2, generator=torch.Generator().manual_seed(n))[:n]
    stepper = BatchStepper(model, n + 2, 128, **options)
    stepper.load(slots.tolist(), state, lengths)
    return stepper, slots.int().cuda(), state


def errors(model: K3, exact: K3, n: int, steps: int) -> tuple[float, float]:
    """Mean relative L2 errors of logits: the stepper's, and the whole forward's in the model's dtype."""
    stepper, slots, state = loaded(model, n, implementation="triton")
    tokens, cu, _ = packed(n)
    _, right_state = after(exact, tokens, cu)
    borders = torch.arange(n + 1, dtype=torch.int32, device="cuda")
    mine, plain = 0.0, 0.0
    for _ in range(steps):
        tokens = torch.randint(0, CONFIG.vocab_size, (n,), device="cuda")
        logits = stepper(tokens, slots)
        whole, state = after(model, tokens, borders, state)
        right, right_state = after(exact, tokens, borders, right_state)
        mine += relative_error(logits, right) / steps
        plain += relative_error(whole, right) / steps
    return mine, plain


@pytest.mark.parametrize("n", [1, 4])
def test_logits_in_fp32_are_those_of_the_model_in_float64(n):
    model = filled(torch.float32)
    mine, _ = errors(model, in_float64(model), n, steps=4)
    assert mine < 1e-3


@pytest.mark.parametrize("n", [1, 3, 4, 5, 17, 64, 80])
@pytest.mark.parametrize("streamed", [False, True])
def test_logits_in_bf16_are_as_near_as_the_whole_forward(model, n, streamed, monkeypatch):
    if not streamed:
        monkeypatch.setattr(many, "streams_fit", lambda *of: False)
    mine, plain = errors(model, in_float64(model), n, steps=6)
    assert mine < 2 * plain  # experts that nearly tie fall differently in each


@pytest.mark.parametrize("implementation", ["eager", "triton", None])
@pytest.mark.parametrize("n", [1, 6])
def test_a_graph_computes_what_the_step_does_to_the_bit(model, n, implementation):
    results = []
    for graphs in (True, False):
        stepper, slots, _ = loaded(model, n, graphs=graphs, implementation=implementation)
        tokens = torch.arange(n, device="cuda")
        steps = [stepper(tokens + i, slots).clone() for i in range(3)]
        # The last slot is the spare: capturing has written there.
        layers = [x[:-1].clone() for layer in stepper.memory.layers for x in vars(layer).values()]
        results.append([*steps, *layers, stepper.memory.lengths[:-1].clone()])
    assert [torch.equal(a, b) for a, b in zip(*results, strict=True)] == [True] * len(results[0])


def test_rows_of_no_sequence_change_no_slot_and_no_other_row(model):
    stepper, slots, _ = loaded(model, 6, implementation="triton")
    before = [x[:-1].clone() for layer in stepper.memory.layers for x in vars(layer).values()]
    nobody = torch.full_like(slots, -1)
    for _ in range(3):
        assert stepper(torch.arange(6, device="cuda"), nobody).isfinite().all()
    after = [x[:-1] for layer in stepper.memory.layers for x in vars(layer).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    other, _, _ = loaded(model, 6, implementation="triton")
    some = torch.where(torch.arange(6, device="cuda") % 2 == 0, slots, -1)
    tokens = torch.arange(6, device="cuda") + 40
    mine, whole = stepper(tokens, some), other(tokens, slots)
    assert torch.equal(mine[::2], whole[::2])


def test_generate_writes_what_generate_batch_writes_one_at_a_time(model):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    alone = [list(generate(model, prompt, 20, sampling=GREEDY)) for prompt in prompts]
    for at_once, runs in ((1, 1), (3, 2)):
        texts = []
        for _ in range(runs):
            written = [[] for _ in prompts]
            for number, token in generate_batch(model, prompts, 20, sampling=GREEDY, at_once=at_once):
                written[number].append(token)
            texts.append(written)
        assert all(text == texts[0] for text in texts)
        assert [len(text) for text in texts[0]] == [20] * 3
        if at_once == 1:
            assert texts[0] == alone


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(("S", "n"), [(1, 1), (13, 1), (7, 4), (13, 5), (4, 64), (13, 256)])
def test_products_of_a_mix_at_r1_widths(S, n):
    bank = torch.randn(S, n, 512, device="cuda").bfloat16()
    weights = [(torch.randn(w, 512, device="cuda") / 22).bfloat16() for w in (1536, 512, 4, 256)]
    query, ones = torch.randn(512, device="cuda").bfloat16(), torch.ones(512, device="cuda").bfloat16()
    mix = StreamMix(query, ones, 1e-5)
    joined = Joined.of(*weights[:3], precise=weights[3])
    outputs = mixed_products(bank, mix, ones, 1e-5, joined, implementation="triton")
    wide = bank.to(f64)
    shares = torch.softmax(torch.einsum("snd,d->sn", normed(wide), query.to(f64)), 0)
    x = normed(torch.einsum("sn,snd->nd", shares, wide))
    for out, weight in zip(outputs, weights, strict=True):
        assert relative_error(out, x @ weight.to(f64).T) < 6e-3
    assert outputs[3].dtype == torch.float32


@pytest.mark.parametrize("n", [5, 64, 65, 300, 600])
@pytest.mark.parametrize(("a", "gated"), [(512, False), (1024, True), (1088, False)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_product_goes_into_the_stream_in_any_tiles(n, a, gated, whole, monkeypatch):
    monkeypatch.setattr(products, "WHOLE", ((2**31, products.Tile(16, 16)),) if whole else ())
    out, x, gate = (torch.randn(n, width, device="cuda").bfloat16() for width in (512, a, a))
    weight = (torch.randn(512, a, device="cuda") / 33).bfloat16()
    given = x.to(f64) * gate.to(f64).sigmoid() if gated else x.to(f64)
    right = out.to(f64) + given @ weight.to(f64).T
    options = {"add": True, "gate": gate if gated else None, "implementation": "triton"}
    products_into(out, weight, x, **options)
    assert relative_error(out, right) < 6e-3


def test_many_rows_in_fp32_take_steps():
    x, weights = torch.randn(70, 512, device="cuda"), torch.randn(40, 512, device="cuda") / 22
    out = torch.zeros(70, 40, device="cuda")
    right = x.to(f64) @ weights.to(f64).T
    products_into(out, weights, x, add=False, implementation="triton")
    assert relative_error(out, right) < 1e-5
    ones = torch.ones(512, device="cuda")
    (y,) = mixed_products(x[None], None, ones, 1e-5, Joined.of(weights), implementation="triton")
    assert relative_error(y, normed(x.to(f64)) @ weights.to(f64).T) < 1e-5


@pytest.mark.parametrize("n", [1, 4, 33, 256])
def test_what_goes_into_the_stream_at_r1_widths(n):
    out, u = (torch.randn(n, width, device="cuda").bfloat16() for width in (512, 256))
    gate, up = (3 * torch.randn(n, 832, device="cuda").bfloat16() for _ in range(2))
    weight = (torch.randn(512, 256 + 832, device="cuda") / 33).bfloat16()
    hidden = situ(gate.to(f64), up.to(f64))
    right = out.to(f64) + torch.cat([normed(u.to(f64)), hidden], 1) @ weight.to(f64).T
    ones = torch.ones(256, device="cuda").bfloat16()
    products_into(
        out, weight, u, add=True, norm=(ones, 1e-5), unit=(gate, up, Activation()), implementation="triton"
    )
    assert relative_error(out, right) < 6e-3


def chosen(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits, bias = torch.randn(n, 256, device="cuda"), 0.1 * torch.randn(256, device="cuda")
    ids, weights = choose_experts(logits, bias, 6, implementation="triton")
    eager = choose_experts(logits, bias, 6, implementation="eager")
    assert torch.equal(ids, eager[0]) and relative_error(weights, eager[1]) < 1e-5
    return ids, weights


def r1_experts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w1, w3 = ((torch.randn(256, 416, 256, device="cuda") / 16).bfloat16() for _ in range(2))
    return w1, w3, (torch.randn(256, 256, 416, device="cuda") / 20).bfloat16()


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def summed(x, ids, weights, experts) -> torch.Tensor:
    right = torch.zeros(x.shape, dtype=f64, device="cuda")
    for t in range(len(x)):
        w1, w3, w2 = (w[ids[t]].to(f64) for w in experts)
        row = x[t].to(f64)
        right[t] = torch.einsum("s,slf,sf->l", weights[t].to(f64), w2, situ(w1 @ row, w3 @ row))
    return right


@pytest.mark.parametrize("n", [1, 4, 5, 100])
def test_experts_are_chosen_and_summed_at_r1_widths(n):
    ids, weights = chosen(n)
    x, experts = torch.randn(n, 256, device="cuda").bfloat16(), r1_experts()
    u = expert_sums(x, ids, weights, *experts, Activation(), implementation="triton")
    assert relative_error(u, summed(x, ids, weights, experts)) < 6e-3


@pytest.mark.parametrize("n", [5, 64, 256, 512, 700])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("launch", [None, (1, 4), (2, 3), (1, 6)], ids=str)
def test_experts_go_into_the_stream_at_r1_widths_and_equal_calls_give_equal_bits(
    n, crowded, launch, monkeypatch
):
    if launch is None:
        monkeypatch.setattr(many, "streams_fit", lambda *of: False)
    else:
        monkeypatch.setattr(streams, "UNITS", launch)
        monkeypatch.setattr(streams, "DOWNS", launch)
    ids, weights = chosen(n)
    if crowded:  # every row goes to expert 7: as many tiles as can be
        ids[:, 0] = torch.where((ids == 7).any(1), ids[:, 0], 7)
    x, experts = torch.randn(n, 256, device="cuda").bfloat16(), r1_experts()
    start, ones = torch.randn(n, 512, device="cuda").bfloat16(), torch.ones(256, device="cuda").bfloat16()
    gate, up = (3 * torch.randn(n, 832, device="cuda").bfloat16() for _ in range(2))
    weight = (torch.randn(512, 256 + 832, device="cuda") / 33).bfloat16()
    parts = normed(summed(x, ids, weights, experts)), situ(gate.to(f64), up.to(f64))
    right = start.to(f64) + torch.cat(parts, 1) @ weight.to(f64).T
    results = []
    for _ in range(3):
        out = start.clone()
        experts_into(
            out, weight, x, ids, weights, *experts, Activation(), add=True, norm=(ones, 1e-5),
            shared=(gate, up), implementation="triton",
        )  # fmt: skip
        results.append(out)
    assert relative_error(results[0], right) < 6e-3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("n", [5, 64, 256])
def test_a_choice_lists_each_experts_assignments(n):
    logits, bias = torch.randn(n, 256, device="cuda"), 0.1 * torch.randn(256, device="cuda")
    counts = torch.zeros(256, dtype=torch.int32, device="cuda")
    lists = ExpertLists(torch.full((256, n), 10**9, dtype=torch.int32, device="cuda"), counts)
    ids, weights = choose_experts(logits, bias, 6, lists=lists, implementation="triton")
    alone = choose_experts(logits, bias, 6, implementation="triton")
    assert torch.equal(ids, alone[0]) and torch.equal(weights, alone[1])
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=256).int())
    inside = torch.arange(n, device="cuda") < counts[:, None]
    assert torch.equal(lists.rows[inside].sort().values, torch.arange(6 * n, device="cuda").int())
    whose = torch.arange(256, device="cuda")[:, None].expand(256, n)[inside]
    assert torch.equal(ids.flatten()[lists.rows[inside].long()], whose)


@pytest.mark.parametrize("n", [1, 64, 256])
def test_the_most_likely_token_is_the_first_of_the_largest(n):
    logits = torch.randn(n, 163840, device="cuda").bfloat16()
    tokens = most_likely(logits, implementation="triton")
    largest = logits.max(-1, keepdim=True).values
    first = (logits == largest).to(torch.int32).argmax(-1)
    assert torch.equal(tokens, first)


def test_a_latent_is_normed_on_its_way():
    compressed, latents = (torch.randn(*s, 320, device="cuda").bfloat16() for s in ((5,), (7, 64)))
    right, gain = latents.to(f64), torch.ones(256, device="cuda").bfloat16()
    places, seen = torch.tensor([6, 0, 3, 2, 5]).cuda(), torch.tensor([0, 63, 5, 70, 9]).cuda()
    wide = compressed.to(f64)
    right[places, seen.clamp(max=63)] = torch.cat([normed(wide[:, :256]), wide[:, 256:]], 1)
    append_latents(compressed, gain, 1e-5, latents, places, seen, implementation="triton")
    assert relative_error(latents, right) < 3e-3

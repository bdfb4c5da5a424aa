"""KDA: chunks against the recurrence in float64; what packing, splitting and extreme gates may not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from closeness import kept_by, relative_error, worst_element
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.kda import eager, gated_kda, kda, kda_step
from openk3.ops.kda.scan import scan

Tensors = dict[str, torch.Tensor]

GATES = {
    "mixed": lambda x: -5 * torch.sigmoid(3 * x),
    "open": lambda x: -1e-4 * torch.sigmoid(x),  # g near 0 on every token: nothing is forgotten
    "shut": lambda x: -5 + 1e-3 * torch.sigmoid(x),  # g near -5 on every token: what K3's gate can forget
    "unbounded": lambda x: -50 * torch.sigmoid(x),  # what the softplus gate can
}
every_gate = pytest.mark.parametrize("gate", GATES)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def draw(lengths: list[int], gate: str, H=2, K=6, V=5, dtype=torch.float64, state=True) -> Tensors:
    T, N = sum(lengths), len(lengths)
    q, k, g = torch.randn(3, T, H, K, dtype=torch.float64)
    inputs = {
        "q": torch.nn.functional.normalize(q, dim=-1),
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": torch.randn(T, H, V, dtype=torch.float64),
        "g": GATES[gate](g),
        "beta": torch.sigmoid(torch.randn(T, H, dtype=torch.float64)),
    }
    if state:
        inputs["initial_state"] = torch.randn(N, H, V, K, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in inputs.items()}


def on(lengths: list[int], **options) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`kda` as a function of its differentiable inputs alone."""

    def run(q, k, v, g, beta, initial_state=None):
        return kda(q, k, v, g, beta, packed(lengths), initial_state=initial_state, **options)

    return run


def results(run, inputs: Tensors) -> Tensors:
    """Both outputs, and the gradients of one random linear loss of both (the same for the same shapes)."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, final_state = run(**leaves)
    seed = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=seed, dtype=torch.float64).to(x.dtype) for x in (o, final_state)
    ]
    gradients = torch.autograd.grad([o, final_state], list(leaves.values()), weights)
    return {"o": o, "final_state": final_state, **dict(zip(leaves, gradients, strict=True))}


def assert_agree(actual: Tensors, expected: Tensors, limit: float) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert torch.isfinite(x).all(), name
    errors = {name: relative_error(actual[name], oracle) for name, oracle in expected.items()}
    assert max(errors.values()) < limit, errors


def assert_chunks_equal_recurrence(lengths, chunk_size, gate, state, slab_elements) -> None:
    inputs = draw(lengths, gate, state=state)
    with patch.dict(eager.SLAB_ELEMENTS, cpu=slab_elements):
        actual = results(on(lengths, chunk_size=chunk_size, implementation="eager"), inputs)
    assert_agree(actual, results(on(lengths, implementation="reference"), inputs), limit=1e-12)


cases = given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(sum),
    chunk_size=st.integers(1, 80),
    gate=st.sampled_from(list(GATES)),
    state=st.booleans(),
    slab_elements=st.sampled_from([1, 500, 1 << 17]),
)


@settings(max_examples=40, deadline=None)
@cases
def test_chunks_equal_the_recurrence(lengths, chunk_size, gate, state, slab_elements):
    assert_chunks_equal_recurrence(lengths, chunk_size, gate, state, slab_elements)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@cases
def test_chunks_equal_the_recurrence_in_many_cases(lengths, chunk_size, gate, state, slab_elements):
    assert_chunks_equal_recurrence(lengths, chunk_size, gate, state, slab_elements)


@every_gate
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [0, 1, 0], [64], [65, 128, 1, 0, 63]])
def test_chunks_equal_the_recurrence_at_the_borders_of_a_chunk(lengths, gate):
    assert_chunks_equal_recurrence(lengths, 64, gate, state=True, slab_elements=1 << 17)


@pytest.mark.parametrize("implementation", ["reference", "eager"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_the_state_passes_through_with_its_gradient(lengths, implementation):
    inputs = {name: x.requires_grad_() for name, x in draw(lengths, "mixed").items()}
    o, final_state = on(lengths, implementation=implementation)(**inputs)
    assert o.shape == (0, 2, 5)
    assert torch.equal(final_state, inputs["initial_state"])
    weight = torch.randn_like(final_state)
    (gradient,) = torch.autograd.grad(final_state, [inputs["initial_state"]], weight)
    assert torch.equal(gradient, weight)


@pytest.mark.parametrize("gate", ["mixed", "shut"])
def test_gradcheck_of_the_cpu_path(gate):
    leaves = [x.requires_grad_() for x in draw([3, 0, 6], gate, H=1, K=3, V=2).values()]
    assert torch.autograd.gradcheck(on([3, 0, 6], chunk_size=4, implementation="eager"), leaves)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum), chunk_size=st.integers(1, 40)
)
def test_packed_equals_one_by_one(lengths, chunk_size):
    def one_by_one(initial_state, **tokens):
        parts = zip(
            lengths, initial_state.split(1), *(x.split(lengths) for x in tokens.values()), strict=True
        )
        alone = [on([length], chunk_size=chunk_size)(*own, state) for length, state, *own in parts]
        return tuple(torch.cat(x) for x in zip(*alone, strict=True))

    inputs = draw(lengths, "mixed")
    assert_agree(
        results(on(lengths, chunk_size=chunk_size), inputs), results(one_by_one, inputs), limit=1e-12
    )


def test_a_sequence_never_meets_another_not_even_its_nans():
    lengths, dirty_tokens = [37, 50, 21], slice(37, 87)
    inputs = draw(lengths, "mixed", dtype=torch.float32)
    clean = results(on(lengths, chunk_size=16), inputs)
    for name, x in inputs.items():
        x[1 if name == "initial_state" else dirty_tokens] = float("nan")
    dirty = results(on(lengths, chunk_size=16), inputs)
    for name, x in clean.items():
        others = [0, 2] if "state" in name else [*range(37), *range(87, 108)]
        assert torch.equal(dirty[name][others], x[others]), name


def test_an_output_never_depends_on_a_later_token_not_even_in_its_last_bit():
    """An anchor in the middle of a tile, for one, lets later gates into the rounding of earlier outputs."""
    changed = 53
    inputs = draw([90], "mixed", dtype=torch.float32)
    before, _ = on([90])(**inputs)
    for name, other in draw([90], "shut", dtype=torch.float32, state=False).items():
        inputs[name][changed:] = other[changed:]
    after, _ = on([90])(**inputs)
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed], after[changed])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), length=st.integers(1, 60), chunk_size=st.integers(1, 32))
def test_the_final_state_of_one_part_starts_the_next(data, length, chunk_size):
    """In values, and in gradients through both parts."""
    middle = data.draw(st.integers(0, length))
    sizes = [middle, length - middle]

    def in_two(q, k, v, g, beta, initial_state):
        first, second = zip(*(x.split(sizes) for x in (q, k, v, g, beta)), strict=True)
        o_first, state = on([middle], chunk_size=chunk_size)(*first, initial_state)
        o_second, state = on([length - middle], chunk_size=chunk_size)(*second, state)
        return torch.cat([o_first, o_second]), state

    inputs = draw([length], "mixed")
    assert_agree(results(in_two, inputs), results(on([length], chunk_size=chunk_size), inputs), limit=1e-12)


def test_steps_in_a_row_equal_the_packed_form():
    """Values and gradients, for several sequences at once."""
    N, steps = 3, 9

    def step_by_step(q, k, v, g, beta, initial_state):
        outputs, state = [], initial_state
        by_step = (x.unflatten(0, (N, steps)).unbind(1) for x in (q, k, v, g, beta))
        for token in zip(*by_step, strict=True):
            o, state = kda_step(*token, state)
            outputs.append(o)
        return torch.stack(outputs, 1).flatten(0, 1), state

    inputs = draw([steps] * N, "mixed")
    assert_agree(results(step_by_step, inputs), results(on([steps] * N, chunk_size=4), inputs), limit=1e-12)


def test_a_step_leaves_the_given_state_alone():
    inputs = draw([1, 1], "mixed")
    state = inputs.pop("initial_state")
    kept = state.clone()
    kda_step(*inputs.values(), state)
    assert torch.equal(state, kept)


@pytest.mark.parametrize(
    "gate", ["mixed", "open", *(pytest.param(gate, marks=pytest.mark.slow) for gate in ("shut", "unbounded"))]
)
def test_fp32_stays_near_float64_over_4096_tokens(gate):
    inputs = draw([4096], gate, H=1, K=32, V=32, dtype=torch.float32)
    exact = {name: x.double() for name, x in inputs.items()}
    oracle = results(on([4096], implementation="reference"), exact)
    assert_agree(results(on([4096], implementation="eager"), inputs), oracle, limit=2e-6)


def test_the_gradient_of_a_nearly_closed_gate_keeps_its_digits_in_every_element():
    """A reverse cumulative sum over the chunk, the usual way, is wrong by a fifth here (measured): it takes
    small sums as differences of large ones.
    """
    inputs = draw([128], "mixed", K=32, V=32, dtype=torch.float32)
    inputs["g"] = -8 - inputs["g"].abs()
    exact = {name: x.double() for name, x in inputs.items()}
    oracle = results(on([128], implementation="reference"), exact)["g"]
    actual = results(on([128], chunk_size=64, implementation="eager"), inputs)["g"]
    by_channel = actual.permute(1, 2, 0), oracle.permute(1, 2, 0)  # [H, K, T]: neighbours are tokens
    assert worst_element(*by_channel) < 1e-5


def test_equal_keys_that_are_never_forgotten_keep_their_digits():
    """The inverse of the UT transform by a Neumann series loses everything here."""
    inputs = draw([256], "open", K=16, V=16, dtype=torch.float32)
    inputs["k"][:] = inputs["k"][0]
    inputs["beta"][:] = 0.999
    exact = {name: x.double() for name, x in inputs.items()}
    oracle = results(on([256], implementation="reference"), exact)
    assert_agree(results(on([256], chunk_size=64), inputs), oracle, limit=2e-5)


def test_half_precision_is_computed_and_kept_in_fp32():
    inputs = draw([100, 60], "mixed", K=16, V=16)
    inputs = {name: x.to(torch.bfloat16 if name in "qkv" else torch.float32) for name, x in inputs.items()}
    exact = {name: x.double() for name, x in inputs.items()}
    oracle = results(on([100, 60], implementation="reference"), exact)
    for implementation in ("reference", "eager"):
        actual = results(on([100, 60], implementation=implementation), inputs)
        assert actual["o"].dtype == torch.bfloat16
        assert relative_error(actual["final_state"], oracle["final_state"]) < 1e-6
        assert {n: x.dtype for n, x in actual.items() if n in inputs} == {
            n: x.dtype for n, x in inputs.items()
        }
        assert_agree(actual, oracle, limit=4e-3)


def test_views_of_a_wider_tensor_are_read_where_they_are():
    inputs = draw([30], "mixed", K=6, V=6)
    wide = torch.stack([inputs["q"], inputs["k"], inputs["v"]], 1)  # as one projection gives them
    views = inputs | dict(zip("qkv", wide.unbind(1), strict=True))
    assert_agree(results(on([30]), views), results(on([30]), inputs), limit=1e-15)


def test_the_default_scale_is_one_over_the_root_of_the_key_size():
    inputs = draw([9], "mixed")
    by_default, plain = on([9])(**inputs)[0], on([9], scale=1.0)(**inputs)[0]
    torch.testing.assert_close(by_default, plain * 6**-0.5)


def test_backward_keeps_the_inputs_and_one_state_a_chunk():
    inputs = {name: x.requires_grad_() for name, x in draw([70, 10], "mixed", dtype=torch.float32).items()}
    kept = kept_by(lambda: on([70, 10], chunk_size=16)(**inputs))
    states = [x for x in kept if x.shape[1:] == (5, 6)]
    assert sum(len(x) for x in states) == (5 + 1) * 2  # chunks of both sequences, times heads
    others = {x.data_ptr() for x in kept} - {x.data_ptr() for x in states}
    assert others == {inputs[name].data_ptr() for name in ("q", "k", "v", "g", "beta")}


def test_inference_lets_the_states_of_a_slab_go_when_the_next_begins():
    seen, alive = [], []

    def watched_scan(*arguments):
        alive.append(sum(states() is not None for states in seen))
        errors, entering = scan(*arguments)
        seen.append(weakref.ref(entering))
        return errors, entering

    with patch.object(eager, "scan", watched_scan), patch.dict(eager.SLAB_ELEMENTS, cpu=500), torch.no_grad():
        on([200])(**draw([200], "mixed"))
    assert len(alive) > 5
    assert max(alive) <= 1


def test_recomputing_the_forward_gives_the_same_gradients():
    def recomputed(**inputs):
        names = list(inputs)
        return checkpoint(
            lambda *x: on([50, 7])(**dict(zip(names, x, strict=True))), *inputs.values(), use_reentrant=False
        )

    inputs = draw([50, 7], "mixed")
    expected = results(on([50, 7]), inputs)
    for name, x in results(recomputed, inputs).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 5)}, r"q, k, g must be \[T, H, K\].*q \(4, 2, 5\), k \(4, 2, 6\)"),
        ({"beta": torch.zeros(4, 3)}, r"beta \(4, 3\)"),
        ({"g": torch.zeros(4, 2, 6, dtype=torch.bfloat16)}, "g must be at least float32, got torch.bfloat16"),
        ({"v": torch.zeros(4, 2, 5, dtype=torch.int64)}, "v is torch.int64"),
        ({"initial_state": torch.zeros(1, 2, 6, 5)}, r"\[N, H, V, K\] = \(1, 2, 5, 6\).*got \(1, 2, 6, 5\)"),
        ({"chunk_size": 0}, "chunk_size must be positive, got 0"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "from 0 to the 4 tokens, got 0 to 3"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "sequence 1 runs from 3 to 2"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, r"int32 \[N \+ 1\], got torch.float32"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = draw([4], "mixed", dtype=torch.float32) | {"cu_seqlens": packed([4])} | change
    with pytest.raises(InvalidInput, match=message):
        kda(**arguments)


def test_a_step_names_a_state_that_does_not_fit():
    inputs = draw([1, 1], "mixed", state=False)
    with pytest.raises(
        InvalidInput, match=r"kda_step: state must be .* = \(2, 2, 5, 6\).*got \(2, 2, 6, 5\)"
    ):
        kda_step(*inputs.values(), torch.zeros(2, 2, 6, 5))


def test_a_kernel_that_does_not_exist_is_an_error_not_a_fallback():
    with pytest.raises(KernelUnavailable, match="kda"):
        on([4], implementation="triton")(**draw([4], "mixed"))


@pytest.mark.parametrize(("K", "V"), [(0, 4), (4, 0)])
def test_heads_without_a_channel_are_refused(K, V):
    T, H = 5, 2
    q, v, beta = torch.ones(T, H, K), torch.ones(T, H, V), torch.ones(T, H)
    cu_seqlens = torch.tensor([0, 2, T], dtype=torch.int32)
    for call in (
        lambda: kda(q, q, v, -q, beta, cu_seqlens),
        lambda: kda_step(q, q, v, -q, beta, torch.ones(T, H, V, K)),
        lambda: gated_kda(q, q, v, q, beta, torch.ones(H), torch.ones(H, K), cu_seqlens),
    ):
        with pytest.raises(InvalidInput, match="K and V must be at least 1"):
            call()

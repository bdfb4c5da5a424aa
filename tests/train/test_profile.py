"""Kernels to parts: a made-up trace whose answer is known by hand, and a recorded step of a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_config

from openk3.errors import InvalidInput
from openk3.ops.traces import named
from openk3.train.profile import load, parts, predict, profile, save
from openk3.train.profile.attribution import Work, device_work, host_work
from openk3.train.profile.parts import FUNCTIONS, MODULE, PARTS, part_of
from openk3.train.profile.timeline import divide
from openk3.train.profile.trace import read_trace

MAIN, ENGINE = 101, 102
"""The system's numbers of the thread of the forward and of that of the backward."""


def host(name: str, begin: float, end: float, *, tid: int = MAIN, cat: str = "cpu_op", **args: Any) -> Any:
    event = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": begin, "dur": end - begin}
    return {**event, "args": {key.replace("_", " "): value for key, value in args.items()}}


def scope(name: str, begin: float, end: float, **rest: Any) -> Any:
    return host(name, begin, end, cat="user_annotation", **rest)


def launch(begin: float, correlation: int, *, tid: int = MAIN, driver: bool = False) -> Any:
    name, cat = ("cuLaunchKernelEx", "cuda_driver") if driver else ("cudaLaunchKernel", "cuda_runtime")
    return host(name, begin, begin + 0.5, tid=tid, cat=cat, correlation=correlation)


def gpu(name: str, begin: float, end: float, correlation: int, *, cat: str = "kernel", **args: Any) -> Any:
    event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": end - begin}
    return {**event, "args": {"correlation": correlation, **args}}


def arrow(number: int, forward: tuple[int, float], backward: tuple[int, float]) -> list[Any]:
    ends = {"s": forward, "f": backward}
    return [
        {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 7, "tid": tid, "ts": ts}
        for ph, (tid, ts) in ends.items()
    ]


def number(sequence: int, thread: int = 0) -> dict[str, int]:
    return {"Sequence_number": sequence, "Fwd_thread_id": thread}


KDA = MODULE + parts.KDA_PROJECTIONS
FORWARD = [
    scope(KDA, 0, 50),
    host("aten::linear", 1, 5, External_id=1, **number(10)),
    host("aten::mm", 2, 4, External_id=2, **number(11)),
    launch(3, 1),
    scope("openk3.gated_kda", 10, 20),
    scope("openk3.kda_gate", 11, 12),  # a function that a function calls
    host("openk3::gated_kda", 13, 18, External_id=3, **number(12)),
    launch(14, 2, driver=True),
    # An operator that makes no node has the number of the next node too.
    host("aten::empty", 22, 23, External_id=4, **number(13)),
    scope("openk3.expert_ffn", 60, 80),
    host("openk3::expert_ffn", 61, 79, External_id=5, **number(13)),
    launch(62, 3),
    launch(63, 4),
    launch(64, 5),
]
BACKWARD = [
    host("autograd::engine::evaluate_function: Experts", 100, 120, tid=ENGINE, **number(13, 1)),
    host("Experts", 101, 110, tid=ENGINE, **number(13, 1)),
    launch(102, 6, tid=ENGINE),
    host("aten::add_", 112, 118, tid=ENGINE, External_id=6),  # the engine sums a gradient into another
    launch(113, 7, tid=ENGINE),
    host("autograd::engine::evaluate_function: Kda", 130, 150, tid=ENGINE, **number(12, 1)),
    host("Kda", 131, 149, tid=ENGINE, **number(12, 1)),
    launch(132, 8, tid=ENGINE),
    host("autograd::engine::evaluate_function: MmBackward0", 151, 158, tid=ENGINE, **number(11, 1)),
    launch(152, 9, tid=ENGINE),
    host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 160, 170, tid=ENGINE),
    host("aten::copy_", 161, 169, tid=ENGINE, External_id=7),
    launch(162, 10, tid=ENGINE),
]
STEP = [
    scope("openk3.Optimizer.step", 200, 240),
    launch(201, 11, driver=True),  # without an operator around it
    scope("openk3.iterate_", 210, 230),
    launch(211, 12, driver=True),
]
KERNELS = [
    gpu("gemm", 1000, 1010, 1, **{"External id": 2}),
    gpu("_scan", 1010, 1030, 2),
    gpu("_gather", 1030, 1034, 3),
    gpu("_product", 1034, 1044, 4),
    gpu("_combine", 1044, 1046, 5),
    gpu("_weights", 1050, 1070, 6),  # 4 us in which nothing runs are before it
    gpu("add", 1060, 1070, 7),  # beside it, on another stream
    gpu("_scan_backward", 1070, 1100, 8),
    gpu("gemm", 1100, 1116, 9),
    gpu("cast", 1116, 1120, 10),
    gpu("_direction", 1120, 1123, 11),
    gpu("_symmetric", 1123, 1130, 12),
    gpu("Memcpy HtoD", 1130, 1131, 99, cat="gpu_memcpy"),
    gpu("stray", 1131, 1133, 98),
    # No work: a scope as the device shows it, a wait between streams, an instant.
    gpu(KDA, 1000, 1030, 0, cat="gpu_user_annotation"),
    gpu("Stream Wait", 1000, 1130, 13, cat="cuda_sync"),
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 1000},
]
TRACE = [*FORWARD, *BACKWARD, *STEP, *KERNELS, *arrow(1, (MAIN, 13), (ENGINE, 131))]

EXPECTED = {
    (parts.KDA_PROJECTIONS, "forward"): 10,
    (parts.KDA_PROJECTIONS, "backward"): 16,
    (parts.KDA_RECURRENCE, "forward"): 20,
    (parts.KDA_RECURRENCE, "backward"): 30,
    (parts.EXPERT_DISPATCH, "forward"): 4,
    (parts.EXPERT_PRODUCTS, "forward"): 10,
    (parts.EXPERT_COMBINE, "forward"): 2,
    (parts.EXPERT_PRODUCTS, "backward"): 10 + 10 / 2 + 10 / 2,  # half of the time that two shared
    (parts.GRADIENT_SUMS, "step"): 4,
    (parts.UPDATE, "step"): 3,
    (parts.NEWTON_SCHULZ, "step"): 7,
    (parts.COPIES, "step"): 1,
    (parts.OTHER, "step"): 2,
}
"""Microseconds."""


def test_every_kernel_of_a_trace_counts_once_in_its_part():
    division = divide(device_work(read_trace(TRACE)))
    assert {key: ns / 1e3 for key, ns in division.shares.items()} == EXPECTED
    assert division.pieces.total() == 14


def test_parts_and_idle_time_sum_to_the_time_of_the_device():
    division = divide(device_work(read_trace(TRACE)))
    assert division.whole == 133_000
    assert division.idle == 4_000
    assert division.overlapped == 10_000
    assert sum(division.shares.values()) + division.idle == division.whole
    assert division.unknown == 3_000  # the copy and the stray, whose calls the trace lacks


def test_without_the_call_of_the_driver_the_operator_that_launched_is_known_by_its_id():
    events = [event for event in TRACE if event.get("cat") != "cuda_runtime" or event["ts"] != 3]
    division = divide(device_work(read_trace(events)))
    assert division.shares[parts.KDA_PROJECTIONS, "forward"] == 10_000
    assert division.unknown == 3_000


def test_links_to_the_forward_need_no_arrows():
    events = [event for event in TRACE if event.get("cat") != "fwdbwd"]
    assert divide(device_work(read_trace(events))).shares == divide(device_work(read_trace(TRACE))).shares


def test_a_layer_that_runs_again_in_the_backward_keeps_its_part_and_both_threads_their_numbers():
    """The engine's thread has numbers of its own, and they may be those of the other thread."""
    again = [
        host("autograd::engine::evaluate_function: Last", 300, 400, tid=ENGINE, **number(14, 1)),
        scope(MODULE + parts.SHARED, 310, 330, tid=ENGINE),
        host("aten::mm", 311, 320, tid=ENGINE, **number(11)),
        launch(312, 20, tid=ENGINE),
        host("MmBackward0", 340, 350, tid=ENGINE, **number(11, 2)),
        launch(341, 21, tid=ENGINE),
        gpu("gemm", 2000, 2002, 20),
        gpu("gemm", 2002, 2007, 21),
        *arrow(2, (ENGINE, 311), (ENGINE, 340)),
    ]
    division = divide(device_work(read_trace([*TRACE, *again])))
    assert division.shares[parts.SHARED, "backward"] == 7_000
    assert division.shares[parts.KDA_PROJECTIONS, "backward"] == 16_000


def test_time_of_a_cpu_is_that_of_operators_without_what_they_call():
    division = divide(host_work(read_trace([*FORWARD, *STEP])))
    # aten::linear 4 us, aten::mm in it included; gated_kda 5; empty 1; expert_ffn 18. Scopes are nobody's.
    assert {key: ns / 1e3 for key, ns in division.shares.items()} == {
        (parts.KDA_PROJECTIONS, "forward"): 4 + 1,
        (parts.KDA_RECURRENCE, "forward"): 5,
        (parts.EXPERT_PRODUCTS, "forward"): 18,
    }
    assert division.whole == 78_000
    assert division.idle == (78 - 28) * 1_000
    assert division.by_name[parts.KDA_PROJECTIONS, "aten::mm"] == (2_000, 1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
def test_any_pieces_divide_the_time_that_at_least_one_of_them_runs(spans):
    """The oracle looks at every nanosecond."""
    work = [Work(str(i), parts.OTHER, "step", begin, begin + n) for i, (begin, n) in enumerate(spans)]
    division = divide(work)
    busy = Counter(t for begin, n in spans for t in range(begin, begin + n))
    first, last = min(begin for begin, _ in spans), max(begin + n for begin, n in spans)
    assert division.whole == last - first
    assert division.idle == sum(busy[t] == 0 for t in range(first, last))
    assert division.overlapped == sum(busy[t] > 1 for t in range(first, last))
    assert division.shares[parts.OTHER, "step"] == pytest.approx(len(busy))


def test_nothing_divides_into_nothing():
    division = divide([])
    assert (division.whole, division.idle, division.shares) == (0, 0, {})


def test_what_nothing_is_known_of_is_other_and_a_copy_a_copy():
    assert part_of("kernel", []) == parts.OTHER
    assert part_of("Memcpy", [], copy=True) == parts.COPIES
    assert part_of("Memset", ["openk3.short_conv"], copy=True) == parts.KDA_CONVOLUTION
    assert part_of("kernel", ["openk3.unheard_of", MODULE + parts.DENSE]) == parts.DENSE
    assert part_of("kernel", ["short_conv"]) == parts.OTHER  # no name of ours


def test_every_function_of_the_table_names_itself():
    """One that is renamed would fall to its caller's part unseen."""
    from openk3.model import kda, mla, protocols, residual
    from openk3.ops import attention, attnres, cross_entropy, moe, norm
    from openk3.optim import Optimizer, clipping
    from openk3.train import balance
    from openk3.train import gradients as sums

    homes = [
        kda,
        mla,
        protocols,
        residual,
        attention,
        attnres,
        cross_entropy,
        moe,
        norm,
        clipping,
        balance,
        sums,
    ]
    found = {name: getattr(home, name) for home in homes for name in FUNCTIONS if hasattr(home, name)}
    found |= {"Optimizer.step": Optimizer.step, "Optimizer.qk_clip": Optimizer.qk_clip}
    assert FUNCTIONS.keys() - found.keys() <= {"gated_mla", "route_and_project"}
    for name, function in found.items():
        assert function.__qualname__ == name
        assert hasattr(function, "__wrapped__"), name
    assert set(FUNCTIONS.values()) <= set(PARTS)


def test_a_named_function_is_a_scope_under_a_profiler_and_alone_without_one():
    @named
    def double(x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return 4 * x if twice else 2 * x

    assert double(torch.ones(1), twice=True).item() == 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        double(torch.ones(1))
    assert sum(event.name == "openk3." + double.__qualname__ for event in recorded.events()) == 1


def test_a_named_function_compiles_as_one_graph():
    @named
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.fixture(scope="module", params=[False, True], ids=["", "recompute"])
def recorded(request, tmp_path_factory):
    torch.set_num_threads(1)
    config = tiny_config(train={"steps": 1, "recompute": request.param}, optim={"qk_clip_tau": 1e-3})
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    result = profile(config, "tiny", steps=1, trace=file)
    return config, result, host_work(read_trace(json.loads(file.read_text())["traceEvents"]))


def test_a_recorded_step_is_divided_completely(recorded):
    _, result, work = recorded
    measured = result.measured
    assert sum(item.seconds for item in result.items) + measured.idle == pytest.approx(measured.whole)
    assert measured.overlapped == 0
    assert sum(item.pieces for item in result.items) == sum(piece.begins for piece in work)
    seconds = {(item.part, item.phase): item.seconds for item in result.items}
    assert seconds[parts.OTHER, "step"] < 0.1 * measured.whole
    two_phases = set(parts.MODEL_PARTS)
    assert {part for part in two_phases if not seconds.get((part, "forward"))} == set()
    assert {part for part in two_phases if not seconds.get((part, "backward"))} == set()
    once = set(parts.STEP_PARTS) - {parts.COPIES}
    assert {part for part in once if not seconds.get((part, "step"))} == set()


def test_operators_that_only_one_part_calls_are_in_it(recorded):
    _, _, work = recorded
    homes: dict[str, set[tuple[str, str]]] = {}
    for piece in work:
        homes.setdefault(piece.name, set()).add((piece.part, piece.phase))
    assert homes["aten::embedding_dense_backward"] == {(parts.EMBEDDING, "backward")}
    assert homes["_Kda"] <= {(parts.KDA_RECURRENCE, phase) for phase in ("forward", "backward")}
    assert homes["_KdaBackward"] == {(parts.KDA_RECURRENCE, "backward")}
    assert {part for part, _ in homes["aten::_grouped_mm"]} == {parts.EXPERT_PRODUCTS}
    assert {part for part, _ in homes["aten::_embedding_bag"]} == {parts.EXPERT_COMBINE}
    assert homes["aten::linalg_vector_norm"] >= {(parts.CLIPPING, "step")}
    assert (parts.EXPERT_DISPATCH, "forward") in homes["aten::searchsorted"]


def test_products_with_weights_are_where_the_layers_are(recorded):
    """Forward products of two layers and the MTP layer, two micro-batches: counted by hand from the model."""
    config, _, work = recorded
    count = Counter((p.part, p.phase) for p in work if p.begins and p.name == "aten::mm")
    times = config.train.accumulation
    again = 1 if config.train.recompute else 0
    # KDA: q, k, v as one; two of decay; beta; gate; output.
    assert count[parts.KDA_PROJECTIONS, "forward"] == times * 6
    # MLA, two of them: query, latent, content, gate, output.
    assert count[parts.MLA_PROJECTIONS, "forward"] == times * 2 * 5
    assert count[parts.SHARED, "forward"] == times * 2 * 3
    assert count[parts.DENSE, "forward"] == times * 3
    # Score, down, up.
    assert count[parts.ROUTER, "forward"] == times * 2 * 3
    for part in (parts.KDA_PROJECTIONS, parts.MLA_PROJECTIONS, parts.SHARED, parts.DENSE, parts.ROUTER):
        assert count[part, "backward"] == (2 + again) * count[part, "forward"], part


def test_a_profile_comes_back_from_its_file(recorded, tmp_path):
    _, result, _ = recorded
    save(result, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "items": [{"x": 1}]}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"x\.json: is "):
        load(tmp_path / "x.json")


def test_wrong_requests_are_refused():
    with pytest.raises(InvalidInput, match="steps must be positive"):
        profile(tiny_config(), "tiny", steps=0)
    with pytest.raises(InvalidInput, match="no figures of 'abacus'"):
        predict(tiny_config(), "tiny", "abacus")

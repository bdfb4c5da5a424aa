"""Which part of a model an operator's time is counted for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import MODEL, tiny_config

from openk3.cli.main import main
from openk3.config import ModelConfig
from openk3.model import K3, initialise
from openk3.train.flops import model_flops
from openk3.train.profile import (
    BACKWARD,
    DEPTH,
    GRADIENTS,
    LOSS,
    MARK,
    OTHERS,
    UNKNOWN,
    UPDATE,
    by_part,
    floors,
    profile_step,
    profile_training,
)

CPU, GPU = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(
    name: str, start: float, parent: Any = None, node: int = -1, kernels: tuple[float, ...] = ()
) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=CPU,
        time_range=SimpleNamespace(start=start, end=start),
        cpu_parent=parent,
        sequence_nr=node,
        kernels=[SimpleNamespace(duration=duration) for duration in kernels],
        self_cpu_time_total=0.0,
    )


def kernel(duration: float) -> Any:
    return SimpleNamespace(name="k", device_type=GPU, time_range=SimpleNamespace(start=0.0, end=duration))


def test_kernels_go_to_the_innermost_part_and_those_of_the_backward_to_that_of_the_forward():
    outer = event(f"{MARK}experts", 0)
    inner = event(f"{MARK}feed-forward", 1, outer)
    # An operator without a node saw the number that the next part's operator was given.
    events = [
        outer,
        event("aten::count", 0.5, outer, node=7, kernels=(1.0,)),
        inner,
        event("aten::mm", 2, inner, node=7, kernels=(10.0, 20.0)),
        event("aten::mm", 3, outer, node=8, kernels=(100.0,)),
        event("aten::embed", 4, None, node=9, kernels=(1000.0,)),
    ]
    nodes = [event(f"{BACKWARD}MmBackward0", 5 + n, None, node=n) for n in (7, 8)]
    sums = event(f"{BACKWARD}torch::autograd::AccumulateGrad", 20, None, node=2**40)
    events += [
        *nodes,
        event("aten::mm", 15, nodes[0], kernels=(2.0,)),
        event("aten::mm", 16, nodes[1], kernels=(4.0,)),
        sums,
        event("aten::add_", 21, sums, kernels=(8.0,)),
    ]
    times = by_part([*events, *map(kernel, (1, 10, 20, 100, 1000, 2, 4, 8, 5))], gpu=True)
    found = {name: (1e6 * at.forward, 1e6 * at.backward, at.count) for name, at in times.items()}
    assert found == {
        OTHERS: pytest.approx((1000, 0, 1)),
        "experts": pytest.approx((101, 4, 3)),
        "feed-forward": pytest.approx((30, 2, 3)),
        GRADIENTS: pytest.approx((0, 8, 1)),
        UNKNOWN: pytest.approx((5, 0, 1)),
    }
    assert next(iter(times)) == OTHERS


def test_every_part_of_a_step_has_its_time_forward_and_backward_and_nothing_is_lost():
    found = profile_training(tiny_config(train={"mtp_weight": 0.0}, model={"mtp_layers": 0}), warm=1)
    assert {"KDA", "MLA", "experts", "feed-forward", LOSS, DEPTH, GRADIENTS, UPDATE} <= set(found.parts)
    for name in ("KDA", "MLA", "experts", "feed-forward", LOSS, DEPTH):
        assert found.parts[name].forward > 0, name
        assert found.parts[name].backward > 0, name
    assert found.parts[GRADIENTS].forward == 0
    assert found.parts[UPDATE].backward == 0
    assert found.tokens == 128


def test_a_part_that_does_more_takes_longer():
    model = K3(ModelConfig.model_validate({**MODEL, "mtp_layers": 0}))
    initialise(model, 0)
    attention = model.layers[0].self_attn
    forward = attention.forward

    def slow(*args: Any) -> Any:
        for _ in range(300):
            torch.ones(1000, 100).sum()
        return forward(*args)

    attention.forward = slow
    tokens = torch.arange(32)
    cu_seqlens = torch.tensor([0, 32], dtype=torch.int32)
    parts = profile_step(model, lambda: model.loss(tokens, tokens, cu_seqlens).total.backward())
    assert next(iter(parts)) == "KDA"
    assert parts["KDA"].forward > parts["KDA"].backward
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks


def test_floors_hold_all_flops_of_the_model():
    config = tiny_config(train={"mtp_weight": 0.0}, model={"mtp_layers": 0}).model
    lengths = [20, 44]
    found = floors(config, lengths, 2)
    assert sum(floor.flops for floor in found.values()) == model_flops(config, lengths).total
    row = 64 * config.hidden_size * 2
    # Sources of the mixes: embedding; embedding, sum; the same; bank of two, sum; the same.
    assert found[DEPTH].bytes == sum(3 * sources + 2 for sources in (1, 2, 2, 3, 3)) * row
    table = config.vocab_size * config.hidden_size
    assert found[LOSS].bytes == 2 * row + 3 * 2 * table


def test_the_command_prints_a_line_for_each_part(tmp_path, monkeypatch, capsys):
    import tomli_w

    monkeypatch.chdir(tmp_path)
    table = {
        "model": {**MODEL, "mtp_layers": 0},
        "data": {"kind": "given"},
        "train": {"steps": 2, "context": 32, "micro_batch_tokens": 64, "device": "cpu"},
    }
    with open("tiny.toml", "wb") as file:
        tomli_w.dump(table, file)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "tiny.toml", "--warm", "1", "--train.context", "64"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    for name in ("KDA", "MLA", "experts", LOSS, DEPTH):
        assert name in printed
    assert "64 tokens; least times" in printed

"""One training step against what a step is defined to be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_run import tiny_config, tiny_data, tiny_run, without_timing
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import IGNORED, Batch, collate
from openk3.errors import InvalidInput, TrainingDiverged
from openk3.model import K3, ForwardRecord, initialise
from openk3.ops.quantile_balance import average_bias, bias_from_histogram
from openk3.optim import clip_factors
from openk3.train.balance import routers
from openk3.train.reduce import OneProcess
from openk3.train.state import TrainState, begin
from openk3.train.step import launch, read, update


def fresh(tmp_path, data=None, **changes: Any):
    config = tiny_config(**changes)
    store = CheckpointStore(tmp_path / "none")
    return config, begin(config, data or tiny_data(config), store, init_from=None, reduction=OneProcess())


def step(state: TrainState, config) -> dict[str, Any]:
    return read(state, update(state, config, OneProcess(), launch(state, config, OneProcess())), None)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def micro_batches(state: TrainState) -> tuple[Batch, ...]:
    """The batches of the next step, without taking them."""
    at = state.loader.next_sample
    batches = next(state.loader)
    state.loader.next_sample = at
    return batches


def gradients(model: K3) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    flat = {name: t.clone() for name, t in state.model.state_dict().items()}
    for name, entries in state.optimizer.state_dict().items():
        flat |= {f"{name} {key}": t.clone() for key, t in entries.items()}
    return flat


def record_of(model: K3, batch: Batch) -> ForwardRecord:
    record = ForwardRecord(token_mask=batch.token_mask)
    model.loss(batch.tokens, batch.targets, batch.cu_seqlens, mtp_weight=0.1, record=record)
    return record


class _UnevenTargets:
    """A stream whose samples have very different numbers of targets, and some padding."""

    tokens_per_sample = 32

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def sample(self, index: int) -> Any:
        sample = self._stream.sample(index)
        targets = sample.targets.copy()
        targets[: 30 - 9 * (index % 4)] = IGNORED
        mask = targets != IGNORED
        return type(sample)(sample.tokens, targets, sample.lengths, mask)

    def epoch(self, index: int) -> int:
        return 0

    def identity(self) -> dict[str, int]:
        return {}


def uneven(config) -> Any:
    data = tiny_data(config)
    return type(data)(_UnevenTargets(data.stream), data.validation)


def test_micro_batches_with_unequal_targets_give_the_gradient_of_the_whole_step(tmp_path, monkeypatch):
    """The oracle is one batch that holds all samples: mean over its valid tokens, MTP weighted in."""
    config = tiny_config(train={"accumulation": 4, "micro_batch_tokens": 32})
    _, state = fresh(tmp_path, uneven(config), train={"accumulation": 4, "micro_batch_tokens": 32})
    whole = collate([state.loader.stream.sample(i) for i in range(4)])
    model = K3(config.model)
    model.load_state_dict(state.model.state_dict())
    record = ForwardRecord(token_mask=whole.token_mask)
    loss = model.loss(whole.tokens, whole.targets, whole.cu_seqlens, mtp_weight=0.1, record=record)
    (loss.total / loss.count).backward()
    expected = gradients(model)

    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(state.optimizer, "step", lambda lr, scale: seen.update(gradients(state.model)))
    row = step(state, config.model_copy(update={"optim": config.optim.model_copy(update={"grad_clip": 1e9})}))

    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-4, atol=2e-6, msg=name)
    assert row["loss"] == pytest.approx(loss.next_token.item() / loss.count.item(), rel=1e-6)
    assert row["tokens"] == int(whole.token_mask.sum())
    assert row["load"] == {str(layer): counts.tolist() for layer, counts in record.load.items()}
    firsts = int(whole.token_mask[whole.cu_seqlens[:-1].long()].sum())  # which do not count in the MTP router
    assert {layer: sum(counts) for layer, counts in row["load"].items()} == {
        "1": 2 * row["tokens"],
        "2": 2 * (row["tokens"] - firsts),
    }


def test_every_router_gets_one_bias_from_the_pooled_counts_of_the_step(tmp_path):
    config, state = fresh(tmp_path)
    step(state, config)  # biases that are not zero, and an average with a history
    before = {layer: r.e_score_correction_bias.clone() for layer, r in routers(state.model).items()}
    assert set(before) == {1, 2}  # the second layer's, and the MTP layer's
    records = [record_of(state.model, batch) for batch in micro_batches(state)]

    step(state, config)

    moe = config.model.moe
    for layer, router in routers(state.model).items():
        pooled = sum(record.histogram[layer] for record in records)
        wanted = bias_from_histogram(pooled, before[layer], moe.experts_per_token)
        expected = average_bias(before[layer], wanted, 1, moe.qb_ema)
        assert torch.equal(router.e_score_correction_bias, expected)
        assert not torch.equal(router.e_score_correction_bias, before[layer])


def test_the_sign_rule_moves_each_bias_by_its_step_against_the_pooled_load(tmp_path):
    config, state = fresh(tmp_path, model={"moe": {**_moe(), "balancing": "sign", "sign_step": 0.01}})
    records = [record_of(state.model, batch) for batch in micro_batches(state)]
    step(state, config)
    for layer, router in routers(state.model).items():
        load = sum(record.load[layer] for record in records).double()
        expected = 0.01 * torch.sign(load.mean() - load)
        torch.testing.assert_close(router.e_score_correction_bias.double(), expected)


def _moe() -> dict[str, Any]:
    from tiny_run import MODEL

    return dict(MODEL["moe"])


def test_without_balancing_the_biases_stay(tmp_path):
    config, state = fresh(tmp_path, model={"moe": {**_moe(), "balancing": "none"}})
    step(state, config)
    assert all(bool((r.e_score_correction_bias == 0).all()) for r in routers(state.model).values())


def test_qk_clip_takes_the_largest_logit_of_all_micro_batches(tmp_path, monkeypatch):
    config, state = fresh(tmp_path, optim={"qk_clip_tau": 1e-3})
    records = [record_of(state.model, batch) for batch in micro_batches(state)]
    given: dict[int, torch.Tensor] = {}
    clip = state.optimizer.qk_clip

    def spy(max_logits, scale):
        given.update({layer: logits.clone() for layer, logits in max_logits.items()})
        return clip(max_logits, scale)

    monkeypatch.setattr(state.optimizer, "qk_clip", spy)
    row = step(state, config)

    assert set(given) == {1, 2}
    for layer, logits in given.items():
        expected = torch.stack([record.max_logit[layer] for record in records]).amax(0)
        assert torch.equal(logits, expected)
        assert row["clipped_heads"][str(layer)] == int(
            (clip_factors({layer: expected}, 1e-3)[layer] < 1).sum()
        )
    assert any(row["clipped_heads"].values())


def test_a_spike_is_skipped_and_changes_nothing_but_the_place_in_the_data(tmp_path, monkeypatch):
    config, state = fresh(tmp_path, train={"spike": {"history": 2, "multiple": 3.0}})
    step(state, config)
    step(state, config)
    before, place = everything(state), state.loader.next_sample
    monkeypatch.setattr(OneProcess, "gradient_norm", lambda self, parameters: scalar(1e6))

    row = step(state, config)

    after = everything(state)
    assert row["skipped"] is True
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert state.loader.next_sample > place
    assert state.step == 3
    assert state.updates == 2
    assert all(p.grad is None for p in state.model.parameters())


def test_a_gradient_that_is_not_finite_is_skipped(tmp_path, monkeypatch):
    config, state = fresh(tmp_path)
    before = everything(state)
    monkeypatch.setattr(OneProcess, "gradient_norm", lambda self, parameters: scalar(math.nan))
    assert step(state, config)["skipped"] is True
    assert all(torch.equal(tensor, everything(state)[name]) for name, tensor in before.items())


def test_a_run_of_spikes_ends_it_and_names_step_and_checkpoint(tmp_path, monkeypatch):
    config = tiny_config(train={"spike": {"patience": 3, "history": 1}, "steps": 20})
    monkeypatch.setattr(
        OneProcess,
        "gradient_norm",
        lambda self, parameters: scalar(math.inf if _rows(tmp_path) >= 4 else 1.0),
    )
    with pytest.raises(TrainingDiverged) as caught:
        tiny_run(config, tmp_path)
    assert str(caught.value).startswith("step 7: 3 gradients in a row were spikes")
    assert str(tmp_path / "checkpoints" / "step-00000004") in str(caught.value)


def _rows(folder) -> int:
    path = folder / "metrics.jsonl"
    return len(read_jsonl(path)) if path.exists() else 0


def poisoned_at(monkeypatch, number: int, accumulation: int = 2) -> None:
    """The loss of step `number` of the next run is NaN."""
    loss, calls = K3.loss, 0

    def poisoned(self, *args, **kwargs):
        nonlocal calls
        calls += self.training
        out = loss(self, *args, **kwargs)
        factor = math.nan if self.training and (calls - 1) // accumulation + 1 == number else 1.0
        return type(out)(out.total, out.next_token * factor, out.mtp, out.mtp_count, out.count)

    monkeypatch.setattr(K3, "loss", poisoned)


@pytest.mark.parametrize("number", [6, 7, 8], ids=["after an evaluation", "read late", "before a checkpoint"])
def test_a_loss_that_is_not_a_number_ends_the_run_and_leaves_its_checkpoint_as_it_was(
    tmp_path, monkeypatch, number
):
    poisoned_at(monkeypatch, number)
    with pytest.raises(TrainingDiverged) as caught:
        tiny_run(tiny_config(), tmp_path)
    message = str(caught.value)
    assert f"step {number}: the loss is nan" in message
    assert str(tmp_path / "checkpoints" / "step-00000004") in message
    assert _rows(tmp_path) == number - 1
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [4]
    assert all(bool(t.isfinite().all()) for t in store.load(4)["model"].values())


def test_a_step_with_such_a_loss_changes_nothing_before_it_is_read(tmp_path, monkeypatch):
    config, state = fresh(tmp_path)
    step(state, config)
    before = everything(state)
    poisoned_at(monkeypatch, 1)
    unread = update(state, config, OneProcess(), launch(state, config, OneProcess()))
    assert all(torch.equal(tensor, everything(state)[name]) for name, tensor in before.items())
    with pytest.raises(TrainingDiverged, match="the loss is nan"):
        read(state, unread, None)


def test_a_step_read_while_the_next_one_runs_has_the_row_it_would_have_had(tmp_path):
    """With a guard that skips now and then, whose limits need all rows before."""
    changes = {"train": {"spike": {"multiple": 1.01, "history": 2, "patience": 100}}}
    config, late = fresh(tmp_path, **changes)
    _, at_once = fresh(tmp_path, **changes)
    expected = [step(at_once, config) for _ in range(12)]
    rows, unread = [], None
    for _ in range(12):
        launched = launch(late, config, OneProcess())
        rows += [read(late, unread, None)] if unread else []
        unread = update(late, config, OneProcess(), launched)
    rows.append(read(late, unread, None))
    assert without_timing(rows) == without_timing(expected)
    assert 0 < sum(row["skipped"] for row in rows) < 10
    assert all(torch.equal(tensor, everything(late)[name]) for name, tensor in everything(at_once).items())


def test_the_learning_rate_follows_the_schedule_and_gradients_are_clipped(tmp_path):
    config, state = fresh(tmp_path, schedule={"warmup": 0.5}, optim={"lr": 0.012, "grad_clip": 1e-3})
    rows = [step(state, config) for _ in range(6)]
    assert [row["lr"] for row in rows] == pytest.approx([0.002 * (i + 1) for i in range(6)])
    assert all(row["grad_norm"] > 1e-3 for row in rows)  # the norm is the one before clipping


def test_bf16_accumulates_gradients_in_fp32_and_keeps_fp32_masters(tmp_path, monkeypatch):
    config, state = fresh(tmp_path, train={"precision": "bf16"})
    dtypes = set()
    apply = state.optimizer.step

    def spy(lr: float, scale: torch.Tensor) -> None:
        dtypes.update(p.grad.dtype for p in state.model.parameters() if p.grad is not None)
        apply(lr, scale)

    monkeypatch.setattr(state.optimizer, "step", spy)
    losses = [step(state, config)["loss"] for _ in range(6)]
    assert dtypes == {torch.float32}
    assert losses[-1] < losses[0]
    weight = state.model.embed_tokens.weight
    master = state.optimizer.state_dict()["embed_tokens.weight"]["master"]
    assert weight.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    assert not torch.equal(master, weight.float())


class _Widened(TorchDispatchMode):
    """Elements of half-precision tensors that were written out in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            self.elements += args[0].numel() if made.dtype == torch.float32 else 0
        return made


def test_bf16_gradients_of_micro_batches_add_up_to_the_bits_of_fp32_sums(tmp_path):
    """The table's own gradient is a sum in fp32 too: nothing of it is rounded twice."""
    config, state = fresh(tmp_path, train={"precision": "bf16", "accumulation": 3})
    model, batches = state.model, micro_batches(state)
    valid = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    weights = dict(model.named_parameters())
    shared = {name for name, p in weights.items() if p is model.embed_tokens.weight or p is model.head_weight}
    expected: dict[str, torch.Tensor] = {}
    for batch in batches:
        loss = model.loss(
            batch.tokens, batch.targets, batch.cu_seqlens, mtp_weight=config.train.mtp_weight,
            record=ForwardRecord(token_mask=batch.token_mask),
        )  # fmt: skip
        made = torch.autograd.grad(loss.total / valid, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, made, strict=True):
            if gradient is not None:
                assert (gradient.dtype == torch.float32) == (
                    name in shared or weights[name].dtype.itemsize == 4
                )
                expected[name] = expected.get(name, 0) + gradient.float()
    launch(state, config, OneProcess())
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, expected[name]), name


def test_only_the_first_micro_batchs_gradients_are_written_out_in_fp32(tmp_path):
    def widened(accumulation: int) -> tuple[int, int]:
        """Elements, and those of gradients of half-precision weights but the table."""
        config, state = fresh(tmp_path, train={"precision": "bf16", "accumulation": accumulation})
        with _Widened() as mode:
            launch(state, config, OneProcess())
        halves = [p for p in state.model.parameters() if p.grad is not None and p.dtype == torch.bfloat16]
        table = state.model.embed_tokens.weight
        return mode.elements, sum(p.numel() for p in halves if p is not table)

    (one, own), (two, _), (three, _) = (widened(n) for n in (1, 2, 3))
    assert two - one == three - two  # what a forward and a backward widen, and the table's gradients
    assert one - (two - one) == own > 0


def test_training_learns_what_there_is_to_learn(tmp_path):
    """Counting by a fixed step is all but deterministic from the third token on."""
    result = tiny_run(tiny_config(train={"steps": 60}, optim={"lr": 0.02}), tmp_path)
    assert result.last["val_loss"] < 0.7 * math.log(config_vocab())


def config_vocab() -> int:
    return tiny_config().model.vocab_size


def saved_bytes(model: K3, batch: Batch) -> int:
    """Bytes kept for the backward between forward and backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(batch.tokens, batch.targets, batch.cu_seqlens, record=ForwardRecord())
        total = sum(kept.values())
    del loss
    return total


def test_recompute_keeps_far_fewer_bytes_and_changes_neither_gradients_nor_counts(tmp_path):
    changes: dict[str, Any] = {
        "model": {"num_layers": 8, "mtp_layers": 0},
        "train": {"mtp_weight": 0.0, "context": 128, "micro_batch_tokens": 512},
    }
    config, _ = fresh(tmp_path, **changes)
    model = K3(config.model)
    initialise(model, 0)
    batch = collate([tiny_data(config).stream.sample(i) for i in range(4)])

    def run(recompute: bool) -> tuple[int, dict[str, torch.Tensor], ForwardRecord]:
        model.recompute = recompute
        model.zero_grad()
        size = saved_bytes(model, batch)
        record = ForwardRecord()
        loss = model.loss(batch.tokens, batch.targets, batch.cu_seqlens, record=record)
        loss.total.backward()
        return size, gradients(model), record

    plain_bytes, plain, plain_record = run(recompute=False)
    bytes_kept, again, record = run(recompute=True)

    assert bytes_kept < 0.25 * plain_bytes
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name
    for layer, counts in plain_record.load.items():
        assert torch.equal(record.load[layer], counts)
        assert torch.equal(record.histogram[layer], plain_record.histogram[layer])
        assert int(counts.sum()) == config.model.moe.experts_per_token * len(batch.tokens)


def test_recompute_gives_the_run_without_it(tmp_path):
    plain = tiny_run(tiny_config(train={"steps": 4}), tmp_path / "plain")
    again = tiny_run(tiny_config(train={"steps": 4, "recompute": True}), tmp_path / "again")
    for (name, one), other in zip(
        plain.model.state_dict().items(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_run_does_not_begin_with_a_tensor_that_no_rule_has_filled(tmp_path, monkeypatch):
    def forgetful(model: K3, seed: int) -> None:
        initialise(model, seed)
        torch.nn.init.zeros_(model.layers[0].self_attn.dt_bias)

    monkeypatch.setattr("openk3.train.state.initialise", forgetful)
    with pytest.raises(
        InvalidInput, match=r"initial weights are wrong: layers\.0\.self_attn\.dt_bias: mean 0"
    ):
        tiny_run(tiny_config(), tmp_path)
    assert _rows(tmp_path) == 0


def test_a_first_loss_far_from_ln_vocabulary_is_warned_of(tmp_path):
    wrong = tiny_run(tiny_config(train={"steps": 1}, model={"initializer_range": 2.0}), tmp_path / "wrong")
    right = tiny_run(tiny_config(train={"steps": 1}), tmp_path / "right")
    assert "ln(vocabulary) is 4.159" in wrong.last["warning"]
    assert "warning" not in right.last
    assert right.last["loss"] == pytest.approx(right.last["expected_first_loss"], abs=0.3)

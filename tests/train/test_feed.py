"""What a feed gives, and what a readback brings back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_run import tiny_config, tiny_data

from openk3.data import Loader
from openk3.data.windows import Sample
from openk3.train.feed import Feed
from openk3.train.readback import Lap, Readback

CPU = torch.device("cpu")


def loader(stream=None) -> Loader:
    config = tiny_config()
    return Loader(stream or tiny_data(config).stream, 4, 2)


def test_a_feed_gives_the_loaders_steps_and_moves_its_place():
    fed, plain = loader(), loader()
    with Feed(fed, CPU) as feed:
        for _ in range(3):
            for batch, expected in zip(next(feed), next(plain), strict=True):
                assert torch.equal(batch.local.tokens, expected.tokens)
                assert torch.equal(batch.host.cu_seqlens, expected.cu_seqlens)
                assert batch.tokens == len(expected.tokens)
                assert batch.valid == int((expected.targets != -100).sum())
            assert fed.state_dict() == plain.state_dict()


def test_a_loader_that_was_set_elsewhere_is_obeyed():
    own, other = loader(), loader()
    with Feed(own, CPU) as feed:
        first = next(feed)
        next(feed)
        own.load_state_dict(other.state_dict())
        again = next(feed)
    assert all(torch.equal(a.host.tokens, b.host.tokens) for a, b in zip(first, again, strict=True))


class Padded:
    """Samples whose last quarter is padding."""

    tokens_per_sample = 8

    def sample(self, index: int) -> Sample:
        mask = np.arange(8) < 6
        return Sample(np.arange(8) + index, np.where(mask, 1, -100), [8], mask)

    def epoch(self, index: int) -> int:
        return 0

    def identity(self) -> dict[str, int]:
        return {}


def test_padding_is_not_counted_as_tokens():
    with Feed(loader(Padded()), CPU) as feed:
        assert [(batch.tokens, batch.valid) for batch in next(feed)] == [(12, 12), (12, 12)]


def test_a_readback_brings_every_value_back_in_its_shape_and_dtype():
    given = {
        ("count", "0"): torch.tensor([2**53, 7, -1]),
        ("single", ""): torch.tensor([[1 / 3, math.inf], [math.nan, -0.0]]),
        ("half", ""): torch.tensor([1.5], dtype=torch.bfloat16),
        ("double", ""): torch.tensor(math.pi, dtype=torch.float64),
        ("flag", ""): torch.tensor(True),
        ("nothing", ""): torch.zeros(0, dtype=torch.int64),
    }
    found = Readback(given).wait()
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_readback_does_not_change_with_what_it_was_made_from():
    tensor = torch.tensor([1.0], dtype=torch.float64)
    readback = Readback({("a", ""): tensor})
    tensor.fill_(2)
    assert float(readback.wait()["a", ""]) == 1


def test_a_lap_is_the_time_between_its_ends(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("openk3.train.readback.time.perf_counter", lambda: next(clock))
    lap = Lap(CPU)
    lap.stop()
    assert lap.seconds() == pytest.approx(2.5)

"""A graph of launches: run, captured once, then repeated with each call's numbers; the card is a stand-in."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from openk3.optim.fused.replay import Replay


class Graph:
    """Repeats what was launched inside its capture."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.launched = []

    def replay(self):
        for work, *arguments in self.launched:
            work(*arguments)


@contextmanager
def capture(graph, capture_error_mode):
    assert capture_error_mode == "thread_local"  # the loader's thread pins memory meanwhile
    Graph.capturing = graph
    yield
    Graph.capturing = None


@pytest.fixture
def _card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.usefixtures("_card")
def test_every_call_does_its_work_once_with_its_own_numbers():
    done, launches = [], []

    def work(lr, scale):
        done.append((float(lr), float(scale)))

    def launch(lr, scale):
        launches.append(Graph.capturing is not None)
        if Graph.capturing is None:
            work(lr, scale)
        else:
            Graph.capturing.launched.append((work, lr, scale))

    repeated = Replay(launch)
    wanted = [(0.1 * n, float(n % 3)) for n in range(5)]
    for lr, scale in wanted:
        repeated(torch.tensor(lr, dtype=torch.float64), torch.tensor(scale))
    assert done == wanted
    assert launches == [False, True]

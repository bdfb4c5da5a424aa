"""Steps and ranks: the same samples for any number of ranks, and no sample lost or doubled by a restart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import contents, joined, numbered_documents, stream_by_definition, windows_by_definition

from openk3.data.batch import Batch
from openk3.data.examples import Example, Examples
from openk3.data.loader import Loader, validation_batches
from openk3.data.mixing import Mixture
from openk3.data.windows import Windows
from openk3.errors import InvalidInput

DOCUMENTS = numbered_documents([3, 17, 1, 40, 8, 8, 25, 2])
SEED, CONTEXT, PER_STEP = 11, 6, 12


def windows() -> Windows:
    return Windows(DOCUMENTS, CONTEXT, SEED)


def mixture() -> Mixture:
    return Mixture(
        {"a": windows(), "b": Windows(numbered_documents([50, 30]), CONTEXT, 2)}, {"a": 0.7, "b": 0.3}
    )


def examples() -> Examples:
    made = [Example(list(range(1 + i % 6)), [True] * (1 + i % 6)) for i in range(23)]
    return Examples(made, CONTEXT, SEED, pad_id=0)


STREAMS = [windows, mixture, examples]


def steps(stream, count: int, world: int, per_batch: int):
    """The batches of each step over all ranks, in order of ranks."""
    loaders = [Loader(stream(), PER_STEP, per_batch, rank=rank, world=world) for rank in range(world)]
    return [[batch for loader in loaders for batch in next(loader)] for _ in range(count)]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("world", "per_batch"), [(1, 3), (2, 2), (2, 6), (3, 4), (4, 1), (12, 1)])
def test_the_samples_of_a_step_do_not_depend_on_ranks_and_micro_batches(stream, world, per_batch):
    reference = steps(stream, 7, 1, PER_STEP)
    for mine, (whole,) in zip(steps(stream, 7, world, per_batch), reference, strict=True):
        assert len(mine) == PER_STEP // per_batch
        assert joined([contents(batch) for batch in mine]) == contents(whole)


def test_a_run_reads_the_stream_of_windows_from_its_start():
    stream = stream_by_definition(DOCUMENTS, SEED, epochs=10)
    expected = windows_by_definition(stream, CONTEXT)
    for step, batches in enumerate(steps(windows, 5, 1, 4)):
        for i, batch in enumerate(batches):
            first = step * PER_STEP + i * 4
            assert contents(batch) == joined(expected[first : first + 4])


def test_a_batch_has_the_types_the_model_wants():
    (batch, *_) = next(Loader(windows(), PER_STEP, 4))
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert (batch.cu_seqlens.dtype, batch.token_mask) == (torch.int32, None)
    assert (len(batch.tokens), batch.cu_seqlens[0], batch.cu_seqlens[-1]) == (24, 0, 24)
    (padded, *_) = next(Loader(examples(), PER_STEP, 4))
    assert (padded.token_mask.dtype, len(padded.token_mask)) == (torch.bool, 24)
    assert isinstance(padded.to("cpu"), Batch)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_restart_goes_on_where_the_run_was_also_with_other_ranks(stream, stop):
    whole = steps(stream, 8, 1, PER_STEP)
    before = Loader(stream(), PER_STEP, 3)
    for _ in range(stop):
        next(before)
    state = before.state_dict()
    assert all(type(value) is int for value in state.values())
    assert Loader(stream(), PER_STEP, 2, rank=1, world=2).state_dict().keys() == state.keys()
    ranks = [Loader(stream(), PER_STEP, 2, rank=rank, world=3) for rank in range(3)]
    for loader in ranks:
        loader.load_state_dict(state)
    for (expected,) in whole[stop:]:
        parts = [contents(batch) for loader in ranks for batch in next(loader)]
        assert joined(parts) == contents(expected)
    assert len({str(loader.state_dict()) for loader in ranks}) == 1


def test_a_state_of_another_run_is_refused_by_name():
    state = Loader(windows(), PER_STEP, 1).state_dict()
    others = {
        "seed 11, this one has 12": Windows(DOCUMENTS, CONTEXT, 12),
        "context 6, this one has 5": Windows(DOCUMENTS, 5, SEED),
        "corpus_tokens 104, this one has 9": Windows(numbered_documents([9]), CONTEXT, SEED),
    }
    for message, stream in others.items():
        with pytest.raises(InvalidInput, match=message):
            Loader(stream, PER_STEP, 1).load_state_dict(state)
    with pytest.raises(InvalidInput, match="a state has"):
        Loader(mixture(), PER_STEP, 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("per_step", "per_batch", "rank", "world", "message"),
    [
        (12, 5, 0, 1, "multiple of 5"),
        (12, 4, 0, 2, "multiple of 8"),
        (0, 1, 0, 1, "must be positive"),
        (12, 1, 2, 2, "rank below"),
    ],
)
def test_steps_that_ranks_cannot_share_evenly_are_refused(per_step, per_batch, rank, world, message):
    with pytest.raises(InvalidInput, match=message):
        Loader(windows(), per_step, per_batch, rank=rank, world=world)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=10),
    st.integers(1, 15),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_validation_reads_every_token_once_over_all_ranks(lengths, context, per_batch, world):
    documents = numbered_documents(lengths)
    ranks = [
        list(validation_batches(documents, context, per_batch, rank=rank, world=world))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = [contents(batch) for together in zip(*ranks, strict=True) for batch in together]
    expected = windows_by_definition(stream_by_definition(documents, 0, 1, shuffled=False), context)
    assert joined(in_order) == joined(expected)
    assert all(len(batch.tokens) <= per_batch * context for batches in ranks for batch in batches)


def test_validation_in_windows_of_nothing_is_refused():
    with pytest.raises(InvalidInput, match="must be positive"):
        next(validation_batches(DOCUMENTS, 0, 1))

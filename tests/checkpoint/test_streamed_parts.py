"""The parts of streaming: the budget's division, slots, read-ahead, both ends; each against plain code."""

from __future__ import annotations

import random
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.official_folders import K3_FORM, saved
from openk3.checkpoint.official.folder import OfficialFolder
from openk3.checkpoint.streamed import ends
from openk3.checkpoint.streamed.budget import Needs, divide
from openk3.checkpoint.streamed.ends import Head, embedding_rows
from openk3.checkpoint.streamed.experts import ExpertSlots
from openk3.checkpoint.streamed.memory import ALIGNMENT, Layout, allocate
from openk3.checkpoint.streamed.trunk import StoredLayer, Trunk
from openk3.checkpoint.streamed.usage import Usage
from openk3.errors import CheckpointError, InvalidInput
from openk3.model.decoder import DecoderLayer
from openk3.model.layers import At
from openk3.model.protocols import LOCAL

MANY_LAYERS = K3_FORM.model_copy(update={"num_layers": 7})


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with OfficialFolder.open(
        saved(tmp_path_factory.mktemp("k3") / "c", MANY_LAYERS, experts="mxfp4")
    ) as opened:
        yield opened


class Watched:
    """A reader that notes what it reads, in order, and may be made to wait first."""

    def __init__(self, reader, before=lambda name: None):
        self._reader = reader
        self._before = before
        self.names = []

    def read_into(self, name, out):
        self._before(name)
        self.names.append(name)
        self._reader.read_into(name, out)

    def __getattr__(self, name):
        return getattr(self._reader, name)


# --------------------------------------------------------------------------------------------------- budget

sizes = st.integers(1, 1000)
needs = st.builds(
    Needs,
    always=st.integers(0, 1000),
    layers=st.lists(sizes, min_size=1, max_size=12).map(tuple),
    head=st.just(500),
    head_block=st.integers(1, 500),
    expert=sizes,
    experts=st.integers(0, 40),
    chosen=st.integers(0, 8),
)


def bytes_held(division, of):
    """What a division holds, added up from what it says."""
    pinned = [size for i, size in enumerate(of.layers) if i not in division.streamed]
    buffers = 2 * max((of.layers[i] for i in division.streamed), default=0)
    head = of.head if division.head_pinned else 2 * of.head_block
    return of.always + sum(pinned) + buffers + head + division.slots * of.expert


def least_of(of):
    with pytest.raises(InvalidInput, match="are too few") as error:
        divide(0, of)
    return int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))


@given(needs, st.integers(0, 4000))
@settings(max_examples=200, deadline=None)
def test_what_is_held_fits_the_budget_and_room_for_another_expert_is_not_left(of, more):
    least = least_of(of)
    division = divide(least + more, of)
    assert division.held == bytes_held(division, of) <= least + more
    assert division.slots <= of.experts
    left = least + more - division.held
    assert division.slots == of.experts or left < of.expert


@given(needs)
@settings(max_examples=100, deadline=None)
def test_the_least_budget_that_an_error_names_works_and_one_byte_less_does_not(of):
    least = least_of(of)
    assert divide(least, of).held == least
    with pytest.raises(InvalidInput, match=f"at least {least:,}"):
        divide(least - 1, of)


@given(needs)
@settings(max_examples=50, deadline=None)
def test_enough_for_everything_holds_everything(of):
    everything = of.always + sum(of.layers) + of.head + of.experts * of.expert
    division = divide(max(everything, least_of(of)), of)
    assert (division.streamed, division.head_pinned, division.slots) == ((), True, of.experts)


def test_head_and_layers_come_before_more_experts_than_a_token_chooses():
    of = Needs(always=0, layers=(100,) * 8, head=300, head_block=50, expert=10, experts=1000, chosen=16)
    least = least_of(of)
    assert divide(least, of).slots == 2
    assert divide(least + 140, of).slots == 16  # two and fourteen more
    assert divide(least + 140 + 200, of).head_pinned
    some = divide(least + 140 + 200 + 300, of)
    assert (some.streamed, some.slots) == ((0, 2, 4, 5, 7), 16)  # spread over the depth
    assert len(divide(least + 140 + 200 + 600, of).streamed) == 0


# --------------------------------------------------------------------------------------------------- memory


def test_every_tensor_of_a_layout_starts_aligned_and_none_overlap():
    layout = Layout([("a", "BF16", (3, 5)), ("b", "U8", (7,)), ("c", "F32", (2, 2)), ("d", "U8", (64,))])
    buffer = allocate(layout.bytes).zero_()
    for n, piece in enumerate(layout.pieces.values(), start=1):
        view = piece.tensor(buffer)
        assert view.data_ptr() % ALIGNMENT == 0
        assert (view == 0).all()
        piece.raw(buffer).fill_(n)
    assert layout.stored == 30 + 7 + 16 + 64
    assert [int(piece.raw(buffer)[-1]) for piece in layout.pieces.values()] == [1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------- experts


def slots_of(folder, threads, count):
    slots = ExpertSlots(folder, threads, Usage())
    slots.hold(count)
    return slots


def weights_of(folder, layer, expert):
    stem = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}"
    return {m: folder.read(f"{stem}.{m}.weight_packed") for m in ("w1", "w2", "w3")}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("seed", [0, 1])
def test_slots_give_the_right_bytes_and_the_hits_of_least_recently_used(folder, count, seed):
    draw = random.Random(seed)
    requests = [
        (draw.choice((1, 1, 1, 2, 2, 5)), draw.sample(range(4), draw.randint(1, 4))) for _ in range(80)
    ]
    usage = Usage()
    with ThreadPoolExecutor(3) as threads:
        slots = ExpertSlots(folder, threads, usage)
        slots.hold(count)
        held: OrderedDict[tuple[int, int], None] = OrderedDict()
        hits = 0
        for layer, experts in requests:
            got = {}
            order = []
            for e, expert in slots.each(layer, experts):
                order.append(e)
                got[e] = {m: expert.stored(f"{m}.weight_packed").clone() for m in ("w1", "w2", "w3")}
            assert sorted(order) == sorted(experts)
            for e, matrices in got.items():
                expected = weights_of(folder, layer, e)
                assert all(torch.equal(matrices[m], expected[m]) for m in expected)
            found = [e for e in experts if (layer, e) in held]
            assert order[: len(found)] == found  # what is in memory comes first
            hits += len(found)
            for e in order:
                held[layer, e] = None
                held.move_to_end((layer, e))
            while len(held) > count:
                held.popitem(last=False)
    assert usage.start.hits == hits
    assert usage.start.misses == sum(len(experts) for _, experts in requests) - hits


def test_missing_experts_are_read_at_the_same_time(folder, threads, monkeypatch):
    together = threading.Barrier(3, timeout=20)  # passes only when three reads have begun

    def wait_for_others(name):
        if name.endswith("w1.weight_packed"):
            together.wait()

    monkeypatch.setattr(folder, "reader", Watched(folder.reader, wait_for_others))
    assert sorted(e for e, _ in slots_of(folder, threads, 3).each(2, [0, 1, 3])) == [0, 1, 3]


def test_with_one_slot_experts_come_one_after_the_other(folder, threads):
    assert [e for e, _ in slots_of(folder, threads, 1).each(2, [3, 0, 2])] == [3, 0, 2]


def test_a_read_that_fails_says_so_and_leaves_every_slot_usable(folder, threads, monkeypatch):
    def fail(name):
        if ".experts.2." in name:
            raise CheckpointError(f"{name}: gone")

    whole = folder.reader
    monkeypatch.setattr(folder, "reader", Watched(whole, fail))
    slots = slots_of(folder, threads, 3)
    for _ in range(4):  # a leaked slot would soon leave none
        with pytest.raises(CheckpointError, match="gone"):
            list(slots.each(1, [0, 1, 2, 3]))
    monkeypatch.setattr(folder, "reader", whole)
    for e, expert in slots.each(1, [0, 1, 2, 3]):
        assert torch.equal(expert.stored("w2.weight_packed"), weights_of(folder, 1, e)["w2"])


def test_a_user_who_stops_early_leaves_every_slot_usable(folder, threads):
    slots = slots_of(folder, threads, 2)
    for _ in range(4):
        arriving = slots.each(1, [0, 1, 2, 3])
        next(arriving)
        arriving.close()
    assert sorted(e for e, _ in slots.each(2, [0, 1, 2, 3])) == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------- trunk


def trunk_of(folder, threads, streamed):
    """A trunk, and the layers whose weights it brings."""
    specs = [spec for spec in folder.specs.values() if spec.ours and spec.expert is None]
    meta = At(torch.float32, torch.device("meta"))
    layers = [DecoderLayer(folder.config, i, LOCAL, meta) for i in range(folder.config.num_layers)]
    stored = [StoredLayer(x, folder, [s for s in specs if s.layer == x.index]) for x in layers]
    trunk = Trunk(stored, folder, threads, Usage())
    trunk.hold(streamed)
    return trunk, layers


def assert_brought(folder, layer):
    """Every tensor but the experts' is the file's, under our name, in the dtype of a loaded model."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert {name for name, tensor in tensors.items() if tensor.is_meta} == {
        name for name in tensors if ".experts." in name
    }
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            stored = folder.read(f"language_model.model.layers.{layer.index}.{name}")
            if name.endswith("A_log"):
                stored = stored[: folder.config.kda.num_heads]
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, stored.float()), name


@pytest.mark.parametrize("streamed", [(), (0, 3, 5), (1, 2, 3, 4, 5, 6), tuple(range(7))])
def test_each_layer_has_its_tensors_whether_pinned_or_streamed(folder, streamed):
    with ThreadPoolExecutor(1) as ahead:
        trunk, layers = trunk_of(folder, ahead, streamed)
        for layer in [*layers, *layers]:
            trunk.bring(layer.index)
            assert_brought(folder, layer)


def test_the_next_streamed_layer_is_read_while_one_is_in_use(folder, monkeypatch):
    watched = Watched(folder.reader)
    monkeypatch.setattr(folder, "reader", watched)
    with ThreadPoolExecutor(1) as ahead:
        trunk, _ = trunk_of(folder, ahead, (1, 4, 6))
        for index, following in ((1, 4), (4, 6), (6, 1), (1, 4)):
            trunk.bring(index)
            ahead.submit(lambda: None).result()  # what was asked for before is done
            assert f".layers.{following}." in watched.names[-1]


def test_a_pass_that_ended_early_does_not_confuse_the_next(folder):
    with ThreadPoolExecutor(1) as ahead:
        trunk, layers = trunk_of(folder, ahead, (0, 2, 4))
        for index in (0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 4, 0):
            trunk.bring(index)
            assert_brought(folder, layers[index])


# ----------------------------------------------------------------------------------------------------- ends


def test_the_head_gives_equal_bits_pinned_and_in_blocks_and_the_products_of_the_matrix(
    folder, threads, monkeypatch
):
    monkeypatch.setattr(ends, "BLOCK_BYTES", 100 * 64)  # of the 300 rows of 64 bytes
    name = "language_model.lm_head.weight"
    hidden = torch.randn(3, folder.config.hidden_size)
    found = []
    for pinned in (True, False):
        usage = Usage()
        head = Head(name, folder.tensors[name], folder.reader, threads, usage)
        head.hold(pinned)
        usage.current = usage.decode
        found.append(head.logits(hidden))
        assert usage.decode.bytes == (0 if pinned else folder.tensors[name].bytes)
    assert head.block_bytes == 64 * 64
    assert torch.equal(*found)
    expected = hidden.double() @ folder.read(name).double().T
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_embedding_rows_are_those_of_the_tokens_and_each_is_read_once(folder):
    name, usage = "language_model.model.embed_tokens.weight", Usage()
    tokens = torch.tensor([5, 299, 5, 0, 5])
    rows = embedding_rows(name, folder.tensors[name], tokens, folder.reader, usage)
    assert torch.equal(rows, folder.read(name)[tokens])
    assert usage.start.bytes == 3 * 2 * folder.config.hidden_size


# ---------------------------------------------------------------------------------------------------- usage


def test_usage_counts_where_it_happened_and_says_it_in_one_line():
    usage = Usage()
    usage.current.bytes += 4_000_000_000
    with usage.during(usage.prompt):
        usage.current.tokens += 7
        usage.current.misses += 9
    with usage.during(usage.decode):
        usage.current.tokens += 4
        usage.current.hits += 30
        usage.current.misses += 10
        usage.current.bytes += 8_000_000
    usage.decode.seconds = 6.0
    assert (usage.prompt.misses, usage.decode.hit_rate) == (9, 0.75)
    assert usage.line() == (
        "1.5 s/token; experts: 75.0% of 40 found in memory; read 2 MB/token, 4.01 GB in all"
    )

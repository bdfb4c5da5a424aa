"""What goes into a checkpoint comes out bit for bit, or not at all and with one line that says why."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_child import CONFIG, flat, state_at

from openk3.checkpoint.rng import capture_rng, restore_rng
from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import CheckpointError, InvalidInput

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (0,), (1,), (3, 0, 2), (5,), (2, 3), (2, 1, 4)]

numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
leaves = st.one_of(
    numbers,
    st.lists(numbers, max_size=3),
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans()),
)
keys = st.text(min_size=1, max_size=4).filter(lambda key: "/" not in key)
states = st.dictionaries(
    keys,
    st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8),
    max_size=3,
)


def with_tensors(node):
    """Replace each (dtype, shape, transposed) by a tensor of random bits."""
    if isinstance(node, dict):
        return {key: with_tensors(leaf) for key, leaf in node.items()}
    if not isinstance(node, tuple):
        return node
    dtype, shape, transposed = node
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype)[..., 0]
    return tensor.transpose(0, -1) if transposed and shape else tensor


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@settings(max_examples=60, deadline=None)
@given(state=states)
def test_any_nested_state_comes_back_bit_for_bit(tmp_path_factory, state):
    state = with_tensors(state)
    store = CheckpointStore(tmp_path_factory.mktemp("any"))
    store.save(0, state, config={})
    assert flat(store.load()) == flat(state)
    targets = {part: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for part, x in state.items()}
    assert flat(store.load(into=targets)) == flat(state)


def test_tensors_are_filled_in_place_and_only_in_the_parts_asked_for(store):
    model = torch.nn.Linear(3, 2)
    saved = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    store.save(
        7, {"model": model.state_dict(), "optim": {"m": torch.ones(5)}, "loop": {"step": 7}}, config={}
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    state = store.load(into={"model": dict(model.named_parameters()), "loop": {}})
    assert state.keys() == {"model", "loop"}
    assert state["model"]["weight"] is model.weight
    assert state["loop"]["step"] == 7
    assert all(torch.equal(weight, saved[name]) for name, weight in model.named_parameters())


def test_a_training_that_is_resumed_gives_the_weights_of_one_that_was_not(store):
    """Dropout draws from the saved generators, AdamW's moments and step are state: each would show."""

    def build():
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    def moments(optimizer):
        return {str(i): moments for i, moments in optimizer.state_dict()["state"].items()}

    model, optimizer = build()
    train(model, optimizer, 3)
    store.save(3, {"model": model.state_dict(), "optim": moments(optimizer), "rng": capture_rng()}, config={})
    train(model, optimizer, 4)

    resumed, fresh = build()
    state = store.load()
    resumed.load_state_dict(state["model"])
    fresh.load_state_dict(fresh.state_dict() | {"state": {int(i): m for i, m in state["optim"].items()}})
    restore_rng(state["rng"])
    train(resumed, fresh, 4)
    assert flat(dict(resumed.state_dict())) == flat(dict(model.state_dict()))


def test_the_newest_checkpoints_stay_and_the_rest_goes(tmp_path):
    for keep in (1, 2, 3):
        store = CheckpointStore(tmp_path / str(keep), keep=keep)
        for step in range(10, 60, 10):
            store.save(step, state_at(step), config=CONFIG)
            assert store.steps() == list(range(10, step + 10, 10))[-keep:]
            assert store.latest() == step
        for step in store.steps():
            assert flat(store.load(step)) == flat(state_at(step))


def test_a_broken_checkpoint_is_not_kept_in_place_of_a_good_one(store):
    for step in (1, 2):
        store.save(step, state_at(step), config=CONFIG)
    (store.path(2) / "__0_0.distcp").unlink()
    store.save(3, state_at(3), config=CONFIG)
    assert store.steps() == [1, 3]


def test_leftovers_of_dead_saves_are_cleared_by_the_next_save_and_by_nothing_else(store):
    store.save(1, state_at(1), config=CONFIG)
    leftover = store.folder / "step-00000002.partial-0123456789ab"
    shutil.copytree(store.path(1), leftover)
    other = store.folder / "notes.txt"
    other.write_text("mine")
    reader = CheckpointStore(store.folder)
    assert reader.steps() == [1]
    reader.load()
    assert leftover.exists()
    store.save(2, state_at(2), config=CONFIG)
    assert not leftover.exists()
    assert other.read_text() == "mine"


def test_steps_only_grow_until_the_run_is_rewound(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        store.save(step, state_at(step), config=CONFIG)
    for step in (-1, 0, 15, 30):
        with pytest.raises(InvalidInput, match=rf"cannot save step {step}: it holds step 10, 20, 30"):
            store.save(step, state_at(step), config=CONFIG)
    with pytest.raises(InvalidInput, match=r"cannot rewind to step 15: it holds step 10, 20, 30"):
        store.rewind(15)
    store.rewind(10)
    assert store.steps() == [10]
    store.save(15, state_at(15), config=CONFIG)
    assert flat(store.load()) == flat(state_at(15))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 1'),
            "manifest.json is not readable",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
            "manifest.json is not readable",
        ),
        (lambda folder: truncate(folder / "__0_0.distcp"), r"__0_0.distcp has 100 bytes instead of \d+"),
        (lambda folder: flip(folder / "__0_0.distcp", 1000, 3), r"__0_0.distcp is not what was written"),
        (lambda folder: flip(folder / "state.json", 40, 0), r"state.json is not what was written"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_bad_file_and_the_good_step_are_named(store, damage, reason):
    for step in (1, 2):
        store.save(step, state_at(step), config=CONFIG)
    damage(store.path(2))
    with pytest.raises(CheckpointError, match=rf"step-00000002: .*{reason}.* look whole: \[1") as raised:
        store.load()
    assert "\n" not in str(raised.value)
    assert flat(store.load(1)) == flat(state_at(1))


def truncate(file):
    file.write_bytes(file.read_bytes()[:100])


def flip(file, byte, bit):
    content = bytearray(file.read_bytes())
    content[byte % len(content)] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
def test_no_flipped_bit_ever_changes_what_is_loaded(tmp_path_factory, file):
    store = CheckpointStore(tmp_path_factory.mktemp("flips"))
    store.save(1, state_at(1, size=2), config=CONFIG)
    whole = (store.path(1) / file).read_bytes()

    @settings(max_examples=100, deadline=None)
    @given(byte=st.integers(0, len(whole) - 1), bit=st.integers(0, 7))
    def check(byte, bit):
        (store.path(1) / file).write_bytes(whole)
        flip(store.path(1) / file, byte, bit)
        try:
            loaded = store.load(config=CONFIG)
        except CheckpointError:
            return
        assert file == "manifest.json"  # only there does a byte not matter: the writer's version, for people
        assert flat(loaded) == flat(state_at(1, size=2))

    check()


def test_a_checkpoint_of_another_configuration_is_refused_by_field(store):
    saved = {"model": {"width": 8, "layers": [1, 2]}, "lr": 0.1, "name": "a"}
    store.save(1, state_at(1), config=saved)
    assert store.config() == saved
    store.load(config={"name": "a", "lr": 0.1, "model": {"layers": (1, 2), "width": 8}})
    ours = {"model": {"width": 16, "layers": [1, 2], "gate": "sigmoid"}, "lr": 0.1}
    with pytest.raises(CheckpointError) as raised:
        store.load(config=ours)
    assert str(raised.value) == (
        f"{store.path(1)}: was saved with another configuration: "
        "model.gate is absent there and 'sigmoid' here; model.width is 8 there and 16 here; "
        "name is 'a' there and absent here; go on with what it was saved with, or train into another folder"
    )


def test_a_checkpoint_of_a_newer_format_asks_for_an_update(store):
    store.save(1, state_at(1), config=CONFIG)
    manifest = store.path(1) / "manifest.json"
    manifest.write_text(json.dumps({"format": 2, "openk3": "9.0", "shards": "elsewhere"}))
    with pytest.raises(
        CheckpointError, match=r"format 2, written by openk3 9\.0.* reads format 1: update openk3"
    ):
        store.load()


def test_targets_that_are_not_the_saved_tensors_are_named_and_untouched(store):
    store.save(1, {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}}, config={})
    mine = {"a": torch.zeros(2), "b": torch.zeros(3, 1), "c": torch.zeros(4).half(), "d": torch.zeros(1)}
    with pytest.raises(CheckpointError) as raised:
        store.load(into={"model": mine})
    assert str(raised.value).endswith(
        "model/b is torch.float32 [3] there and torch.float32 [3, 1] here; "
        "model/c is torch.float32 [4] there and torch.float16 [4] here; model/d is absent there"
    )
    with pytest.raises(CheckpointError, match="model/c is absent here"):
        store.load(into={"model": {"a": torch.zeros(2), "b": torch.zeros(3)}})
    with pytest.raises(CheckpointError, match=r"here: optim is absent there$"):
        store.load(into={"model": mine, "optim": {}})
    assert not any(tensor.any() for tensor in mine.values())


def test_an_absent_checkpoint_is_named_with_what_there_is(store):
    assert store.latest() is None
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint: it holds no checkpoint"):
        store.load()
    store.save(5, state_at(5), config=CONFIG)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 0: it holds step 5"):
        store.load(0)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"optim": {"state": {0: torch.ones(1)}}}, r"key 0 under optim/state must be"),
        ({"a/b": 1}, r"key 'a/b' at the root"),
        ({"": 1}, r"key ''"),
        ({"loop": {"losses": [1.0, (2.0,)]}}, r"loop/losses\[1\] is a tuple"),
        ({"loop": {"seen": {1, 2}}}, r"loop/seen is a set"),
        ({"model": {"w": torch.empty(2, device="meta")}}, r"model/w is a meta tensor"),
    ],
)
def test_what_would_not_come_back_as_it_was_is_refused_by_path_before_anything_is_written(
    store, state, reason
):
    with pytest.raises(InvalidInput, match=reason):
        store.save(1, state, config={})
    with pytest.raises(InvalidInput, match=r"config: .*not JSON serializable"):
        store.save(1, {}, config={"dtype": torch.float32})
    assert not store.folder.exists()


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)

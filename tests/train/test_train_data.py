"""What `TrainConfig.data` names, opened."""

from __future__ import annotations

import json
import random

import pytest
from tiny_run import tiny_config

from openk3.chat import Tokenizer
from openk3.data import IGNORED, Examples, Mixture, Windows, load_recipe, open_dataset, prepare
from openk3.errors import InvalidInput
from openk3.train.data import open_data
from openk3.train.loop import run
from openk3.train.progress import Silent

VOCAB = 256 + 256 + 8


def silent(stage: str, done: int, total: int) -> None:
    pass


def corpus(folder, seed: int):
    """A recipe over a few generated files."""
    folder.mkdir()
    chance = random.Random(seed)
    for number in range(8):
        words = [chance.choice(["let", "x", "=", "y", "+", "one", "\n"]) for _ in range(200)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    recipe = folder / "recipe.toml"
    recipe.write_text(
        'name = "words"\n[[sources]]\nname = "words"\nkind = "tree"\npath = "."\ninclude = ["*.txt"]\n'
        "[split]\nvalidation_share = 0.3\n[deduplication]\nnear = false\n"
    )
    return recipe


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    base = tmp_path_factory.mktemp("prepared")
    tokenizer = VOCAB
    for name, seed in (("one", 1), ("two", 2)):
        prepare(load_recipe(corpus(base / f"{name}-files", seed)), base / name, tokenizer=tokenizer)
        tokenizer = Tokenizer.load(base / "one")
    return base


def config(data, vocab=VOCAB):
    return tiny_config(model={"vocab_size": vocab}, data=data)


def shards(*folders, weights=(1.0, 1.0)):
    sources = [{"folder": str(f), "weight": w} for f, w in zip(folders, weights, strict=False)]
    return {"kind": "shards", "sources": sources}


def test_windows_are_shuffled_where_that_is_asked_for(prepared):
    read = {order: open_data(config(shards(prepared / "one") | {"order": order}), silent).stream for order in
            ("documents", "windows")}  # fmt: skip
    first = {order: [stream.sample(i).tokens.tolist() for i in range(20)] for order, stream in read.items()}
    assert isinstance(read["documents"], Windows)
    assert first["documents"] != first["windows"]
    assert "shuffled" in read["windows"].identity()


def test_one_folder_is_read_as_windows_with_its_validation_and_tokenizer(prepared):
    data = open_data(config(shards(prepared / "one")), silent)
    dataset = open_dataset(prepared / "one")
    assert isinstance(data.stream, Windows)
    assert data.stream.n_tokens == dataset.train.n_tokens
    assert [split.n_bytes for split in data.validation] == [dataset.validation.n_bytes]
    assert data.tokenizer.sha256 == dataset.manifest.tokenizer_sha256


def test_several_folders_are_mixed_by_weight(prepared):
    data = open_data(config(shards(prepared / "one", prepared / "two", weights=(3, 1))), silent)
    assert isinstance(data.stream, Mixture)
    names = [data.stream.locate(i)[0] for i in range(400)]
    assert names.count("0-words") == 300
    assert len(data.validation) == 2


def test_a_corpus_is_prepared_once_and_found_again(prepared, tmp_path):
    recipe = corpus(tmp_path / "files", 3)
    stages = []
    settings = config({"kind": "corpus", "recipe": str(recipe), "cache": str(tmp_path / "cache")})
    first = open_data(settings, lambda stage, done, total: stages.append(stage))
    assert stages
    again = open_data(settings, lambda stage, done, total: pytest.fail(stage))
    assert again.stream.identity() == first.stream.identity()
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


def test_another_vocabulary_is_refused_with_both_sizes(prepared):
    with pytest.raises(InvalidInput, match=rf"{VOCAB}.*999"):
        open_data(config(shards(prepared / "one"), vocab=999), silent)


def test_folders_of_different_tokenizers_are_refused(prepared, tmp_path):
    prepare(load_recipe(corpus(tmp_path / "files", 4)), tmp_path / "other", tokenizer=VOCAB)
    with pytest.raises(InvalidInput, match="different tokenizers"):
        open_data(config(shards(prepared / "one", tmp_path / "other")), silent)


def test_a_folder_twice_is_refused(prepared):
    with pytest.raises(InvalidInput, match="stands twice"):
        open_data(config(shards(prepared / "one", prepared / "one")), silent)


def test_an_empty_corpus_is_refused_by_name(tmp_path):
    recipe = corpus(tmp_path / "files", 5)
    for file in (tmp_path / "files").glob("*.txt"):
        file.unlink()
    with pytest.raises(InvalidInput, match="files: no file matches"):
        open_data(config({"kind": "corpus", "recipe": str(recipe), "cache": str(tmp_path)}), silent)


def test_given_data_must_be_given():
    with pytest.raises(InvalidInput, match="pass the data"):
        open_data(config({"kind": "given"}), silent)


def sft(prepared, tmp_path, lines):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(lines))
    data = {"kind": "sft", "file": str(file), "tokenizer": str(prepared / "one")}
    return tiny_config(
        model={"vocab_size": VOCAB}, data=data, train={"context": 128, "micro_batch_tokens": 128}
    )


def test_exchanges_learn_the_answer_and_not_the_question(prepared, tmp_path):
    lines = [json.dumps({"question": f"what is {n}", "answer": f"it is {n}"}) for n in "abc"]
    data = open_data(sft(prepared, tmp_path, lines), silent)
    assert isinstance(data.stream, Examples)
    samples = [data.stream.sample(i) for i in range(data.stream.packs_per_epoch())]
    learned = "".join(data.tokenizer.decode(s.targets[s.targets != IGNORED].tolist()) for s in samples)
    read = "".join(data.tokenizer.decode(s.tokens.tolist()) for s in samples)
    for name in "abc":
        assert learned.count(f"it is {name}") == read.count(f"what is {name}") == 1
    assert "what is" not in learned


def test_exchanges_that_are_cut_on_request_are_told_of_with_their_number(prepared, tmp_path):
    lines = [json.dumps({"question": "what is it", "answer": "x y " * n}) for n in (1, 2, 200)]
    settings = sft(prepared, tmp_path, lines)
    with pytest.raises(InvalidInput, match=r"example 2: .* the budget is 128"):
        open_data(settings, silent)
    cutting = settings.model_copy(update={"data": settings.data.model_copy(update={"too_long": "truncate"})})
    heard: list[str] = []

    class Listener(Silent):
        def notes(self, text: str) -> None:
            heard.append(text)

    data = open_data(cutting, silent)
    run(cutting, tmp_path / "run", data=data, progress=Listener())
    lost = data.stream.truncated_tokens
    assert lost > 200
    assert heard == [
        f"{tmp_path}/pairs.jsonl: 1 of 3 exchanges are longer than train.context 128 and lost their ends, "
        f"{lost:,} tokens in all"
    ]
    assert open_data(sft(prepared, tmp_path, lines[:2]), silent).notes == ()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "holds no examples"),
        (["{"], "line 1: not JSON"),
        ([json.dumps({"question": "q", "answer": "a"}), json.dumps({"question": "q"})], "line 2: needs"),
    ],
)
def test_wrong_exchanges_name_file_and_line(prepared, tmp_path, lines, expected):
    with pytest.raises(InvalidInput, match=expected):
        open_data(sft(prepared, tmp_path, lines), silent)

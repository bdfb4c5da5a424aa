"""Preparing a corpus end to end, on a made-up one and on the standard library itself."""

from __future__ import annotations

import random

import pytest

from openk3.chat import Tokenizer
from openk3.chat.train_tokenizer import train_tokenizer
from openk3.data import load_recipe, open_dataset, prepare
from openk3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from openk3.data.documents import Document
from openk3.data.preparation import select, split
from openk3.data.recipe import SplitRules
from openk3.errors import InvalidInput, StorageError

RULES = SplitRules(validation_share=0.2, validation_bytes=10_000)


def made_up_text(r: random.Random, words: int = 120) -> str:
    return "".join(
        f"{r.choice('abcdefgh')}{r.randrange(400)}{r.choice([' ', ' ', chr(10)])}" for _ in range(words)
    )


def write_corpus(folder, texts: dict[str, str], extra: str = "") -> None:
    (folder / "texts").mkdir()
    for name, text in texts.items():
        (folder / "texts" / name).write_text(text, encoding="utf-8")
    source = '[[sources]]\nname = "t"\nkind = "tree"\npath = "texts"\n'
    (folder / "mine.toml").write_text(f'name = "mine"\n{extra}\n{source}')


@pytest.fixture
def made_up(tmp_path):
    r = random.Random(0)
    texts = {f"{i:03d}.txt": made_up_text(r) for i in range(80)}
    write_corpus(tmp_path, texts, "[split]\nvalidation_share = 0.2\n")
    return tmp_path, texts


def test_a_corpus_comes_out_as_it_went_in(made_up):
    folder, texts = made_up
    prepare(load_recipe(folder / "mine.toml"), folder / "out", tokenizer=600)
    dataset = open_dataset(folder / "out", vocab_size=600, verify=True)
    out = {}
    for name in ("train", "validation"):
        part = getattr(dataset, name)
        for i, source in enumerate(part.sources()):
            out[source.removeprefix("t/")] = dataset.text(name, i).decode()
    assert out == texts
    assert dataset.manifest.provenance.recipe.name == "mine"
    assert dataset.manifest.provenance.sources["t"].bytes == sum(
        len(text.encode()) for text in texts.values()
    )


def test_the_tokenizer_is_trained_on_training_documents_only(made_up):
    folder, _ = made_up
    recipe = load_recipe(folder / "mine.toml")
    manifest = prepare(recipe, folder / "out", tokenizer=600)
    chosen = select(recipe)
    assert chosen.validation
    assert train_tokenizer((d.text for d in chosen.train), 600).sha256 == manifest.tokenizer_sha256
    everything = chosen.train + chosen.validation
    assert train_tokenizer((d.text for d in everything), 600).sha256 != manifest.tokenizer_sha256


def test_a_given_tokenizer_is_used_as_it_is(made_up):
    folder, _ = made_up
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    manifest = prepare(load_recipe(folder / "mine.toml"), folder / "out", tokenizer=tokenizer)
    assert manifest.tokenizer_sha256 == tokenizer.sha256
    record = manifest.splits["train"]
    assert record.tokens == record.bytes + record.documents  # a token per byte, and the [EOS]s


def test_copies_never_straddle_the_split_and_the_training_copy_stays(tmp_path):
    r = random.Random(1)
    texts = {f"{i:03d}.txt": made_up_text(r) for i in range(60)}
    _, held_out = split([Document(text, f"t/{name}") for name, text in texts.items()], RULES)
    copied = [document.source.removeprefix("t/") for document in held_out[:4]]
    for i, name in enumerate(copied):
        changed = texts[name] if i % 2 else texts[name].replace(" ", " extra ", 1)
        # A name that lands in training: the split goes by name alone.
        twin = next(
            n
            for n in (f"twin{i}-{k}.txt" for k in range(100))
            if not split([Document("x", f"t/{n}"), Document("y", "t/000.txt")], RULES)[1][0].source.endswith(
                n
            )
        )
        texts[twin] = changed
    write_corpus(tmp_path, texts, "[split]\nvalidation_share = 0.2\nvalidation_bytes = 10000\n")
    chosen = select(load_recipe(tmp_path / "mine.toml"))
    left = {document.source.removeprefix("t/") for document in chosen.validation}
    trained = {document.source.removeprefix("t/") for document in chosen.train}
    assert left.isdisjoint(copied)
    assert {name for name in texts if name.startswith("twin")} <= trained
    counts = chosen.provenance.deduplication
    assert (counts["exact_across"], counts["near_across"]) == (2, 2)
    assert (counts["exact_validation"], counts["near_validation"]) == (2, 2)
    assert (counts["exact_train"], counts["near_train"]) == (0, 0)


def test_a_document_stays_on_its_side_when_others_come_and_go():
    documents = [Document("x" * 10, f"d{i}") for i in range(400)]
    train, validation = split(documents, RULES)
    assert 0.1 < len(validation) / 400 < 0.3
    assert sorted(d.source for d in train + validation) == sorted(d.source for d in documents)
    for part in (documents[::3], documents[5:]):
        fewer_train, fewer_validation = split(part, RULES)
        assert {d.source for d in fewer_validation} <= {d.source for d in validation}
        assert {d.source for d in fewer_train} <= {d.source for d in train}


def test_validation_is_bounded_in_bytes_and_never_empty_beside_training():
    documents = [Document("é" * 100, f"d{i}") for i in range(400)]
    _, validation = split(documents, SplitRules(validation_share=0.5, validation_bytes=1_100))
    assert len(validation) == 5
    train, validation = split(documents[:2], SplitRules(validation_share=1e-9))
    assert (len(train), len(validation)) == (1, 1)


def test_what_is_left_out_is_counted(tmp_path):
    r = random.Random(2)
    texts = {f"{i:03d}.txt": made_up_text(r) for i in range(30)}
    texts |= {"empty.txt": "  \n", "short.txt": "hello", "nul.txt": made_up_text(r) + "\x00"}
    write_corpus(tmp_path, texts)
    provenance = select(load_recipe(tmp_path / "mine.toml")).provenance
    assert {name: n for name, n in provenance.cleaning.items() if n} == {
        "documents": 33,
        "dropped_empty": 1,
        "dropped_short": 1,
        "repaired": 1,
        "removed_characters": 1,
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            {"a.txt": "", "b.txt": "tiny"},
            "of 2 documents read, none is left for training.*'dropped_empty': 1",
        ),
        (
            {"a.txt": "one document alone, and long enough to pass every rule there is.\n"},
            "left for validation",
        ),
    ],
)
def test_a_corpus_of_which_nothing_is_left_is_refused_with_the_counts(tmp_path, texts, message):
    write_corpus(tmp_path, texts)
    with pytest.raises(InvalidInput, match=message):
        prepare(load_recipe(tmp_path / "mine.toml"), tmp_path / "out", tokenizer=600)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_before_any_work(tmp_path):
    write_corpus(tmp_path, {"a.txt": "x"})
    with pytest.raises(StorageError, match="texts: exists already"):
        prepare(load_recipe(tmp_path / "mine.toml"), tmp_path / "texts", tokenizer=600)


def test_progress_reaches_its_total_in_every_stage(made_up):
    folder, _ = made_up
    seen: dict[str, tuple[int, int]] = {}
    prepare(
        load_recipe(folder / "mine.toml"),
        folder / "out",
        tokenizer=600,
        progress=lambda stage, done, total: seen.__setitem__(stage, (done, total)),
    )
    assert seen["reading t"] == (80, 0)
    assert seen["cleaning"] == seen["encoding"] == (80, 80)
    assert list(seen) == ["reading t", "cleaning", "deduplicating", "training the tokenizer", "encoding"]


def test_the_standard_library_becomes_a_corpus_that_compresses_as_code_does(tmp_path):
    manifest = prepare(load_recipe("stdlib"), tmp_path / "out", tokenizer=4096)
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    assert 0.01 < validation.bytes / train.bytes < 0.12
    assert 3.0 < train.bytes / train.tokens < 4.2
    text = open_dataset(tmp_path / "out").validation_bytes()
    assert len(text) == validation.bytes
    assert 1.0 < xz_bits_per_byte(text) < gzip_bits_per_byte(text) < 3.0

"""Recipes and what they gather, the standard library's corpus above all."""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from itertools import islice
from pathlib import Path

import pytest

from openk3.data.corpus import document_list_hash, gather
from openk3.data.documents import Document
from openk3.data.recipe import load_recipe, recipe_names
from openk3.data.stdlib import package_documents, stdlib_documents, topic_documents
from openk3.errors import InvalidInput


@pytest.fixture(scope="module")
def stdlib() -> list[Document]:
    return list(stdlib_documents())


def test_the_default_corpus_is_the_standard_library_without_what_differs_between_machines(stdlib):
    names = {document.source for document in stdlib}
    assert {"os.py", "json/decoder.py", "asyncio/events.py", "collections/__init__.py"} <= names
    for name in names:
        folders = set(name.split("/")[:-1])
        assert not folders & {"test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages"}, (
            name
        )
        assert "_sysconfigdata" not in name
        assert name.endswith(".py")
    root = Path(sysconfig.get_path("stdlib"))
    document = next(document for document in stdlib if document.source == "json/decoder.py")
    assert document.text.encode() == (root / "json/decoder.py").read_bytes()
    assert 5e6 < sum(len(document.text) for document in stdlib) < 20e6


def test_the_language_documentation_comes_as_its_chapters_and_not_as_source(stdlib):
    topics = {document.source: document.text for document in topic_documents()}
    assert topics["lambda.txt"] == importlib.import_module("pydoc_data.topics").topics["lambda"]
    assert len(topics) > 50
    assert "pydoc_data/topics.py" not in {document.source for document in stdlib}


def test_installed_packages_come_whole_by_their_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("x = 1\n")
    (tmp_path / "a" / "x.txt").write_text("no source\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\n")
    found = list(package_documents(tmp_path, errors="replace"))
    assert [(document.source, document.text) for document in found] == [
        ("a/x.py", "x = 1\n"),
        ("b.py", "# \ufffd\n"),
    ]


def test_the_packages_are_those_of_the_running_python():
    found = islice(package_documents(errors="replace"), 20_000)
    assert any(document.source.startswith("pydantic/") for document in found)


def test_a_folder_without_a_standard_library_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no standard library sources here"):
        list(stdlib_documents(tmp_path))


def test_gathering_twice_agrees_and_a_changed_file_changes_the_hash(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("alpha é")
    (tmp_path / "tree" / "b.txt").write_text("beta")
    (tmp_path / "rows.jsonl").write_text('{"t": "gamma"}\n')
    recipe_file = tmp_path / "mine.toml"
    recipe_file.write_text(
        'name = "mine"\n'
        '[[sources]]\nname = "files"\nkind = "tree"\npath = "tree"\n'
        '[[sources]]\nname = "rows"\nkind = "jsonl"\npath = "rows.jsonl"\nfield = "t"\n'
        '[[sources]]\nname = "one"\nkind = "text"\npath = "tree/a.txt"\n'
    )
    corpus = gather(load_recipe(recipe_file), tmp_path)
    assert [document.source for document in corpus.documents] == [
        "files/a.txt",
        "files/b.txt",
        "rows/rows.jsonl:1",
        "one/a.txt",
    ]
    assert (corpus.sources["files"].documents, corpus.sources["files"].bytes) == (2, 12)
    listing = "".join(
        f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n"
        for name, text in (("files/a.txt", "alpha é"), ("files/b.txt", "beta"))
    )
    assert corpus.sources["files"].sha256 == hashlib.sha256(listing.encode()).hexdigest()
    assert gather(load_recipe(recipe_file), tmp_path).sources == corpus.sources
    (tmp_path / "tree" / "b.txt").write_text("Beta")
    changed = gather(load_recipe(recipe_file), tmp_path)
    assert changed.sources["files"] != corpus.sources["files"]
    assert changed.sources["rows"] == corpus.sources["rows"]
    assert document_list_hash(changed.documents) != document_list_hash(corpus.documents)


def test_long_documents_of_a_source_are_cut_on_request(tmp_path):
    (tmp_path / "book.txt").write_text("line\n" * 1000)
    recipe_file = tmp_path / "mine.toml"
    source = '[[sources]]\nname = "b"\nkind = "text"\npath = "book.txt"\ndocument_characters = 2000\n'
    recipe_file.write_text('name = "mine"\n' + source)
    documents = gather(load_recipe(recipe_file), tmp_path).documents
    assert [document.source for document in documents] == ["b/book.txt#0", "b/book.txt#1", "b/book.txt#2"]


def test_the_recipes_of_the_package_load():
    assert {"debian-docs", "python-sources", "stdlib"} <= set(recipe_names())
    for name in recipe_names():
        assert load_recipe(name).name == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name = ", "not TOML"),
        ('name = "x"', "sources: Field required"),
        ('name = "x"\nsources = []', "sources"),
        (
            'name = "x"\nsorces = []\n[[sources]]\nname = "a"\nkind = "text"\npath = "p"',
            "sorces: unknown field",
        ),
        (
            'name = "x"\n[[sources]]\nname = "a"\nkind = "text"\npath = "p"\nfeild = "t"',
            "feild: unknown field",
        ),
        ('name = "x"\n[[sources]]\nname = "a"\nkind = "csv"\npath = "p"', "'csv'"),
        ('name = "x"\n[[sources]]\nname = "a/b"\nkind = "text"\npath = "p"', "sources.0.text.name"),
        ('name = "x"\n' + '[[sources]]\nname = "a"\nkind = "text"\npath = "p"\n' * 2, "'a'.* stand twice"),
        ('name = "x"\n[split]\nvalidation_share = 1.5\n[[sources]]\nname="a"\nkind="pydoc-topics"', "share"),
    ],
)
def test_a_wrong_recipe_is_refused_by_field(tmp_path, content, message):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(InvalidInput, match=rf"(?s)wrong\.toml: .*{message}"):
        load_recipe(file)


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidInput, match=r"nope: neither a recipe of the package \(debian-docs, .*stdlib.*\)"
    ):
        load_recipe("nope")


def test_an_empty_source_is_refused_by_name(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[[sources]]\nname = "rows"\nkind = "jsonl"\npath = "rows.jsonl"\n')
    with pytest.raises(InvalidInput, match="source 'rows' holds no documents"):
        gather(load_recipe(file), tmp_path)

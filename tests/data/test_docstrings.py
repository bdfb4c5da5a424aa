"""Questions from docstrings: which names ask, and what they are answered with."""

from __future__ import annotations

from openk3.data.docstrings import Exchange, exchanges, first_paragraph, module_name
from openk3.data.documents import Document

SOURCE = '''"""Tools for the
harbour.

More about it."""

class Crane:
    """Lifts containers of any size."""

    def lift(self):
        """Lift one container and wait."""

    def _secret(self):
        """Hidden things happen here."""

def short():
    """Short."""

async def berth():
    """Give a ship its place. """ + "not a docstring"
'''


def test_public_names_ask_and_first_paragraphs_answer():
    assert list(exchanges([Document(SOURCE, "port/harbour.py")])) == [
        Exchange("What is the module port.harbour for?", "Tools for the harbour."),
        Exchange("What is port.harbour.Crane?", "Lifts containers of any size."),
        Exchange("What does port.harbour.Crane.lift do?", "Lift one container and wait."),
    ]


def test_what_cannot_be_parsed_or_imported_asks_nothing():
    assert list(exchanges([Document("def (", "broken.py")])) == []
    assert list(exchanges([Document(SOURCE, "_private/harbour.py")])) == []
    assert list(exchanges([Document(SOURCE, "notes.txt")])) == []


def test_a_package_is_named_by_its_folder():
    assert module_name("asyncio/__init__.py") == "asyncio"
    assert module_name("asyncio/tasks.py") == "asyncio.tasks"
    assert module_name("__main__.py") is None


def test_long_paragraphs_end_with_a_sentence_or_are_left_out():
    sentence = "One sentence of about fifty characters, give or take. "
    cut = first_paragraph(sentence * 9)
    assert cut == (sentence * 4).strip()
    assert first_paragraph("word " * 100) is None

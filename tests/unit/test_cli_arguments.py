"""`module:factory` on the command line: found where Python would look, and each mistake is named."""

from __future__ import annotations

import argparse
import sys

import pytest

from stateful_pipes.cli.arguments import factory_of

MODULE = """
class Made:
    @staticmethod
    def by():
        return "made"

def factory():
    return __name__

value = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder, and not the current one; what is imported from it is forgotten."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pipes_of_mine.py").write_text(MODULE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("pipes_of_mine:factory", "pipes_of_mine"),
        ("pipes_of_mine:Made.by", "made"),
        ("package.inner:factory", "package.inner"),
        ("pipes_of_mine.py:factory", "pipes_of_mine"),
        ("./package/inner.py:Made.by", "made"),
    ],
)
def test_it_is_found_from_the_current_folder(text, made, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert factory_of(text)() == made


def test_a_file_is_found_from_anywhere_and_its_folder_is_looked_through(folder, monkeypatch):
    monkeypatch.chdir("/")
    (folder / "uses_the_other.py").write_text("from pipes_of_mine import factory")
    assert factory_of(f"{folder}/uses_the_other.py:factory")() == "pipes_of_mine"
    assert sys.path[0] == str(folder)


MISTAKES = [
    ("pipes_of_mine", "must be module:factory or path/to/file.py:factory, got 'pipes_of_mine'"),
    (":factory", "must be module:factory or path/to/file.py:factory, got ':factory'"),
    ("pipes_of_mine:", "must be module:factory or path/to/file.py:factory, got 'pipes_of_mine:'"),
    ("nowhere:factory", "importing 'nowhere' raised ModuleNotFoundError: No module named 'nowhere'"),
    ("nowhere.py:factory", "there is no file 'nowhere.py'"),
    ("raises:factory", "importing 'raises' raised ValueError: 3 %d"),
    ("ends:factory", "importing 'ends' raised SystemExit: 7"),
    ("pipes_of_mine:other", "'pipes_of_mine' has no 'other'"),
    ("pipes_of_mine:Made.other", "'pipes_of_mine' has no 'Made.other'"),
    ("pipes_of_mine:value", "'pipes_of_mine:value' must be a function without arguments, and is of type int"),
    ("json.py:factory", "'json.py' has the name of another module"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_named(text, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "raises.py").write_text("raise ValueError('3 %d')")
    (folder / "ends.py").write_text("raise SystemExit(7)")
    (folder / "json.py").write_text(MODULE)
    parser = argparse.ArgumentParser()
    parser.add_argument("factory", type=factory_of)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([text])
    assert caught.value.code == 2
    assert f"argument factory: {message}" in capsys.readouterr().err

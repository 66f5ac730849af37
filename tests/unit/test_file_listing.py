"""Which files a reader finds, and how it labels them."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from stateful_pipes.nodes.file_listing import FILE_FILTERS, list_files


def listed(file_root=None, files=None, labels=None, file_list=None, filters=FILE_FILTERS, dirs=None, case=False):
    found = list_files(file_root, files, labels, file_list, filters, dirs, case)
    return list(zip(found.paths, np.frombuffer(found.labels, dtype=np.int32).tolist(), strict=True))


@pytest.fixture
def tree(tmp_path):
    names = [
        "a/x.JPG",
        "a/y.png",
        "b/no.txt",
        "c/z.jpg",
        "c/deep/w.jpg",
        ".h/q.jpg",
        "c/.hid.jpg",
        "top.jpg",
        "B/é.jpg",
        "B/z.jpg",
    ]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "c/folder.jpg").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "z").symlink_to(tmp_path / "a")
    (tmp_path / "c/link.jpg").symlink_to(tmp_path / "top.jpg")
    return tmp_path


def test_folders_are_labels_in_byte_order(tree):
    assert listed(tree) == [
        (".h/q.jpg", 0),
        ("B/z.jpg", 1),
        ("B/é.jpg", 1),
        ("a/x.JPG", 2),
        ("a/y.png", 2),
        # 3 is the folder b, which has no file that matches
        ("c/.hid.jpg", 4),
        ("c/link.jpg", 4),
        ("c/z.jpg", 4),
        ("z/x.JPG", 6),
        ("z/y.png", 6),
    ]


def test_globs_ignore_case_unless_told(tree):
    assert listed(tree, filters="*.JPG", dirs="A") == [("a/x.JPG", 0)]
    assert listed(tree, filters=["*.JPG"], dirs=["a", "C"], case=True) == [("a/x.JPG", 0)]
    assert listed(tree, filters=["*.Txt", "*.PNG"]) == [("a/y.png", 2), ("b/no.txt", 3), ("z/y.png", 6)]


def test_folders_that_are_filtered_out_are_not_counted(tree):
    assert [label for _, label in listed(tree, dirs=["c", "[AB]"])] == [0, 0, 1, 1, 3, 3, 3]  # B, a, b, c


@pytest.mark.parametrize("glob", ["[xy].png", "[^x].png", "[!x].png", "[[:alpha:]].png", r"\y.png", "?.p*"])
def test_globs_are_the_c_library_s(tree, glob):
    assert listed(tree, filters=glob, dirs="a") == [("a/y.png", 0)]


def test_files_count_up_or_have_labels(tree):
    assert listed(files=["b", "a", "b"]) == [("b", 0), ("a", 1), ("b", 2)]
    assert listed(tree, files=["b", tree / "a"], labels=np.array([-(2**31), 2**31 - 1])) == [
        ("b", -(2**31)),
        (str(tree / "a"), 2**31 - 1),
    ]
    assert listed(files="one", labels=5) == [("one", 5)]


def test_a_list_has_a_label_at_the_end_of_each_line(tree):
    lines = b"top.jpg 3\n\n \t\r\n two words.jpg \t 07 \na\xff.jpg\t0\r\n5 5"
    (tree / "list.txt").write_bytes(lines)
    expected = [("top.jpg", 3), (" two words.jpg", 7), (os.fsdecode(b"a\xff.jpg"), 0), ("5", 5)]
    assert listed(file_list=tree / "list.txt") == expected


def test_paths_are_relative_to_the_list_or_the_root(tree, monkeypatch):
    (tree / "a" / "list.txt").write_text("x.JPG 1")
    roots = [(None, tree / "a"), (tree / "c", tree / "c"), ("c", tree / "c"), ("", tree)]
    monkeypatch.chdir(tree)
    for root, expected in roots:
        found = list_files(root, None, None, "a/list.txt", FILE_FILTERS, None, False)
        assert os.path.samefile(found.root, expected)
        assert os.path.isabs(found.root)  # a process may change its folder later


def test_the_digest_is_of_paths_and_labels_only(tree, tmp_path_factory):
    def digest(root, files, labels=None):
        return list_files(root, files, labels, None, FILE_FILTERS, None, False).digest()

    there = digest(tree, ["a", "b"])
    assert there == digest(tmp_path_factory.mktemp("elsewhere"), ["a", "b"], [0, 1])
    assert (
        len(
            {
                there,
                digest(tree, ["b", "a"]),
                digest(tree, ["a", "b"], [0, 2]),
                digest(tree, ["a", "b", "c"]),
                digest(tree, ["ab"]),
            }
        )
        == 5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "file_root is needed"),
        ({"files": ["a"], "file_list": "list"}, "exclude each other"),
        ({"file_root": ".", "labels": [1]}, "labels belong to files"),
        ({"files": []}, "files is an empty list"),
        ({"files": ["a"], "labels": []}, "0 labels for 1 files"),
        ({"files": ["a", "b"], "labels": 1}, "1 labels for 2 files"),
        ({"files": ["a"], "labels": [2**31]}, r"labels must be from -2147483648 to 2\*\*31 - 1, got 2147483648"),
        ({"file_root": ".", "filters": []}, "file_filters is an empty list"),
        ({"files": ["a"], "filters": []}, "file_filters is an empty list"),  # DALI refuses it, used or not
        ({"file_root": ".", "dirs": ()}, "dir_filters is an empty list"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        listed(**arguments)


def test_files_and_labels_in_no_order_are_refused():
    for files in ({"a", "b"}, frozenset(["a", "b"])):
        with pytest.raises(TypeError, match=f"files must be in an order, got a {type(files).__name__}"):
            listed(files=files)
    with pytest.raises(TypeError, match="labels must be in an order, got a set"):
        listed(files=["a", "b"], labels={5, 3})
    # What has one is taken, a dict and a generator too.
    for files in ({"b": 0, "a": 0}, {"b": 0, "a": 0}.keys(), (one for one in "ba"), np.array(["b", "a"])):
        assert listed(files=files, labels=(one for one in (5, 3))) == [("b", 5), ("a", 3)]


def test_types_that_are_wrong():
    with pytest.raises(TypeError, match="file_filters must be strings, got"):
        listed(".", filters=[b"*.jpg"])
    with pytest.raises(TypeError, match=r"labels must be an integer, got 1\.5"):
        listed(files=["a"], labels=[1.5])


@pytest.mark.parametrize("line", ["name", "3", " 3", "name3", "3\t\r"])
def test_a_line_without_a_label(tmp_path, line):
    (tmp_path / "list.txt").write_text(f"good 1\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*list.txt' should be a file name and a label, got"):
        listed(file_list=tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("name x", "x"),
        ("name -3", "-3"),
        ("name 3.", "3."),
        ("# name\r", "name"),
        ("name 3 # why", "why"),
        ("name \u0663", "\u0663"),
    ],
)
def test_a_label_that_is_no_number(tmp_path, line, label):
    (tmp_path / "list.txt").write_text(f"good 1\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"the label in line 2 of .*list.txt' should be digits, got '{re.escape(label)}'"):
        listed(file_list=tmp_path / "list.txt")


def test_a_label_that_is_too_large(tmp_path):
    (tmp_path / "list.txt").write_text("name 2147483648")
    with pytest.raises(ValueError, match=r"the label in line 1 of .*, got 2147483648"):
        listed(file_list=tmp_path / "list.txt")


def test_a_link_that_leads_nowhere_is_an_error_where_labels_depend_on_it(tree):
    (tree / "c/nowhere.jpg").symlink_to(tree / "missing")
    assert listed(tree, filters="nowhere.*") == [("c/nowhere.jpg", 4)]  # its error comes when it is read
    (tree / "b2").symlink_to(tree / "missing")
    for dirs in (None, "a"):
        with pytest.raises(FileNotFoundError, match="b2"):
            listed(tree, dirs=dirs)


def test_nothing_found(tree):
    (tree / "list.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"no files found in .*list.txt"):
        listed(file_list=tree / "list.txt")
    with pytest.raises(ValueError, match="no files found in"):
        listed(tree, filters="*.gif")
    with pytest.raises(FileNotFoundError) as caught:
        listed(tree / "missing")
    assert caught.value.filename == str(tree / "missing")
    with pytest.raises(FileNotFoundError):
        listed(file_list=tree / "missing")

"""Bytes with a checksum, and files that are whole or not there."""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from stateful_pipes import StatefulDataLoader
from stateful_pipes.checkpoint import dumps, loads, read, write_atomically
from stateful_pipes.errors import CheckpointFileError, StatefulPipesError
from tests.unit.files import FAULTS, failing

STATE = {"format": "x", "nodes": {"b": {"n": 1, "s": "ü\ud800\u2028"}, "a": {}}, "f": 0.1}


def test_there_and_back():
    data = dumps(STATE)
    assert type(data) is bytes
    assert loads(data) == STATE
    assert (
        json.loads(data)["sha256"]
        == hashlib.sha256(json.dumps(STATE, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    )


def test_one_state_has_one_form():
    shuffled = {"f": 0.1, "nodes": {"a": {}, "b": {"s": "ü\ud800\u2028", "n": 1}}, "format": "x"}
    assert dumps(shuffled) == dumps(STATE)
    assert dumps(loads(dumps(STATE))) == dumps(STATE)


def test_every_cut_and_every_changed_byte_is_noticed():
    data = dumps(STATE)
    rng = random.Random(0)
    damaged = [data[:size] for size in range(len(data))]
    damaged += [data + extra for extra in (b" ", b"\n", b"}", b"\0", data)]
    damaged += [b" " + data, b"\xef\xbb\xbf" + data]
    for place in range(len(data)):
        damaged.append(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        damaged.append(data[:place] + data[place + 1 :])
    for one in damaged:
        with pytest.raises(CheckpointFileError):
            loads(one)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"3",
        b"[]",
        b'"x"',
        b"{}",
        b"not json",
        b"\xff\xfe\x00",
        b"\x80\x05N.",  # a pickle
        b"PK\x03\x04",  # what torch.save writes
        b'{"sha256":null,"state":null}',
        b'{"sha256":[],"state":{}}',
        b'{"sha256":{"a":1},"state":{}}',
        b'{"state":{}}',
        b'{"sha256":"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}',
        b'{"sha256":"37517e5f3dc66819f61f5a7bb8ace1921282415f10551d2defa5c3eb0985b570","state":[]}',
        b"[" * 100_000,
        b'{"sha256":"x","state":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"sha256":"x","state":' + b'{"a":' * 100_000,
        b'{"sha256":"x","state":' + b"9" * 5000 + b"}",
        b'{"sha256":"x","state":{"a":NaN}}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_anything_else_is_refused(data):
    with pytest.raises(CheckpointFileError) as caught:
        loads(data)
    assert "older checkpoint" in caught.value.remedy


OTHER_FORMS = [
    b'{"sha256":"%s","state":{"a":1,"a":1}}',
    b'{"sha256":"%s","state":{"a":1.0}}',
    b'{"state":{"a":1},"sha256":"%s"}',
]


@pytest.mark.parametrize("wrong", OTHER_FORMS)
def test_the_right_checksum_does_not_excuse_another_form(wrong):
    digest = hashlib.sha256(b'{"a":1}').hexdigest().encode()
    assert loads(b'{"sha256":"%s","state":{"a":1}}' % digest) == {"a": 1}
    with pytest.raises(CheckpointFileError):
        loads(wrong % digest)


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_file(tmp_path, kind):
    path = kind(tmp_path / "state.json")
    write_atomically(path, dumps(STATE))
    assert read(path) == STATE
    write_atomically(path, dumps({"new": 1}))
    assert read(path) == {"new": 1}
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomically("state.json", b"x")
    assert (tmp_path / "state.json").read_bytes() == b"x"


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(dumps(STATE)[:-1])
    with pytest.raises(CheckpointFileError) as caught:
        read(path)
    assert str(path) in caught.value.__notes__[0]


class Traced:
    """Records what is done to files, in order, and fails where it is told to."""

    def __init__(self, monkeypatch, fail=None):
        self.calls = []
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name), fail))

    def _wrap(self, name, real, fail):
        def call(*args):
            kind = name
            if name == "fsync":
                kind = "sync folder" if os.path.isdir(os.readlink(f"/proc/self/fd/{args[0]}")) else "sync file"
            self.calls.append(kind)
            if kind == fail:
                raise OSError("no space")
            return real(*args)

        return call


def test_it_is_synced_before_it_takes_the_place(tmp_path, monkeypatch):
    traced = Traced(monkeypatch)
    write_atomically(tmp_path / "state.json", b"new")
    assert traced.calls == ["sync file", "replace", "sync folder"]


@pytest.mark.parametrize("fail", ["sync file", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fail):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    Traced(monkeypatch, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fault):
    """At each write, flush, fsync and replace there is; that of the folder comes after the new file is in its place."""
    loader = StatefulDataLoader(range(10), batch_size=2, shuffle=True, seed=1)
    path = tmp_path / "loader.json"
    old = loader.checkpoint(path)
    next(iter(loader))
    for at in range(100):
        with failing(monkeypatch, fault, at) as failed:
            try:
                loader.checkpoint(path)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        if not failed():
            break
        assert os.listdir(tmp_path) == ["loader.json"]
        if fault != "fsync" or at == 0:
            assert path.read_bytes() == old
    assert at > 0
    assert read(path) == loader.state_dict()


def test_the_new_file_is_for_those_that_the_old_one_was_for(tmp_path):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    os.chmod(path, 0o640)
    write_atomically(path, b"new")
    assert os.stat(path).st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127])
def test_a_name_as_long_as_it_may_be(tmp_path, name):
    write_atomically(tmp_path / name, b"new")
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_cannot_be_synced_is_logged(tmp_path, monkeypatch, caplog):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    with failing(monkeypatch, "fsync", 1) as failed:
        write_atomically(path, b"new")
    assert failed()
    assert path.read_bytes() == b"new"
    assert f"{tmp_path} cannot be synced" in caplog.text


def test_a_limit_of_the_file_size_leaves_the_old_file(tmp_path):
    """A full disk for real: the kernel refuses the write."""
    script = textwrap.dedent(f"""
        import resource, signal
        from stateful_pipes import StatefulDataLoader
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = {str(tmp_path / "loader.json")!r}
        loader = StatefulDataLoader(range(10), batch_size=2, shuffle=True, seed=1)
        loader.checkpoint(path)
        state = loader.state_dict()
        next(iter(loader))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            loader.checkpoint(path)
        except OSError as error:
            print(type(error).__name__, error.errno)
        resumed = StatefulDataLoader(range(10), batch_size=2, shuffle=True, checkpoint=path)
        assert resumed.state_dict() == state
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"OSError {errno.EFBIG}\n"
    assert os.listdir(tmp_path) == ["loader.json"]


def test_a_read_only_folder(tmp_path, monkeypatch):
    """As its owner root may write anywhere, the refusal is put in the way of os.open's user."""
    path = tmp_path / "loader.json"
    write_atomically(path, b"old")
    opened = builtins.open

    def refuse(name, mode="r", *arguments, **options):
        if "x" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, mode, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", refuse)
        with pytest.raises(PermissionError, match="Permission denied"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["loader.json"]


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_kill_while_it_is_written_leaves_the_old_file(tmp_path, where):
    path = tmp_path / "loader.json"
    script = textwrap.dedent(f"""
        import builtins, os, signal
        from stateful_pipes.checkpoint import write_atomically
        write_atomically({str(path)!r}, b"old")
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        if {where!r} == "write":
            write_atomically({str(path)!r}, lambda file: (file.write(b"n"), file.flush(), kill()))
        setattr(os, {where!r}, kill)
        write_atomically({str(path)!r}, b"new")
    """)
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "state.json", b"x")


def test_others_may_read_it_as_any_new_file(tmp_path):
    """A checkpoint that only its writer can read is lost to the job that resumes under another user."""
    plain, checkpoint = tmp_path / "plain", tmp_path / "checkpoint"
    plain.write_bytes(b"x")
    write_atomically(checkpoint, b"x")
    assert checkpoint.stat().st_mode == plain.stat().st_mode


def test_the_loader_s_own_door(tmp_path):
    loader = StatefulDataLoader(range(10), batch_size=2, shuffle=True, seed=1)
    next(iter(loader))
    path = tmp_path / "loader.json"
    data = loader.checkpoint(path)
    assert path.read_bytes() == data == loader.checkpoint()
    assert loads(data) == loader.state_dict()
    expected = [batch.tolist() for batch in loader]
    for checkpoint in (data, path, str(path), loads(data)):
        resumed = StatefulDataLoader(range(10), batch_size=2, shuffle=True, checkpoint=checkpoint)
        assert resumed.is_restored_from_checkpoint
        assert [batch.tolist() for batch in resumed] == expected


@pytest.mark.parametrize("checkpoint", [b"", b"{}", {"format": "x"}])
def test_a_wrong_checkpoint_at_construction(checkpoint):
    with pytest.raises(StatefulPipesError):
        StatefulDataLoader(range(10), checkpoint=checkpoint)


def test_a_missing_checkpoint_at_construction(tmp_path):
    with pytest.raises(FileNotFoundError):
        StatefulDataLoader(range(10), checkpoint=tmp_path / "none.json")


@pytest.mark.parametrize("checkpoint", [3, [1], ("a",)])
def test_a_checkpoint_of_another_type(checkpoint):
    with pytest.raises(TypeError):
        StatefulDataLoader(range(10), checkpoint=checkpoint)


@pytest.mark.parametrize("user", [{"rate": 0.1, "names": ["a", "ü"]}, [], 0, False, "x"])
def test_an_entry_of_the_caller_s_own(tmp_path, user):
    loader = StatefulDataLoader(range(10), batch_size=2, shuffle=True, seed=1)
    next(iter(loader))
    data = loader.checkpoint(tmp_path / "loader.json", user=user)
    assert loads(data) == loader.state_dict()
    for checkpoint in (data, tmp_path / "loader.json"):
        resumed = StatefulDataLoader(range(10), batch_size=2, shuffle=True, checkpoint=checkpoint)
        assert (resumed.user, resumed.position.consumed) == (user, 2)
        assert resumed.checkpoint(user=resumed.user) == data
    with pytest.raises(CheckpointFileError):
        loads(data.replace(json.dumps(user, sort_keys=True, separators=(",", ":")).encode(), b"1"))


def test_without_an_entry_of_the_caller_s_own():
    loader = StatefulDataLoader(range(10), batch_size=2)
    assert loader.user is StatefulDataLoader(range(10), batch_size=2, checkpoint=loader.checkpoint()).user is None
    with pytest.raises(TypeError, match="not JSON serializable"):
        loader.checkpoint(user=object())

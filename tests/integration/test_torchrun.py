"""Trainings that torchrun starts, for real: killed, resumed by other numbers of ranks, and restarted by torchrun itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.integration import elastic_training
from tests.integration.elastic_training import EPOCHS, STREAMS, loader_of

LIMIT = 180  # seconds for one torchrun, which takes about ten; nothing else waits for time
WORLD_SIZES = [4, 2, 3]
TAMPERED = 1


def stat(pid):
    """The parent of a process, and what it was started with."""
    with suppress(OSError):
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return int(parent), Path(f"/proc/{pid}/cmdline").read_text()
    return 0, ""


class Torchrun:
    """One torchrun; it and all below it are gone when this is left, or when it has taken too long."""

    def __init__(self, folder, life, ranks, *arguments, max_restarts=0):
        self.folder = folder
        self.output = []
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        # Not --standalone: that asks for the name of the machine, and may wait for a name server for ever. And a store for each
        # life: in one that torchrun keeps over a restart, Gloo finds where the dead ranks listened.
        run += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        self.process = subprocess.Popen(
            [*run, elastic_training.__file__, str(folder), *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LIFE": str(life)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._watchdog = threading.Timer(LIMIT, self._kill_all)

    def __enter__(self):
        self._watchdog.start()
        return self

    def __exit__(self, *error):
        self._watchdog.cancel()
        self._kill_all()
        self._read()
        self.process.wait()
        self.process.stdout.close()

    def read_until(self, wanted):
        """Reads on to a line of its output."""
        assert self._read(wanted), f"it ended before it said {wanted!r}:\n{self.shown()}"

    def finish(self):
        """Reads to the end, when the last process that may write is gone; returns the exit code."""
        self._read()
        return self.process.wait()

    def shown(self):
        return "".join(self.output)

    def kill(self):
        """Kills torchrun and its ranks at once, but not the ranks' workers, which are to end by themselves."""
        self.process.send_signal(signal.SIGSTOP)  # else it would see the ranks die first
        ranks = [pid for pid in self._members() if stat(pid)[0] == self.process.pid]
        for pid in [*ranks, self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        return len(ranks)

    def _read(self, wanted=None):
        for line in self.process.stdout:
            self.output.append(line)
            if line.strip() == wanted:
                return True
        return False

    def _members(self):
        """All processes of this run, which have its folder on their command lines, as forks of them have."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()]
        return [pid for pid in pids if str(self.folder) in stat(pid)[1].split("\0")]

    def _kill_all(self):
        while members := [pid for pid in self._members() if pid != self.process.pid or self.process.poll() is None]:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def lives_of(folder):
    """For each time that the training was started, in order, the logs of its ranks."""
    lives = {}
    for path in folder.glob("log.*"):
        *life, rank = map(int, path.name.split(".")[1:])
        lives.setdefault(tuple(life), {})[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return [[ranks[rank] for rank in range(len(ranks))] for _, ranks in sorted(lives.items())]


def told(ranks, key):
    """What each rank logged under a name."""
    return [[entry[key] for entry in log if key in entry] for log in ranks]


def units_of(stream, batches):
    """What is dealt out to the ranks in turn, of one batch each: samples, or the batches as they are."""
    return [sample for row in zip(*batches, strict=True) for sample in row] if stream == "samples" else batches


def consumed(lives, stream):
    """What all ranks consumed, in global order, by epoch; of what a life consumed after its last checkpoint, the next one's."""
    epochs = [[] for _ in range(EPOCHS)]
    starts = [told(ranks, "loaded")[0][0] for ranks in lives]
    for ranks, until in zip(lives, [*starts[1:], None], strict=True):
        shares = [[entry for entry in log if entry.get("stream") == stream] for log in ranks]
        shares = [[entry for entry in share if until is None or entry["step"] < until] for share in shares]
        assert len({len(share) for share in shares}) == 1, "all ranks get equally many batches"
        for entries in zip(*shares, strict=True):
            assert len({(entry["step"], entry["epoch"]) for entry in entries}) == 1
            epochs[entries[0]["epoch"]] += units_of(stream, [entry["batch"] for entry in entries])
    return epochs


def indices(units):
    return [unit[0] if isinstance(unit[0], float) else [sample[0] for sample in unit] for unit in units]


def check_stream(lives, stream):
    """The ranks of all lives together consumed what one process does that is never killed."""
    with loader_of(stream) as loader:
        truth = [[unit for batch in loader for unit in units_of(stream, [batch.tolist()])] for _ in range(EPOCHS)]
    padded = 0
    for expected, found in zip(truth, consumed(lives, stream), strict=True):
        assert found[: len(expected)] == expected
        padding = found[len(expected) :]
        assert len(padding) < max(map(len, lives))
        assert indices(padding) == indices(expected[: len(padding)])
        assert all(one != other for one, other in zip(padding, expected, strict=False)), "padding has draws of its own"
        padded += len(padding)
    return padded


def check_model(lives):
    """Each life began with the model of the checkpoint whose step it began with, and all ranks ended with the same."""
    saved = {entry["saved"]: entry["model"] for ranks in lives for entry in ranks[0] if "saved" in entry}
    for ranks in lives[1:]:
        loaded = {(entry["loaded"], entry["model"]) for log in ranks for entry in log if "loaded" in entry}
        assert len(loaded) == 1
        assert loaded <= set(saved.items())
    last = [log[-1] for log in lives[-1]]
    assert "finished" in last[0]
    assert last == [last[0]] * len(last)


def test_other_numbers_of_ranks_go_on_with_the_stream_of_one(tmp_path):
    """4 ranks, all killed; 2 ranks, all killed; 3 ranks, to the end."""
    for life, (ranks, hang_at) in enumerate(zip(WORLD_SIZES, [3, 9, None], strict=True)):
        hang = [] if hang_at is None else ["--hang-at", hang_at]
        tampered = ["--tampered", TAMPERED] if life == 1 else []
        with Torchrun(tmp_path, life, ranks, "--workers", 1, *hang, *tampered) as run:
            if hang_at is None:
                assert run.finish() == 0, run.shown()
            else:
                run.read_until("hangs")
                assert run.kill() == ranks, run.shown()
                assert run.finish() == -signal.SIGKILL, run.shown()
    lives = lives_of(tmp_path)
    assert [len(ranks) for ranks in lives] == WORLD_SIZES
    assert [told(ranks, "world_size") for ranks in lives] == [[[size]] * size for size in WORLD_SIZES]
    assert [told(ranks, "loaded")[0] for ranks in lives] == [[0], [2], [8]]
    for stream in STREAMS:
        assert check_stream(lives, stream) > 0  # somewhere the epoch did not divide by the ranks
        check_tampered(lives[1], stream)
    check_model(lives)
    assert len({tuple(steps) for steps in told(lives[-1], "step")}) == 1  # at which the ranks end


def check_tampered(ranks, stream):
    """A rank whose state was tampered with was named on all."""
    found = [[entry for entry in log if entry.get("tampered") == stream] for log in ranks]
    for (entry,) in found:
        assert not entry["changed"]
        assert "ranks [1] were given another one than ranks [0]; load the same on all\n  rank 1: sampler.seed" in entry["told"]
    assert found[0] == found[1]


def test_torchrun_restarts_all_ranks_and_the_stream_is_the_same(tmp_path):
    """3 ranks, one of which is killed; torchrun ends the others and starts them all again."""
    with Torchrun(tmp_path, 0, 3, "--die-at", 5, max_restarts=2) as run:
        assert run.finish() == 0, run.shown()
    lives = lives_of(tmp_path)
    assert [len(ranks) for ranks in lives] == [3, 3]
    assert [told(ranks, "loaded") for ranks in lives] == [[[0]] * 3, [[4]] * 3]
    assert max(told(lives[0], "step")[1]) == 4  # of the next one, rank 1 consumed nothing
    for stream in STREAMS:
        check_stream(lives, stream)
    check_model(lives)

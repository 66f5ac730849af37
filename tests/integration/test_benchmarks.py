"""The benchmarks run, and report what they say they do. What they measure is not looked at: time decides nothing here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXPECTED = [
    ("stateful_pipes", 0, 5),
    ("stateful_pipes", 10**6, 5),
    ("stateful_pipes", 10**9, 5),
    ("stateful_pipes", 10**12, 5),
    ("torchdata", 0, 2),
    ("torchdata", 9_984, 2),
    ("torchdata", 99_968, 2),
    ("state_dict(), 2 workers", 10**12, 5),
]
HEADER = re.compile(r"what +position +times +median ms +p10 ms +p90 ms +ratio")
LINE = re.compile(r"(\S.*?) +([\d,]+) +(\d+) +\d+\.\d{3} +\d+\.\d{3} +\d+\.\d{3} +(\d+\.\d\d|-)")


def rows_of(table):
    """What, position and count of a table's lines, all of which must be whole."""
    header, *lines = table
    assert HEADER.fullmatch(header)
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), table
    assert [match[4] == "-" for match in matches] == [match[1].startswith("state_dict") for match in matches]
    assert [match[4] for match in matches if match[2] == "0"] == ["1.00", "1.00"]
    return [(match[1], int(match[2].replace(",", "")), int(match[3])) for match in matches]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "resume.json"
    command = [sys.executable, str(BENCHMARKS / "resume.py"), "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), json.loads(path.read_text())


def test_the_table_has_a_line_for_each_position(smoke):
    *table, size = smoke[0]
    assert rows_of(table) == EXPECTED
    assert re.fullmatch(r"state as JSON: \d+ bytes", size)


def test_the_json_has_every_time_and_what_it_depends_on(smoke):
    found = smoke[1]
    assert [(row["what"], row["position"], len(row["seconds"])) for row in found["rows"]] == EXPECTED
    assert found["versions"].keys() == {"python", "numpy", "torch", "torchdata", "stateful_pipes"}
    assert found["cores"] >= 1
    assert found["commit"]
    assert found["smoke"] is True
    assert found["state_bytes"] > 0


def test_the_docstring_and_the_readme_show_the_same_whole_table():
    text = (BENCHMARKS / "resume.py").read_text().split('"""')[1]
    table = [line[4:] for line in text.splitlines() if re.match(r"    (what|stateful_pipes|torchdata|state_dict)", line)]
    assert {(what, position) for what, position, _ in rows_of(table)} > {(what, position) for what, position, _ in EXPECTED}
    assert "\n".join(table) in (BENCHMARKS / "README.md").read_text()

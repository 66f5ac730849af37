"""The benchmarks run, and report what they say they do. What they measure is not looked at: time decides nothing here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUESTIONS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if re.search(r"^    report\(", path.read_text(), re.MULTILINE))
HEADER = re.compile(r"what +unit +times +lower q\. +median +upper q\. +target +reached")
LINE = re.compile(r"(\S.*?) {2,}(\S.*?) +(\d+)(?: +-?[\d.,e+-]+){3} {2,}(?:- +-|at (?:least|most) [\d.e+-]+ +(?:yes|no))")


def run(name, *arguments):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_benchmark_is_among_those_that_run():
    with_main = {path.stem for path in BENCHMARKS.glob("*.py") if "def main(" in path.read_text()}
    assert set(QUESTIONS) == with_main - {"plot"}
    assert {"throughput", "peers_throughput", "limit", "resume"} <= with_main


@pytest.mark.parametrize("name", QUESTIONS)
def test_it_runs_and_reports_its_figures(name, tmp_path):
    path = tmp_path / f"{name}.json"
    printed = run(name, "--smoke", "--json", path)
    found = json.loads(path.read_text())
    check_table(printed, found["figures"])
    assert found["benchmark"] == name
    assert found["versions"].keys() >= {"python", "numpy", "torch", "torchdata", "stateful_pipes"}
    assert found["cores"] >= 1
    assert found["commit"]
    assert found["smoke"] is True
    for figure in found["figures"]:
        assert figure["lower"] <= figure["median"] <= figure["upper"]
        assert (figure["reached"] is None) == (figure["target"] is None)
    if name == "throughput":
        drawn = run("plot", "--results", tmp_path)
        assert {str(tmp_path / "throughput.png"), str(tmp_path / "cpu.png")} <= set(drawn)
        assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in drawn)


def check_table(printed, figures):
    """It has a whole line for each figure of the JSON."""
    head = next(number for number, line in enumerate(printed) if HEADER.fullmatch(line.strip()))
    lines = [LINE.fullmatch(line) for line in printed[head + 1 : head + 1 + len(figures)]]
    assert all(lines), printed
    assert [(line[1], line[2], int(line[3])) for line in lines] == [
        (figure["what"], figure["unit"], len(figure["values"])) for figure in figures
    ]
    assert len({(figure["what"], figure["unit"]) for figure in figures}) == len(lines)


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_docstring_gives_the_command_and_a_place_for_the_table(name):
    text = (BENCHMARKS / f"{name}.py").read_text().split('"""')[1]
    assert f"python benchmarks/{name}.py" in text
    assert "[--json PATH] [--smoke]" in text
    assert re.search(r"^Latest.*:$", text, re.MULTILINE)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_table_in_a_docstring_is_whole_and_the_one_in_the_readme(name):
    _, _, latest = (BENCHMARKS / f"{name}.py").read_text().split('"""')[1].partition("\nLatest")
    shown = [line.removeprefix("    ") for line in latest.splitlines() if line.startswith("    ")]
    if shown:
        header, *lines = shown
        assert HEADER.fullmatch(header)
        assert lines
        assert all(map(LINE.fullmatch, lines))
        assert "\n".join(shown) in (BENCHMARKS / "README.md").read_text()

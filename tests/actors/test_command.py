"""The command line without a cluster: what it refuses, its exit codes, and `sweep`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvfabric.__main__ import main
from kvfabric.actors.demo.tally import Served, Tally
from kvfabric.actors.demo.view import finish
from kvfabric.actors.engines.reference import Generated
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.tiers.pool.daemon import PoolProcess

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'


def command(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["kvfabric", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trace", "no-such-file.jsonl"], "trace: no-such-file.jsonl: No such file"),
        (["--trace", "cut.jsonl"], r"cut\.jsonl:2 is malformed"),
        (["--trace", "empty.jsonl"], r"trace: empty\.jsonl has no requests"),
        (["--scale", "0.3"], r"scale: 0\.3 makes 153\.6 tokens"),
        (["--chunk-tokens", "24"], "chunk_tokens: 24 is not a multiple of block_tokens 16"),
        (["--region-bytes", "4096"], r"region_bytes: 4096 bytes .* no room for one chunk"),
        (["--region-bytes", "-1"], r"host\.region_bytes"),
        (["--region-bytes", "0"], "region_bytes: is 0"),
        (["--block-tokens", "0"], "block_tokens: is 0"),
        (["--block-tokens", "64", "--chunk-tokens", "64"], "block_tokens: 64 does not divide 32"),
        (["--workers", "0"], "workers: is 0"),
        (["--kill", "--conversations", "1", "--turns", "1"], "kill: 1 request leaves none"),
        (["--turns", "-1"], "turns: is -1"),
        (["--requests", "0"], "requests: is 0"),
        (["--plot", "no-such-folder/demo.png"], "plot: no-such-folder is no folder"),
        (["--plot", "temporary"], "plot: temporary is a folder"),
        (["--plot", "demo.unknown"], r"plot: demo\.unknown ends with none of \.png"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "cut.jsonl").write_text(GOOD + GOOD[:40])
    (tmp_path / "empty.jsonl").write_text("")
    code, out, err = command(monkeypatch, capsys, "demo", "--network", "host", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvfabric: ")
    assert re.search(said, line)
    assert not list((tmp_path / "temporary").iterdir())
    assert not list(Path("/dev/shm").glob(f"kvfabric-demo-{os.getpid()}-*"))


@pytest.mark.slow
def test_a_truncated_trace_ends_the_real_command(tmp_path):
    trace = tmp_path / "cut.jsonl"
    trace.write_text(GOOD + GOOD[:40])
    ran = subprocess.run(
        [sys.executable, "-m", "kvfabric", "demo", "--network", "host", "--trace", trace],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(r"kvfabric: \S+cut\.jsonl:2 is malformed: .*\n", ran.stderr)


def generated(*tokens):
    return Generated(list(tokens), 10, 4, {"host": 6}, {"host": 600}, 0.1, 0.2)


@pytest.mark.parametrize(("plain", "code"), [((7, 8), 0), ((7, 9), 1), ((6, 8), 1), ((7,), 1)])
def test_tokens_that_differ_are_an_exit_code_and_are_named(capsys, plain, code):
    tally = Tally()
    tally.add(Served(5, 0, generated(7), generated(7, 8), generated(*plain), "a", "b", 0))
    console = Console(stderr=True, width=100)
    assert finish(tally, console, as_json=True) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens_identical"] is (code == 0)
    assert ("requests that differ: [5]" in err) is (code == 1)


def test_prompt_tokens_that_decode_workers_computed_are_told_too(capsys):
    tally = Tally()
    decoded = Generated([7, 8], 10, 3, {"peer": 7}, {"peer": 700}, 0.1, 0.2)
    tally.add(Served(0, 0, generated(7), decoded, generated(7, 8), "a", "b", 0))
    tally.add(Served(1, 1, generated(7), decoded, generated(7, 8), "a", "b", 0))
    assert finish(tally, Console(width=100), as_json=True) == 0
    table, summary = capsys.readouterr().out.rsplit("\n{", 1)
    summary = json.loads("{" + summary)
    assert summary["computed_tokens"] == 8
    assert summary["handoff_tokens"] == 14
    assert summary["handoff_computed_tokens"] == 6
    assert re.search(r"computed again by decode workers *│ *0 │ *6 │", table)


def test_the_demo_command_ends_with_that_code(tmp_path, monkeypatch, capsys):
    tally = Tally()
    tally.add(Served(0, 0, generated(7), generated(7, 8), generated(7, 9), "a", "b", 0))
    monkeypatch.setattr("kvfabric.actors.demo.run.run", lambda *_: tally)
    picture = tmp_path / "demo.png"
    options = ["--network", "host", "--json", "--plot", str(picture)]
    code, out, _ = command(monkeypatch, capsys, "demo", *options)
    assert code == 1
    assert json.loads(out.splitlines()[-1])["tokens_identical"] is False
    assert picture.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_costs_no_figures(monkeypatch, capsys):
    tally = Tally()
    tally.add(Served(0, 0, generated(7), generated(7, 8), generated(7, 8), "a", "b", 0))
    monkeypatch.setattr("kvfabric.actors.demo.run.run", lambda *_: tally)
    options = ["--network", "host", "--json", "--plot", "/proc/demo.png"]
    code, out, err = command(monkeypatch, capsys, "demo", *options)
    assert code == 2
    assert json.loads(out)["tokens_identical"] is True
    assert re.match(r"kvfabric: plot: /proc/demo\.png", err.splitlines()[-1])


def test_sweep_says_when_there_is_no_folder_or_nothing_to_do(tmp_path, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "sweep", "--directory", str(tmp_path / "no"))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"kvfabric: directory: .*No such file.*\n", err)
    code, out, err = command(monkeypatch, capsys, "sweep", "--directory", str(tmp_path))
    assert (code, out, err) == (0, "", "nothing to remove\n")


@pytest.mark.slow
@pytest.mark.nixl
def test_sweep_removes_all_files_of_a_killed_pool(monkeypatch, capsys):
    run = f"command-{os.getpid()}"
    host = {"slot_bytes": 4096, "region_bytes": 64 * 4096}
    pool = PoolProcess(parse(PoolConfig, {"node": "n", "run": run, "host": host}))
    files = sorted(str(path) for path in Path("/dev/shm").glob(f"kvfabric-{run}-n.*"))
    assert [file.rpartition(".")[2] for file in files] == ["control", "seg0", "sock"]
    code, out, _ = command(monkeypatch, capsys, "sweep", "--run", run)
    assert (code, out) == (0, "")
    pool.kill()
    code, out, _ = command(monkeypatch, capsys, "sweep", "--run", run)
    assert code == 0
    assert sorted(line.split()[1] for line in out.splitlines()) == files
    assert not [file for file in files if Path(file).exists()]

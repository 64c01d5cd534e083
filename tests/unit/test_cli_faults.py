"""What goes wrong outside of us - the disk, the keyboard, the machine - is one line with the right advice."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from io import BytesIO, FileIO, TextIOWrapper

import pytest
import torch

from fixtures_models import tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import RECIPE, write_rows
from paceline.cli import __main__ as cli
from paceline.cli._outputs import check_record_path
from paceline.cli._progress import interruptible
from paceline.errors import ConfigError, Interrupted

STEP = "import os, signal, sys; from paceline.cli import __main__ as cli; "


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(layers=3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, target):
    rows = write_rows(tmp_path / "rows.jsonl", count=20)
    path = tmp_path / "recipe.toml"
    path.write_text(f'[target]\nname = "{target}"\n' + RECIPE.format(rows=rows))
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["hello"]}\n{"turns": ["bye"]}\n')
    return path


def one_line(capsys, *said, code=cli.MISTAKE, arguments):
    assert cli.run([str(argument) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("paceline: ") and error.count("\n") == 1, error
    for each in said:
        assert each in error


def commands(recipe, target, prompts, out):
    """Every command that writes, with `out` as its --out."""
    return {
        "train": ["train", recipe, "--out", out, "-s", "training.steps=1"],
        "capture": ["capture", recipe, "--out", out],
        "synth": ["synth", "--target", target, "--out", out, "--answer-tokens", 5],
        "bench": ["bench", "--target", target, "--draft", "ngram", "--workload", prompts, "--out", out],
        "diagnose": ["diagnose", "--target", target, "--draft", "smollm2-eagle3", "-w", prompts, "--out", out],
        "verify-cost": ["verify-cost", "--target", target, "--out", out, "--nodes", 1, "--context", 4, "--rounds", 1],
        "train-cost": ["train-cost", recipe, "--out", out, "--steps", 1],
    }


@pytest.mark.parametrize("name", ["train", "capture", "synth"])
def test_an_out_that_is_a_file_is_one_line(name, tmp_path, recipe, target, prompts, capsys):
    out = tmp_path / "file"
    out.write_text("mine")
    one_line(capsys, str(out), "it is a file", arguments=commands(recipe, target, prompts, out)[name])
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["bench", "diagnose", "verify-cost", "train-cost"])
def test_an_out_that_is_a_folder_is_refused_before_measuring(name, tmp_path, recipe, prompts, capsys):
    arguments = commands(recipe, "nowhere/to/be/found", prompts, tmp_path)[name]
    one_line(capsys, "is a folder, expected a file", arguments=arguments)


@pytest.mark.parametrize("name", ["bench", "diagnose", "verify-cost", "train-cost"])
def test_a_record_that_is_there_is_not_lost(name, tmp_path, recipe, prompts, capsys):
    out = tmp_path / "record.json"
    out.write_text("hours of work")
    arguments = commands(recipe, "nowhere/to/be/found", prompts, out)[name]
    one_line(capsys, "record.json exists; choose another --out, or pass --force", arguments=arguments)
    recipe.write_text(recipe.read_text().replace('name = "', 'name = "nowhere/'))
    one_line(capsys, "nowhere", arguments=[*arguments, "--force"])
    assert out.read_text() == "hours of work"


@pytest.mark.parametrize("name", ["train", "capture", "synth", "bench", "diagnose", "verify-cost", "train-cost"])
def test_an_out_under_a_file_is_one_line(name, tmp_path, recipe, target, prompts, capsys):
    out = tmp_path / "rows.jsonl" / "out"
    one_line(capsys, "a file, expected", arguments=commands(recipe, target, prompts, out)[name])


@pytest.mark.parametrize("name", ["train", "capture", "synth", "bench", "verify-cost"])
def test_a_read_only_disk_is_one_line(name, tmp_path, recipe, target, prompts, capsys, monkeypatch):
    monkeypatch.setattr("paceline.measure.verify_cost.READ_FLOATS", 1 << 10)
    monkeypatch.setattr("paceline.measure.verify_cost.PRODUCT", (4, 4, 4))

    def refuse(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    arguments = commands(recipe, target, prompts, tmp_path / "new" / "out")[name]
    one_line(capsys, "Read-only file system; it cannot be written to; choose another --out", arguments=arguments)


def test_a_folder_without_room_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to; choose another --out"):
        check_record_path(tmp_path / "deep" / "record.json", may_replace=False)


def test_a_full_disk_in_synth_names_the_file(tmp_path, target, capsys, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(FileIO):
        write = full

    monkeypatch.setattr("paceline.data.synth_run.open_lines", lambda path: Full(path, "a"))
    arguments = ["synth", "--target", target, "--out", tmp_path / "out", "--answer-tokens", 5]
    one_line(capsys, ".jsonl: No space left on device; free space and run again", arguments=arguments)


@pytest.mark.parametrize("threads", ["100000", str(4 * (os.cpu_count() or 1) + 1)])
@pytest.mark.parametrize("name", ["bench", "diagnose", "capture", "synth", "verify-cost"])
def test_far_too_many_threads_are_refused(name, threads, tmp_path, recipe, target, prompts, capsys):
    arguments = [*commands(recipe, target, prompts, tmp_path / "out.json")[name], "--threads", threads]
    one_line(capsys, f"--threads: found {threads}, expected 1 to", arguments=arguments)


def test_far_too_many_threads_of_others_are_refused(tmp_path, recipe, target, capsys):
    said = "found 100000, expected 1 to"
    one_line(capsys, said, arguments=["generate", "hello", "--target", target, "--threads", "100000"])
    one_line(capsys, said, arguments=["demo", "--threads", "100000"])
    for name in ("train", "train-cost"):
        arguments = [name, recipe, "--out", tmp_path / "out", "-s", "training.threads=100000"]
        one_line(capsys, f"training.threads: {said}", arguments=arguments)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", ["bench", "generate", "synth"])
@pytest.mark.parametrize("seed", ["-3", "99999999999999999999999"])
def test_a_seed_that_no_generator_takes_is_refused_at_once(name, seed, tmp_path, recipe, prompts, capsys):
    known = {**commands(recipe, "x/y", prompts, tmp_path / "out"), "generate": ["generate", "hello"]}
    one_line(capsys, "--seed", arguments=[*known[name], "--seed", seed])


def test_two_records_of_one_name_are_refused(tmp_path, recipe, prompts, capsys):
    out = tmp_path / "r.json"
    plans = ["--plan", "chain:1", "--plan", "chain:2", "--out", tmp_path / "." / "r.json"]
    arguments = [*commands(recipe, "x/y", prompts, out)["bench"], *plans]
    one_line(capsys, "found two records named", arguments=arguments)


@pytest.mark.parametrize("name", ["bench", "generate", "synth"])
@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_one_line(name, device, tmp_path, recipe, target, prompts, capsys):
    known = {**commands(recipe, target, prompts, tmp_path / "out"), "generate": ["generate", "hello", "-t", target]}
    one_line(capsys, f"found device '{device}'", arguments=[*known[name], "--device", device])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["bench", "generate", "synth"])
def test_a_dtype_that_no_target_has_is_one_line(name, tmp_path, recipe, target, prompts, capsys):
    known = {**commands(recipe, target, prompts, tmp_path / "out"), "generate": ["generate", "hello", "-t", target]}
    one_line(capsys, "found dtype 'float8', expected one of float32", arguments=[*known[name], "--dtype", "float8"])


def test_generate_computes_in_the_dtype_that_is_asked_for(target, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("paceline.cli._generation.stream", lambda console, target, *_, **__: opened.append(target))
    arguments = ["generate", "hello", "--target", str(target), "--dtype", "bfloat16", "--device", "cpu"]
    assert cli.run(arguments) == 0
    assert (opened[0].dtype, opened[0].device.type) == (torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--context", "100000000000"), ("--nodes", "100000"), ("--nodes", "9" * 5000), ("--nodes", "\u00b2")],
)
def test_absurd_sizes_are_one_line(option, value, tmp_path, recipe, target, prompts, capsys):
    arguments = [*commands(recipe, target, prompts, tmp_path / "v.json")["verify-cost"], option, value]
    one_line(capsys, option, arguments=arguments)


@pytest.mark.parametrize("records", ["missing", "empty"])
def test_results_without_records_leave_the_tables_alone(records, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    document = tmp_path / "doc.md"
    document.write_text("<!-- results:core -->\nfilled\n<!-- /results -->\n")
    one_line(capsys, "--records", arguments=["results", document, "--records", tmp_path / records])
    assert "filled" in document.read_text()


def test_memory_that_is_not_there_is_one_line_and_other_runtime_errors_are_bugs(monkeypatch, capsys):
    raised: list[Exception] = [RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), MemoryError()]

    def app(**_):
        raise raised[0]

    monkeypatch.setattr("paceline.cli._app.build_app", lambda: app)
    for _ in range(2):
        one_line(capsys, "not enough memory", arguments=["x"])
        raised.pop(0)
        raised.append(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["x"])


def test_ctrl_c_says_what_is_kept(monkeypatch, capsys):
    def app(**_):
        with interruptible(lambda: "3 rows are kept"):
            raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli._app.build_app", lambda: app)
    assert cli.run(["x"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "paceline: interrupted: 3 rows are kept\n"
    with pytest.raises(Interrupted), interruptible(lambda: ""):
        raise KeyboardInterrupt


def test_ctrl_c_in_an_import_ends_with_130_and_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    code = STEP + "signal.signal(signal.SIGINT, cli._on_interrupt); sys.path.insert(0, sys.argv[1]); import slow"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (cli.INTERRUPTED, "paceline: interrupted\n")


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("train", "out/state", "is kept in .*out/state; go on with --resume"),
        ("synth", "out/rows.jsonl", "rows are kept in .*out; run the same command again to go on"),
    ],
)
def test_ctrl_c_during_work_is_one_line_with_130(name, file, said, tmp_path, recipe, target, prompts):
    out = tmp_path / "out"
    known = commands(recipe, target, prompts, out)
    more = {"train": ["-s", "training.steps=100000", "-s", "training.save_every=1"], "synth": []}
    arguments = [str(each) for each in [*known[name], *more[name]]]
    arguments = [each.replace("5", "500000000") if each == "5" else each for each in arguments]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 90
    place = tmp_path / file
    while time.monotonic() < deadline and not (any(place.glob("step-*")) or (place.is_file() and place.stat().st_size)):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED, error
    line = [each for each in error.splitlines() if each.startswith("paceline: ")]
    assert len(line) == 1 and re.search(said, line[0]), error
    assert "Traceback" not in error


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_on_standard_input_are_told_by_their_encoding(errors, target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\xff\xfe"), encoding="utf-8", errors=errors))
    said = "standard input is not text in utf-8"
    one_line(capsys, said, arguments=["generate", "-", "--target", target])


def test_a_prompt_that_is_no_text_is_told_so(target, capsys):
    one_line(capsys, "PROMPT is not text in utf-8", arguments=["generate", "\udcff", "--target", target])

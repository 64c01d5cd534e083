"""Importing the package, and asking the command line for help, costs next to nothing."""

import resource
import subprocess
import sys

HEAVY = ("torch", "transformers", "accelerate", "numpy", "safetensors", "huggingface_hub", "pydantic")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a child: what a quiet machine would wait, however busy this one is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_paceline_is_light():
    code = f"""
import sys, time
start = time.process_time()
import paceline
print(time.process_time() - start, sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    seconds, _, heavy = run(code).strip().partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.3


def test_commands_are_found_without_heavy_imports():
    code = f"""
import sys
from paceline.cli._app import build_app
build_app()
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_help_takes_less_than_a_second():
    command = [sys.executable, "-m", "paceline.cli", "--help"]
    assert min(cpu_seconds(command) for _ in range(2)) < 1.0

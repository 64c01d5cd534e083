"""A file can be read at one sitting, and a function on one screen."""

import ast

from house.source import ROOT, Module, functions, modules, parse

HARD_FILE = 400  # lines
HARD_TEST_FILE = 500
FUNCTION = 40  # lines of body, docstring not counted
LONG_FUNCTION = 80
# The only places where a long function may stand: the two loops, and a network's forward.
LONG_FILES = ("decoding.loop", "training.trainer")


def too_long(module: Module) -> list[str]:
    """Functions whose body is longer than the house allows there."""
    faults = []
    for function in functions(module.tree):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
        limit = LONG_FUNCTION if module.name in LONG_FILES or function.name == "forward" else FUNCTION
        if lines > limit:
            faults.append(f"{module.path}:{function.lineno}: {function.name} has {lines} lines, at most {limit}")
    return faults


def test_no_file_is_too_long():
    sizes = {module.path: len(module.text.splitlines()) for module in modules()}
    assert not {path: lines for path, lines in sizes.items() if lines > HARD_FILE}


def test_no_test_file_is_too_long():
    sizes = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in ROOT.glob("tests/**/*.py")}
    assert not {path: lines for path, lines in sizes.items() if lines > HARD_TEST_FILE}


def test_no_function_is_too_long():
    assert not [fault for module in modules() for fault in too_long(module)]


def test_a_long_function_is_caught():
    body = "    x = 1\n"
    assert too_long(parse("ops.tree", "def f():\n" + body * 41))
    assert not too_long(parse("ops.tree", 'def f():\n    """Says\n    a\n    lot."""\n' + body * 40))
    assert not too_long(parse("drafts.eagle3", "def forward():\n" + body * 80))
    assert too_long(parse("decoding.loop", "def f():\n" + body * 81))

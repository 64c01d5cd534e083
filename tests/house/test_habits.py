"""Small habits that keep the house readable: docstrings, seeds by hand, no probing, no traces of anyone's machine."""

import ast
import re

import pytest

from house.source import ROOT, Module, dotted_call, functions, modules, parse, repository_files

PROBING_ROOMS = ("targets", "interop")  # the rooms that meet objects of other people
RANDOM = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"}
GLOBAL_SEEDS = {"torch.manual_seed", "torch.seed", "random.seed", "np.random.seed", "numpy.random.seed"}
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile("(?:/" + "work/|/" + "root/|/" + "home/|/" + r"Users/|[A-Z]:\\" + r"\\?Users)")
UNFINISHED = re.compile(r"\b(?:TO" + "DO|FIX" + r"ME|XX" + r"X)\b")
SKIPPED = re.compile(r"\b(?:pytest|mark)\.(?:sk" + r"ip|sk" + r"ipif|xf" + r"ail|importor" + r"skip)\b")


def undocumented(module: Module) -> list[str]:
    """The module and every public class and function at its top level carry a docstring."""
    faults = [] if ast.get_docstring(module.tree) else [f"{module.path}: no docstring"]
    for node in module.tree.body:
        is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node):
            faults.append(f"{module.path}:{node.lineno}: {node.name} has no docstring")
    return faults


def probing(module: Module) -> list[str]:
    """`getattr` and `hasattr`, which hide what an object is."""
    if module.room in PROBING_ROOMS:
        return []
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    found = [node for node in calls if dotted_call(node) in {"getattr", "hasattr"}]
    return [f"{module.path}:{node.lineno}: {dotted_call(node)}" for node in found]


def global_randomness(module: Module) -> list[str]:
    """Draws that take no generator, and seeds set for the whole process."""
    faults = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted_call(node)
        is_draw = name.startswith("torch.") and name.rpartition(".")[2] in RANDOM
        has_generator = any(keyword.arg in {"generator", None} for keyword in node.keywords)
        is_python = name.startswith("random.") and name != "random.Random"
        if name in GLOBAL_SEEDS or is_python or (is_draw and not has_generator):
            faults.append(f"{module.path}:{node.lineno}: {name}")
    return faults


def open_keywords(module: Module) -> list[str]:
    """Public functions that pass `**anything` through, so that a misspelt option is never noticed.

    `**options: Unpack[SomeTypedDict]` (PEP 692) is a closed list of names, which the type checker holds callers to.
    """
    faults = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.args.kwarg is not None:
            kind = node.args.kwarg.annotation
            if not (isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Unpack"):
                faults.append(f"{module.path}:{node.lineno}: {node.name}(**{node.args.kwarg.arg})")
    return faults


def hollow(module: Module) -> list[str]:
    """Functions with nothing but `pass` or `...`, outside protocols, abstract classes and overloads.

    A hook that does nothing by default says so in a docstring, and needs no other body.
    """
    declared: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and re.search("Protocol|ABC", "".join(map(ast.dump, node.bases))):
            declared |= {id(function) for function in functions(node)}
        if isinstance(node, ast.FunctionDef) and re.search(
            "overload|abstractmethod", "".join(map(ast.dump, node.decorator_list))
        ):
            declared.add(id(node))
    return [
        f"{module.path}:{function.lineno}: {function.name} does nothing"
        for function in functions(module.tree)
        if id(function) not in declared and all(_says_nothing(node) for node in function.body)
    ]


def _says_nothing(node: ast.stmt) -> bool:
    is_dots = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...
    return isinstance(node, ast.Pass) or is_dots


@pytest.mark.parametrize("rule", [undocumented, probing, global_randomness, open_keywords, hollow])
def test_the_package_keeps(rule):
    assert not [fault for module in modules() for fault in rule(module)]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (undocumented, "x = 1"),
        (undocumented, '"""Doc."""\ndef f(): ...'),
        (undocumented, '"""Doc."""\nclass C: ...'),
        (probing, "hasattr(model, 'x')"),
        (probing, "getattr(model, 'x', None)"),
        (global_randomness, "torch.rand(3)"),
        (global_randomness, "torch.multinomial(p, 1)"),
        (global_randomness, "torch.manual_seed(0)"),
        (global_randomness, "random.shuffle(rows)"),
        (open_keywords, "def f(x, **options): ..."),
        (open_keywords, "def f(x, **options: Any): ..."),
        (hollow, "def f():\n    pass"),
        (hollow, "class C:\n    def f(self): ..."),
    ],
)
def test_a_broken_habit_is_caught(rule, text):
    assert rule(parse("decoding.loop", text))


def test_good_habits_pass():
    text = "class P(Protocol):\n    def f(self): ...\ntorch.rand(3, generator=g)\nrandom.Random(0).shuffle(rows)\n"
    text += "def f(x, **options: Unpack[Options]): return x\n"
    module = parse("decoding.loop", text)
    assert not [fault for rule in (probing, global_randomness, open_keywords, hollow) for fault in rule(module)]


def test_python_files_are_ascii():
    python = [file for file in repository_files() if file.suffix == ".py"]
    assert not [str(file.relative_to(ROOT)) for file in python if not file.read_bytes().isascii()]


def lines_with(pattern: re.Pattern[str], *, suffixes: tuple[str, ...] | None = None) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in repository_files()
        if suffixes is None or file.suffix in suffixes
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_traces_of_a_machine():
    assert MACHINE_PATH.search("/" + "home/someone/model")
    assert not lines_with(MACHINE_PATH)


def test_nothing_is_left_unfinished():
    assert UNFINISHED.search("# TO" + "DO later")
    assert not lines_with(UNFINISHED, suffixes=(".py", ".toml", ".md"))


def test_no_test_is_switched_off():
    assert SKIPPED.search("@pytest.mark.sk" + "ip")
    assert not lines_with(SKIPPED, suffixes=(".py",))

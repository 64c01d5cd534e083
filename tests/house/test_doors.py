"""Two doors lead outside, `store/` and `interop/`; nothing is unpickled; foreign code needs the user's word."""

import ast

import pytest

from house.source import Module, call_name, dotted_call, imports, modules, parse

DOORS = ("store", "interop")
OUTSIDE_MODULES = {
    "huggingface_hub", "safetensors", "gguf", "datasets",
    "requests", "urllib", "http", "httpx", "socket", "ssl", "ftplib",
}  # fmt: skip
OUTSIDE_CALLS = {"from_pretrained", "save_pretrained", "snapshot_download", "hf_hub_download", "push_to_hub"}
UNPICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# accelerate's save_state and load_state keep the optimiser and the random states as pickles
UNPICKLING_CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "load_state", "save_state", "eval", "exec"}


UNSAFE_KEYWORDS = {("weights_only", False), ("trust_remote_code", True)}


def leaks(module: Module) -> list[str]:
    """Doors that are not store/ or interop/."""
    if module.room in DOORS:
        return []
    faults = [
        f"{module.path}:{line}: imports {name} outside {' and '.join(DOORS)}"
        for line, name in imports(module)
        if name.split(".")[0] in OUTSIDE_MODULES and not name.startswith("urllib.parse")
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and call_name(node) in OUTSIDE_CALLS:
            faults.append(f"{module.path}:{node.lineno}: calls {call_name(node)} outside {' and '.join(DOORS)}")
    return faults


def foreign_code(module: Module) -> list[str]:
    """Pickles, evaluated text, and remote code that the user did not ask for; no room may have any."""
    faults = [
        f"{module.path}:{line}: imports {name}"
        for line, name in imports(module)
        if name.split(".")[0] in UNPICKLING_MODULES
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = dotted_call(node)
            if name in UNPICKLING_CALLS or name.rpartition(".")[2] in {"load_state", "save_state"}:
                faults.append(f"{module.path}:{node.lineno}: calls {name}")
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            given = (node.arg, node.value.value)
            faults += [f"{module.path}:{node.value.lineno}: {node.arg}={node.value.value}"] * (given in UNSAFE_KEYWORDS)
    return faults + _true_defaults(module)


def _true_defaults(module: Module) -> list[str]:
    """`trust_remote_code` whose default is True, as a parameter or as a field."""
    faults = []
    for node in ast.walk(module.tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            pairs += [(arg.arg, value) for arg, value in zip(positional[::-1], node.defaults[::-1], strict=False)]
            pairs += [(arg.arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs.append((node.target.id, node.value))
        for name, value in pairs:
            if name == "trust_remote_code" and isinstance(value, ast.Constant) and value.value is not False:
                faults.append(f"{module.path}:{value.lineno}: trust_remote_code defaults to {value.value}")
    return faults


def test_only_the_doors_lead_outside():
    assert not [fault for module in modules() for fault in leaks(module)]


def test_no_pickles_and_no_remote_code_unasked():
    assert not [fault for module in modules() for fault in foreign_code(module)]


@pytest.mark.parametrize(
    "text",
    [
        "from safetensors.torch import load_file",
        "def f():\n    import huggingface_hub",
        "import urllib.request",
        "model = AutoModelForCausalLM.from_pretrained(name)",
        "tokenizer.save_pretrained(folder)",
    ],
)
def test_a_leak_is_caught(text):
    assert leaks(parse("training.trainer", text))
    assert not leaks(parse("store.hub", text))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "f(path, weights_only=False)",
        "f(name, trust_remote_code=True)",
        "def f(name, *, trust_remote_code=True): ...",
        "def f(trust_remote_code: bool = True): ...",
        "class Options:\n    trust_remote_code: bool = True",
        "accelerator.load_state(folder)",
        "eval(text)",
    ],
)
def test_foreign_code_is_caught(text):
    assert foreign_code(parse("store.hub", text))


def test_innocent_calls_pass():
    text = "model.eval()\nf(name, trust_remote_code=options.trust_remote_code)\nmodel.load_state_dict(state)"
    assert not foreign_code(parse("store.hub", text))

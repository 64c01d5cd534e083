"""The package's front door: every public name resolves, and a wrong one says what there is."""

import inspect
import re
import tomllib

import pytest

import paceline
from house.source import ROOT, modules


@pytest.mark.parametrize("name", sorted(set(dir(paceline)) - {"__version__"}))
def test_public_name_resolves_and_is_documented(name):
    value = getattr(paceline, name)
    assert callable(value)
    assert inspect.getdoc(value)


def test_wrong_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match="public names: ProposalPlan, Target, generate"):
        paceline.generat  # noqa: B018 - the access is the test


def test_what_a_message_tells_to_install_is_on_pypi_under_that_name():
    """Paceline itself may not be, so no message names one of its extras; what they hold is named instead."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {re.match(r"[\w-]+", each)[0] for packages in extras.values() for each in packages}
    named = {
        (module.path, name)
        for module in modules()
        for name in re.findall(r"pip install '?([^\s'\")]+)", module.text)
        if not name.startswith(("transformers>=", "ziglang"))
    }
    assert {name for _, name in named} <= known, named
    assert {"gguf", "datasets", "matplotlib", "tensorboard"} <= {name for _, name in named}

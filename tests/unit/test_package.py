"""The package's front door: every public name resolves, and a wrong one says what there is."""

import inspect

import pytest

import paceline


@pytest.mark.parametrize("name", sorted(set(dir(paceline)) - {"__version__"}))
def test_public_name_resolves_and_is_documented(name):
    value = getattr(paceline, name)
    assert callable(value)
    assert inspect.getdoc(value)


def test_wrong_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match="public names: ProposalPlan, Target, generate"):
        paceline.generat  # noqa: B018 - the access is the test

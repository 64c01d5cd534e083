"""Paceline trains draft models for speculative decoding and decodes with them without changing a token.

Importing the package imports nothing heavy: each public name loads its module on first use, so this file refuses to
know torch, transformers or any room of the house.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The one table of public names: name -> module that defines it.
_PUBLIC = {
    "ProposalPlan": "paceline.decoding.plan",
    "Target": "paceline.targets.generic",
    "generate": "paceline.decoding.api",
    "generate_stream": "paceline.decoding.api",
    "load_draft": "paceline.store.checkpoint",
    "load_target": "paceline.store.hub",
    "speculative": "paceline.decoding.custom_generate",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'paceline' has no attribute '{name}' (public names: {', '.join(sorted(_PUBLIC))})"
        )
    value = vars(import_module(_PUBLIC[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_PUBLIC])

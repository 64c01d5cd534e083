"""What comes with the package: a small trained draft and a few prompts for the demo.

Folders are found by name; this module knows no formats.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


def shipped_drafts() -> dict[str, Path]:
    """Name -> folder of every draft that comes with the package."""
    return {folder.name: folder for folder in sorted(ROOT.iterdir()) if (folder / "draft.toml").is_file()}


def demo_prompts() -> Path:
    """A workload of a few prompts of different kinds (JSONL, `turns`)."""
    return ROOT / "demo_prompts.jsonl"

"""De-quantise a model in a GGUF file once, to float32 safetensors and a tokenizer that transformers loads by itself.

transformers reads the file; this module knows neither where it came from nor where the result will live.  It runs in a
process of its own (`python -m paceline.store.gguf FILE FOLDER`): transformers' chatter stays there, and so does memory.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import TargetError


def require_gguf() -> None:
    """Raise TargetError if the optional package that reads GGUF files is missing."""
    if find_spec("gguf") is None:
        raise TargetError("reading a GGUF file needs the package `gguf`, not found; run: pip install gguf")


def dequantise(file: Path, *, folder: Path) -> None:
    """Write `file` as config, float32 safetensors and tokenizer into `folder`.

    Takes about three times the float32 size of the model in memory.  Raises TargetError if `gguf` is missing.
    """
    require_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved; a plain one takes over its weights.
    plain = type(read)(plain_config(read.config))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig.from_model_config(plain.config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain_config(config: Any) -> Any:
    """A transformers configuration without the traces of quantisation and of where it was read from."""
    traces = ("quantization_config", "_name_or_path")
    return type(config).from_dict({key: value for key, value in config.to_dict().items() if key not in traces})


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything that is needed lies in the file; read when transformers is imported
    dequantise(Path(sys.argv[1]), folder=Path(sys.argv[2]))

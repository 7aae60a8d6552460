"""Converts a GGUF file to a checkpoint.

`python -m workers.gguf_convert FILE DIR DTYPE MAX_BYTES` writes the folder DIR, and prints a ConversionReport.

transformers reads the file and dequantizes the weights; they are saved in safetensors, with the tokenizer and the chat
template. The file's header must have been checked. The process may allocate at most MAX_BYTES of memory, because a
config that contradicts the tensors could otherwise request any amount.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging

from longleaf.checkpoints.conversion_report import ConversionReport
from longleaf.fingerprint import CONFIG
from workers.model.model import UNTRUSTED
from workers.model.model import describe_error as describe


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Writes the checkpoint. Raises ValueError for files that lack weights, and any error of transformers."""
    source, name = str(file.parent), file.name
    loader: Any = AutoModelForCausalLM  # its annotations lack output_loading_info
    model, loaded = loader.from_pretrained(
        source,
        gguf_file=name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **UNTRUSTED,
    )
    for kind in ("missing_keys", "mismatched_keys"):
        if loaded[kind]:
            raise ValueError(f"it lacks weights that its architecture needs: {sorted(map(str, loaded[kind]))[:3]}")
    _make_dense(model)
    model.save_pretrained(folder)
    mode = (folder / CONFIG).stat().st_mode
    for path in folder.glob("*.safetensors"):  # which others could not read
        path.chmod(mode)
    del model
    AutoTokenizer.from_pretrained(source, gguf_file=name, **UNTRUSTED).save_pretrained(folder)


def _make_dense(model: PreTrainedModel) -> None:
    """Removes the marks of a quantized model, whose weights are dequantized: transformers saves no such model."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")


def main(file: str, folder: str, dtype: str, max_bytes: str) -> ConversionReport:
    logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_DATA, (int(max_bytes), int(max_bytes)))
    try:
        convert(Path(file), Path(folder), dtype)
    except MemoryError:
        return ConversionReport(reason="it needs more memory than its tensors explain")
    except Exception as error:  # any error in the file
        if "ignore_mismatched_sizes" in str(error):  # the report of transformers is a table in the log
            return ConversionReport(reason="the shapes of its tensors contradict its metadata")
        return ConversionReport(reason=describe(error), is_full=getattr(error, "errno", None) == 28)
    return ConversionReport()


if __name__ == "__main__":
    print(msgspec.json.encode(main(*sys.argv[1:])).decode())

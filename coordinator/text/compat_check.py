"""Checks whether the coordinator could serve a checkpoint: `python -m coordinator.text.compat_check DIR` prints a
TextReport."""

import sys
from pathlib import Path

import msgspec

from coordinator.text.renderer import Renderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.errors import ModelRefused
from longleaf.model_report import TextReport


def check(folder: Path) -> TextReport:
    renderer = Renderer()
    try:
        tokenizer = Tokenizer.load(folder, renderer)
    except ModelRefused as error:
        return TextReport(reason=str(error))
    finally:
        renderer.stop()
    return TextReport(
        architecture=tokenizer.checkpoint.architecture,
        max_positions=tokenizer.checkpoint.max_positions,
        vocabulary_size=tokenizer.vocabulary_size,
        has_chat_template=tokenizer.has_chat_template,
    )


if __name__ == "__main__":
    print(msgspec.json.encode(check(Path(sys.argv[1]))).decode())

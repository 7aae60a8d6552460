"""Whether every class of transformers that counts as a causal language model is served exactly, or refused.

Small random checkpoints (zoo/classes.py), each with a prompt of 400 tokens, greedy, in float32, on two ranks, as in
tests/golden/test_every_class.py. The table is in docs/models.md. Usage:

    python -m bench.classes --json                          # prints the rows
    python -m bench.classes --write                         # also keeps them in bench/results, and writes the page
    python -m bench.classes --type llama roberta --write    # only some of them; the other rows stay
"""

import argparse
import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from transformers.utils import logging

from bench import models
from bench.harness.arguments import log
from tests.support.golden.every_class import Finding, walk
from zoo.classes import KINDS


class Walk(msgspec.Struct, frozen=True):
    """The results with one version of transformers."""

    transformers: str
    findings: tuple[Finding, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", dest="types", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--write", action="store_true", help="keep the rows in bench/results and write the page")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    findings = [find(model_type) for model_type in arguments.types]
    if arguments.json:
        print(_encode(findings))
    if arguments.write:
        write(findings)


def find(model_type: str) -> Finding:
    with TemporaryDirectory() as folder:
        found = asyncio.run(walk(model_type, Path(folder)))
    log(f"{model_type}: {found.result} {found.reason}".rstrip())
    return found


def write(findings: Sequence[Finding]) -> None:
    """Replaces the rows of these classes, and drops those of classes that transformers no longer has."""
    retained = {found.model_type: found for found in read().findings} if models.CLASSES.is_file() else {}
    retained |= {found.model_type: found for found in findings}
    walked = Walk(version("transformers"), tuple(retained[name] for name in KINDS if name in retained))
    models.CLASSES.write_text(_encode(walked) + "\n")
    models.write([])


def read() -> Walk:
    return msgspec.json.decode(models.CLASSES.read_bytes(), type=Walk)


def _encode(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


if __name__ == "__main__":
    main()

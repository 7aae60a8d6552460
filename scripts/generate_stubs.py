"""Generates longleaf/v1/*_pb2*.py from protos/, or checks (--check) that the committed stubs are current."""

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos" / "longleaf" / "v1").glob("*.proto"))


def generate(out: Path) -> None:
    """Writes message stubs, their type stubs and the service stubs under `out`."""
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *map(str, PROTOS),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in (out / "longleaf" / "v1").glob("*_pb2_grpc.py"):
        if "Service" not in path.read_text():
            path.unlink()


def drift() -> list[str]:
    """Names of stubs that differ from those generated from the protos."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "longleaf" / "v1"
        committed = ROOT / "longleaf" / "v1"
        names = {p.name for p in fresh.iterdir()} | {p.name for p in committed.glob("*_pb2*")}
        _, mismatch, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
        return mismatch + missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on drift")
    if not parser.parse_args().check:
        return generate(ROOT)
    if names := drift():
        sys.exit(f"stubs out of date, run `make proto`: {', '.join(names)}")
    print(f"{len(PROTOS)} protos, stubs current")
    return None


if __name__ == "__main__":
    main()

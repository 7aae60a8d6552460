"""The files of the web page: vendored files are unchanged, all are small, and no file refers to another origin."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "gateway" / "page"
VENDOR = PAGE / "vendor"
INDEX = (PAGE / "index.html").read_text()
OURS = sorted(file for file in PAGE.iterdir() if file.is_file())
SCRIPTS = sorted(PAGE.rglob("*.js"))
SERVED = [PAGE / "index.html", *sorted(PAGE.glob("*.css")), *SCRIPTS]
MOST_BYTES = 60_000
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*["']([^"']+)["']""")
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function")
URL = re.compile(r"""(?:https?:)?//[a-z0-9][a-z0-9.-]+\.[a-z]{2,}""")


def vendored() -> dict[str, str]:
    """Hashes by name, from the list of vendored files."""
    lines = (VENDOR / "VENDORED.txt").read_text().splitlines()
    return {line.split()[0]: line.split()[-1] for line in lines if line.split()[-1:] and len(line.split()[-1]) == 64}


def test_vendored_files_are_unchanged():
    found = {}
    for file in VENDOR.glob("*.js"):
        content = file.read_bytes().replace(b'from"./preact.js"', b'from"preact"')
        found[file.name] = hashlib.sha256(content).hexdigest()
    assert found == vendored()
    assert all((VENDOR / f"{package}-LICENSE.txt").exists() for package in ("preact", "htm"))


def test_total_compressed_size_is_small():
    assert sum(len(gzip.compress(file.read_bytes(), mtime=0)) for file in SERVED) < MOST_BYTES


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_import_existing_files_by_relative_path(file: Path):
    for name in IMPORT.findall(file.read_text()):
        assert name.startswith("./")
        assert (file.parent / name).is_file()


def test_index_preloads_all_modules():
    named = re.findall(r'<link rel="modulepreload" href="page/([^"]+)">', INDEX)
    named += re.findall(r'<script type="module" src="page/([^"]+)"></script>', INDEX)
    styles = re.findall(r'<link rel="stylesheet" href="page/([^"]+)">', INDEX)
    assert sorted(named) == sorted(str(file.relative_to(PAGE)) for file in SCRIPTS)
    assert sorted(styles) == sorted(file.name for file in PAGE.glob("*.css"))


def test_markup_has_no_inline_code_or_style():
    assert len(re.findall("<script", INDEX)) == len(re.findall(r"<script [^>]*></script>", INDEX)) == 1
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", INDEX)


def test_scripts_do_not_create_markup_from_text():
    for file in set(SCRIPTS) - set(VENDOR.glob("*.js")):
        assert not MARKUP.search(file.read_text())


def test_no_file_refers_to_another_origin():
    """The XML namespace of SVG is allowed: it causes no request."""
    for file in set(SERVED) - set(VENDOR.glob("*.js")):
        assert set(URL.findall(file.read_text())) <= {"http://www.w3.org"}, file

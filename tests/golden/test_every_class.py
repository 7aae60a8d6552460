"""Every class of transformers that counts as a causal language model is exact, or refused: none is accepted and wrong.

`python -m bench.classes --write` writes the table in docs/models.md from the same walk.
"""

from pathlib import Path

import pytest

from bench.classes import read
from tests.support.golden.every_class import ALLOWED, walk
from zoo.classes import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
async def test_a_causal_class_is_exact_or_refused(model_type: str, tmp_path: Path) -> None:
    found = await walk(model_type, tmp_path)
    assert found.result in ALLOWED, found.reason
    [published] = [one for one in read().findings if one.model_type == model_type]
    assert found.result == published.result, "docs/models.md differs"

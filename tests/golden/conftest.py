"""Small checkpoints and what transformers' own `generate` says about them."""

import pytest

from tests.support.golden.plain import Golden, make_golden
from zoo.families import Family


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory):
    """Golden answers by family, made at first use."""
    made: dict[Family, Golden] = {}

    def get(family: Family) -> Golden:
        if family not in made:
            made[family] = make_golden(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get

"""GPU kernels in Triton's interpreter on the CPU: `make test-triton`. It shows their results, but no races, no
alignment errors, and no speed.
"""

import pytest
import triton

from tests.support.golden.short import make_short

assert triton.knobs.runtime.interpret, "these tests need TRITON_INTERPRET=1 before triton is imported: make test-triton"


@pytest.fixture(scope="module")
def shorts(tmp_path_factory):
    """The short goldens of a family, made at first use."""
    folder, made = tmp_path_factory.mktemp("shorts"), {}

    def get(family):
        if family not in made:
            made[family] = make_short(folder / family, family)
        return made[family]

    return get

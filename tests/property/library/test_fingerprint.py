"""The fingerprint depends on the content of the model, not on the way in which its folder was made."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from longleaf.fingerprint import INDEX, Fingerprint, read_fingerprint

names = st.text("abc.", min_size=1, max_size=4)
sizes = st.integers(0, 20_000)
models = st.dictionaries(names, st.tuples(sizes, st.integers(0, 255)), min_size=1, max_size=6)
Model = dict[str, tuple[int, int]]
"""By tensor: its number of bytes, and the value of each byte."""


def write(model: Model, order: list[str], num_files: int, *, config: str = "{}") -> Fingerprint:
    """Of a folder whose files are written in this order of tensors, dealt to so many files."""
    with TemporaryDirectory() as made:
        folder = Path(made)
        dealt = {name: f"part-{number % num_files}.safetensors" for number, name in enumerate(order)}
        for file in dict.fromkeys(dealt[name] for name in reversed(order)):
            own = {name: np.full(model[name][0], model[name][1], np.uint8) for name in order if dealt[name] == file}
            save_file(own, folder / file)
        (folder / INDEX).write_text(json.dumps({"weight_map": dealt}))
        (folder / "config.json").write_text(config)
        return read_fingerprint(folder)


@settings(deadline=None)
@given(models, st.data())
def test_the_order_of_files_and_tensors_does_not_matter(model: Model, data: st.DataObject) -> None:
    orders = [data.draw(st.permutations(sorted(model))) for _ in range(2)]
    counts = [data.draw(st.integers(1, len(model))) for _ in range(2)]
    first, second = (write(model, order, count) for order, count in zip(orders, counts, strict=True))
    assert first.digest == second.digest
    assert write(model, orders[0], counts[0]) == first


@settings(deadline=None)
@given(models, models)
def test_other_tensors_are_another_model(one: Model, other: Model) -> None:
    def seen(model: Model) -> dict[str, tuple[int, int | None]]:
        """The fill value of an empty tensor is not visible."""
        return {name: (size, value if size else None) for name, (size, value) in model.items()}

    same = seen(one) == seen(other)
    assert (write(one, sorted(one), 1).digest == write(other, sorted(other), 1).digest) is same

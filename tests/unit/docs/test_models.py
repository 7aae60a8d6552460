"""The models page equals the recorded results for families and for all classes of the installed transformers."""

import json

from bench import classes, models
from tests.support.golden.every_class import ALLOWED, class_name
from zoo.classes import KINDS


def test_table_has_every_class_of_the_installed_transformers() -> None:
    """After an upgrade: `python -m bench.classes --write`."""
    found = [(one.model_type, one.name) for one in classes.read().findings]
    assert found == [(model_type, class_name(model_type)) for model_type in KINDS]


def test_no_accepted_class_is_wrong() -> None:
    assert {one.result for one in classes.read().findings} <= {*ALLOWED}


def test_page_is_generated_from_the_rows() -> None:
    rows, walk = (json.loads(path.read_text()) for path in (models.RESULTS, models.CLASSES))
    assert models.PAGE.read_text() == models.page(rows, walk)

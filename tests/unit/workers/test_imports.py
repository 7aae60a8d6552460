"""The garbage collector skips objects of imported modules."""

import gc

import pytest

from workers.imports import frozen_imports


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_imports_disable_collection_and_freeze_their_objects():
    gc.unfreeze()
    with frozen_imports():
        imported = [[]]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(each is imported for each in gc.get_objects())
    later = [[]]
    assert any(each is later for each in gc.get_objects())


def test_failed_import_restores_collection():
    with pytest.raises(ImportError), frozen_imports():
        raise ImportError
    assert gc.isenabled()

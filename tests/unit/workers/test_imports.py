"""What is imported for good is not looked through for garbage."""

import gc

import pytest

from workers.imports import for_good


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_is_not_looked_for_meanwhile_nor_there_later():
    gc.unfreeze()
    with for_good():
        retained = [[]]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(each is retained for each in gc.get_objects())
    later = [[]]
    assert any(each is later for each in gc.get_objects())


def test_nor_where_an_import_fails():
    with pytest.raises(ImportError), for_good():
        raise ImportError
    assert gc.isenabled()

"""docs/configuration.md is generated from the settings."""

from generate_reference import CONFIGURATION, configuration_page


def test_configuration_page_is_current() -> None:
    assert CONFIGURATION.read_text() == configuration_page(), "run `make reference`"

"""Settings of persistence."""

import pytest

from longleaf.config import DataConfig
from longleaf.errors import InvalidArgument


@pytest.mark.parametrize(
    ("settings", "url", "message"),
    [
        ({"data_dir": ""}, None, "data_dir: is empty"),
        ({"warm": True}, None, "warm: requires data_dir"),
        ({}, "s3://bucket", "snapshot_url: requires data_dir"),
        ({"data_dir": "d", "snapshot_quota": 0}, None, "snapshot_quota: 0 is not a positive number of bytes"),
        ({"data_dir": "d", "snapshot_expiry": -1.0}, None, "snapshot_expiry"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], url: str | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DataConfig(**settings).check(url)  # pyright: ignore[reportArgumentType]

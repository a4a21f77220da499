"""Addresses of object stores."""

from __future__ import annotations

import pytest

from reft.core.persist.storage_url import check_url, is_url
from reft.errors import ConfigError


def test_addresses_that_can_be():
    assert check_url("s3://bucket/run/one/") == "s3://bucket/run/one"
    assert check_url("gs://my.bucket") == "gs://my.bucket"
    assert check_url("az://container/a=b") == "az://container/a=b"
    assert is_url("s3://bucket") and not is_url("/mnt/reft")


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:secret@bucket/run", "s3://bucket/run?token=secret", "s3://bucket/run#secret", "secret://bucket/run",
        "s3:///secret", "s3://bucket//secret", "s3://bucket/../secret", "s3://bucket/secret/.", "s3://bucket/se cret",
        "file:///secret", "memory:///secret", "https://host/secret",
    ],
)  # fmt: skip
def test_addresses_that_are_refused_without_repeating_them(text):
    with pytest.raises(ConfigError) as error:
        check_url(text)
    assert "secret" not in str(error.value).replace("secret://", "")

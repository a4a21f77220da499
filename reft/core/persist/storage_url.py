"""Addresses of object stores for `--persist`: s3://BUCKET/PREFIX, gs://…, az://CONTAINER/PREFIX.

An address never has credentials: command lines and logs are read by others. They come from the
environment, or from the machine's own role.
"""

from __future__ import annotations

import re
from typing import Final

from reft.errors import ConfigError

SCHEMES: Final = ("s3", "gs", "az")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+,.-]{1,200}")


def is_url(text: str) -> bool:
    """Whether `text` names an object store, and no folder."""
    return "://" in text


def check_url(text: str) -> str:
    """Returns the address without a slash at its end.

    Raises:
        ConfigError: it has credentials, an unknown scheme, or a bucket or prefix that can't be. The
            words do not repeat the address, which may have a secret anywhere.
    """
    scheme, _, rest = text.partition("://")
    if "@" in rest or "?" in rest or "#" in rest:
        raise ConfigError(
            "the address of --persist has credentials or options.",
            "give only s3://BUCKET/PREFIX; put credentials into the environment, e.g. AWS_ACCESS_KEY_ID",
        )
    if scheme not in SCHEMES:
        raise ConfigError(
            f"--persist can't write to {scheme[:16]}://; it knows {', '.join(f'{each}://' for each in SCHEMES)}.",
            "give the whole path of a folder, or an address such as s3://BUCKET/PREFIX",
        )
    bucket, *segments = rest.removesuffix("/").split("/")
    if not _BUCKET.fullmatch(bucket) or not all(_SEGMENT.fullmatch(each) and each.strip(".") for each in segments):
        raise ConfigError(
            f"--persist {scheme}://… is not {scheme}://BUCKET/PREFIX.",
            "use letters, digits and - _ . = + , in the parts of the prefix, and no empty part",
        )
    return f"{scheme}://{'/'.join([bucket, *segments])}"

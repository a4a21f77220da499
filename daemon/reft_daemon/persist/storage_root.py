"""Opens what `--persist` names: a folder, or a prefix in an object store.

Both have the same calls: `StorageFolder` and `ObjectFolder`. Callers do not tell them apart.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from reft.core.persist.storage_url import check_url, is_url
from reft.errors import ConfigError
from reft_daemon.persist.persist_key import read_key
from reft_daemon.persist.storage_folder import StorageFile, StorageFolder

if TYPE_CHECKING:
    from reft_daemon.persist.object_folder import ObjectFile, ObjectFolder

AnyFile: TypeAlias = "StorageFile | ObjectFile"
AnyFolder: TypeAlias = "StorageFolder | ObjectFolder"


def check_root(text: str, key_file: Path | None = None) -> str:
    """Returns what `--persist` names, checked by its form. Of the two only the key is read.

    Raises:
        ConfigError: it is neither a whole path nor an address of an object store, or the package
            for object stores is missing; or the key can't be used.
    """
    if key_file is not None:
        read_key(key_file)
    if not is_url(text):
        if not os.path.isabs(text):
            raise ConfigError(
                f"--persist {text} does not begin with /; all nodes must name the same folder.", "give the whole path"
            )
        return text
    url = check_url(text)
    if find_spec("obstore") is None:
        raise ConfigError(
            f"--persist {url} needs the package obstore, which is not installed.", "pip install 'torch-reft[object]'"
        )
    return url


def open_root(text: str) -> AnyFolder:
    """Returns the storage, see `check_root`.

    Raises:
        ConfigError: see `check_root`; or the environment lacks what the object store needs.
    """
    root = check_root(text)
    if not is_url(root):
        return StorageFolder(Path(root))
    from reft_daemon.persist.object_folder import open_store

    return open_store(root)

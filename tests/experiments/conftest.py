"""Fixtures that several files of this folder use."""

from launched import forked  # noqa: F401
from made_data import (  # noqa: F401
    bpe_folder,
    byte_directory,
    directory,
    numbered,
    prepared_from,
    samples,
    shard_folder,
    texts,
)
from runs import cwd, lowered_once  # noqa: F401
from tuning import data, model  # noqa: F401
from wrong_configs import error_of  # noqa: F401

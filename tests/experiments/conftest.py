"""Fixtures that several files of this folder use."""

from shard_files import shard_folder, texts  # noqa: F401
from tokenizer_files import bpe_folder, directory  # noqa: F401
from wrong_configs import error_of, groups_looked_up_once  # noqa: F401

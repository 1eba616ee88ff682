"""Fixtures that several files of this folder use."""

from data_lines import byte_directory, prepared_from  # noqa: F401
from loader_data import numbered, samples  # noqa: F401
from runs import cwd, lowered_once  # noqa: F401
from shard_files import shard_folder, texts  # noqa: F401
from tokenizer_files import bpe_folder, directory  # noqa: F401
from tuning import data, model  # noqa: F401
from wrong_configs import error_of  # noqa: F401

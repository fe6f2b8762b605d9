"""What a model folder says about the run that trained it here: settings, template, adapters."""

import re
from pathlib import Path

import torch

from model import CausalLM
from runtime import checkpoint
from runtime.config import read_assignments
from runtime.errors import ConfigError


def training_settings(folder):
    """Return the settings of the run that trained the model in `folder`; {} if there was none."""
    folder = Path(folder).resolve()
    if re.fullmatch(r'epoch-\d+', folder.name):     # the config is in the folder of the run
        folder = folder.parent
    path = folder / 'train_config.py'
    assigned = read_assignments(path) if path.exists() else {}
    return {key: value for key, (value, _) in assigned.items()}


def trained_with_bos(folder):
    """Return the add_bos with which the model in `folder` was trained here; None for others."""
    return training_settings(folder).get('add_bos')


def trained_template(folder):
    """Return the chat template with which the model in `folder` was trained here; ConfigError."""
    settings = training_settings(folder)
    if settings.get('data_kind') != 'instruct' or 'template' not in settings:
        raise ConfigError(f'chat = trained, but {folder} was not trained here on conversations; '
                          f'name the template, for example --chat=llama3; --raw of sample.py '
                          f'uses none')
    return settings['template']


def base_of_adapter(folder):
    """Return the folder of the model that the adapters in `folder`/adapter were trained on.

    Raises ConfigError if they have no dropout, CheckpointError if they or the base model are
    missing or do not fit each other.
    """
    adapter = checkpoint.read_adapter(folder)
    if not adapter['lora_dropout']:
        raise ConfigError(f'dropout_seed: {folder} was trained with lora_dropout = 0, so nothing '
                          f'would be dropped; leave out --dropout_seed')
    base = checkpoint.fetch(adapter['base_model_name_or_path'],
                            training_settings(folder).get('revision'))
    config = checkpoint.read_config(base)
    checkpoint.check_weights(base, config)
    with torch.device('meta'):      # fail on adapters of another model before anything is scored
        checkpoint.add_adapter(CausalLM(config), folder)
    return base

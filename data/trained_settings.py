"""The settings of the run that trained a model."""

from pathlib import Path

from data.chat import TEMPLATES
from runtime.config import run_folder, run_settings
from runtime.errors import ConfigError
from runtime.json_rules import check_values

# the settings of a run that decide how its model is used, with their values as in check_values
TRAINED = {'template': [*TEMPLATES], 'data_kind': [str], 'add_bos': [bool, None],
           'revision': [str, None]}


def training_settings(folder):
    """Return the settings of the run that trained the model in `folder`; {} without a run."""
    folder = run_folder(Path(folder).resolve())
    settings = run_settings(folder)
    check_values(settings, TRAINED, folder / 'train_config.py')
    return settings


def trained_template(folder):
    """Return the chat template of the run that trained the model in `folder`, or ConfigError."""
    settings = training_settings(folder)
    if settings.get('data_kind') != 'instruct' or 'template' not in settings:
        raise ConfigError(f'chat = trained, but {folder} was not trained here on conversations; '
                          f'name the template, for example --chat=tulu, or use plain text: '
                          f'--chat=none in evaluate.py, --raw in sample.py and generate.py')
    return settings['template']

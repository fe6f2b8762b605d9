"""The settings of the run that trained a model."""

from pathlib import Path

from data.templates import TEMPLATES, missing_tokens
from runtime.config import run_folder, run_settings
from runtime.errors import ConfigError
from runtime.json_rules import check_values

# the settings of a run that decide how its model is used, with their values as in check_values
TRAINED = {'template': [str], 'data_kind': [str], 'add_bos': [bool, None], 'revision': [str, None]}


def training_settings(folder):
    """Return the settings of the run that trained the model in `folder`; {} without a run."""
    folder = run_folder(Path(folder).resolve())
    settings = run_settings(folder)
    check_values(settings, TRAINED, folder / 'train_config.py')
    return settings


def pick_template(name, folder, tokenizer, otherwise=None):
    """Return the name of a chat template of the model in `folder`, for 'auto' and 'trained' too:
    that of the run that trained the model here, else 'model', the tokenizer's own, which a run can
    have left in its folder, else `otherwise`, or ConfigError."""
    if name not in ('auto', 'trained'):
        return name
    settings = training_settings(folder)
    own = settings.get('template') if settings.get('data_kind') == 'instruct' else None
    if own in TEMPLATES and not (missing_tokens(own, tokenizer) and tokenizer.chat_templates):
        return own
    if tokenizer.chat_templates and (own or name == 'auto'):
        return 'model'
    if otherwise:
        return otherwise
    raise ConfigError(f'{folder} brings no chat template and was not trained here on '
                      f'conversations; name the template, for example --chat=tulu, or use plain '
                      f'text: --chat=none in evaluate.py, --raw in sample.py and generate.py')


def pick_chat(name, folder, tokenizer):
    """Return the `chat` of an evaluation of the model in `folder`, for 'auto' too. A model that was
    trained here is asked as its base model was: in plain text if that brought no template."""
    if name == 'auto' and training_settings(folder).get('template', 'model') != 'model':
        return 'none'
    return pick_template(name, folder, tokenizer, otherwise='none' if name == 'auto' else None)

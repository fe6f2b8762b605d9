"""README.md of a trained model: a model card in the format of the Hugging Face hub.

It is made of the files in the folder, so every evaluation there renews it.
"""

import os
import re
from pathlib import Path

from results.figures import draw_loss
from results.markdown import code, markdown, one_line
from runtime import ownership, rooms, saving
from runtime.config import run_folder, run_settings
from runtime.sources import is_hub_name

NAME = 'README.md'
OURS = '# nanoCal renews this card after each evaluation; to edit it, delete this line first\n'
LORA = 'lora_rank', 'lora_alpha', 'lora_dropout', 'lora_targets'
SHOWN = ('revision', 'data_revision', 'method', 'reward', 'template', 'data_limit', 'epochs',
         'max_steps', 'batch_size', 'max_length', 'lr', 'schedule', 'warmup', 'weight_decay',
         'loss', 'smoothing', 'base_smoothing', 'logit_temperature', 'master_weights', 'seed')


def write(folder):
    """Write the cards of the model in a run's folder or its epoch-<n>/; one of others stays."""
    folder = Path(folder).absolute()
    run = run_folder(folder)
    if not run_settings(run) or not (folder / 'config.json').exists():
        return
    for place in (folder, folder / 'adapter'):
        path = place / NAME
        if os.path.lexists(path) and not _is_ours(path):
            print(f'note: {path} is not from this program, or edited, and stays as it is')
        elif place == folder or (place / 'adapter_config.json').exists():
            if not path.exists():
                ownership.claim(run, path.relative_to(run))
            ownership.write_text(path, card(folder, place != folder))


def finish(run):
    """Write the cards of a train.Run whose weights are saved, also of its epochs; draw its loss."""
    for folder in (run.out_dir, *sorted(run.out_dir.glob('epoch-*'))):
        write(folder)
    if run.cfg.pictures and not (run.out_dir / 'loss.png').exists():
        draw_loss(run.out_dir)


def upload(run):
    """Send the files of a train.Run, with its cards, to the hub as cfg.push_to_hub."""
    from results.samples import DIAGRAM
    rooms.load('hub').upload(run.out_dir, run.cfg.push_to_hub,
                             [NAME, f'adapter/{NAME}', DIAGRAM, *saving.model_files(run)])


def _is_ours(path):
    return path.is_file() and path.read_bytes().startswith(f'---\n{OURS}'.encode())


def card(folder, adapters=False):
    """Return the card of a saved model, or of the adapters beside it."""
    run = run_folder(folder)
    settings = run_settings(run)
    name, epoch = run.name, ''
    tasks, lines = {}, []
    if (folder / 'results.json').exists():
        from bridges import card_results    # a run without a report loads nothing that reports need
        tasks, lines = card_results.calibration(folder, run, settings, adapters)
    if folder != run:
        name, epoch = f'{name}-{folder.name}', f', after epoch {folder.name.removeprefix("epoch-")}'
    start = 'Random weights in the shape of ' * bool(settings.get('from_scratch'))
    model, data = (code(settings.get(key), whole=_hub_name(settings, key) is not None)
                   for key in ('model', 'data'))
    rows = [[key, code(value)] for key, value in shown_settings(settings)]
    heading = re.sub(r'([\\`*<>\[\]!|&#~])', r'\\\1', one_line(name))      # as plain text
    return '\n'.join([
        f'---\n{OURS}{_metadata(settings, name, tasks, adapters).to_yaml()}\n---\n',
        f'# {heading}\n',
        f'{"LoRA adapters of " * adapters}{start}{model}, trained with nanoCal on {data}{epoch}.\n',
        *lines, '## Training\n', markdown([['setting', 'value'], *rows]), ''])


def shown_settings(settings):
    """Return [(key, value)] of the settings of a run that decided its weights."""
    unread = ['loss', 'smoothing', 'base_smoothing'] * ('method' in settings)
    unread += ['template'] * (settings.get('data_kind', 'instruct') != 'instruct')
    return [(key, settings[key]) for key in SHOWN + LORA * bool(settings.get('lora'))
            if settings.get(key) not in (None, '') and key not in unread]


def _metadata(settings, name, tasks, adapters):
    from huggingface_hub import EvalResult, ModelCardData
    model, data = (_hub_name(settings, key) for key in ('model', 'data'))
    kind = 'text-classification' if settings.get('method') == 'reward' else 'text-generation'
    titles = {'accuracy': 'accuracy', 'ece': 'ECE (10 bins)'}
    return ModelCardData(
        base_model=None if settings.get('from_scratch') else model,
        datasets=[data] if data else None, tags=['nanocal'], model_name=name,
        library_name='peft' if adapters else 'transformers', pipeline_tag=kind,
        eval_results=[EvalResult(task_type=kind, dataset_type=task, dataset_name=task,
                                 metric_type=key, metric_name=title,
                                 metric_value=round(x['pooled'][key], 4))
                      for task, x in tasks.items() for key, title in titles.items()] or None)


def _hub_name(settings, key):
    """Return the hub name in a setting of a run, None for a path; open_log makes these absolute."""
    name = str(settings.get(key))
    return name if is_hub_name(name) and not Path(name).exists() else None

"""README.md of a trained model: a model card in the format of the Hugging Face hub.

It is made of the files in the folder alone, so that every evaluation there renews it.
"""

import hashlib
import json
from pathlib import Path

from results.samples import DIAGRAM, SCALING
from results.tables import markdown, measure_cell
from runtime import ownership
from runtime.config import run_settings
from runtime.errors import escape_controls

NAME = 'README.md'
END = '<!-- nanoCal wrote this card, {}. An edited card is not replaced. -->\n'
SHOWN = ('model', 'data', 'method', 'reward', 'template', 'lora', 'epochs', 'max_steps',
         'batch_size', 'lr', 'schedule', 'warmup', 'weight_decay', 'loss', 'smoothing',
         'logit_temperature', 'master_weights', 'seed')


def write(folder):
    """Write the card of a run's folder; a README.md that somebody wrote or edited stays."""
    folder, path = Path(folder), Path(folder, NAME)
    if not run_settings(folder) or not (folder / 'config.json').exists():
        return
    disown_edited(folder)
    if path.exists() and NAME not in ownership.written_files(folder):
        print(f'note: {path} is not from this program, or edited, and stays as it is')
        return
    text = card(folder)
    text += END.format(_hash(text))
    if not path.exists() or path.read_text(encoding='utf-8') != text:
        ownership.claim(folder, NAME)
        ownership.write_text(path, text)


def disown_edited(folder):
    """Take an edited card off the list of files that this program may replace or delete."""
    path = Path(folder, NAME)
    if NAME in ownership.written_files(folder) and path.exists():
        text = path.read_text(encoding='utf-8', errors='replace')
        body = text[:text.rfind(END[:20])] if END[:20] in text else text
        if text != body + END.format(_hash(body)):
            ownership.disown(folder, NAME)


def _hash(text):
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def card(folder):
    """Return the card of a run's folder without its last line."""
    from huggingface_hub import EvalResult, ModelCardData
    settings = run_settings(folder)
    before, after = (_tasks(folder / x / 'results.json') for x in ('before', '.'))
    hub = {key: [x] for key in ('model', 'data') if _is_hub_name(x := str(settings.get(key)))}
    metadata = ModelCardData(
        base_model=hub.get('model', [None])[0], datasets=hub.get('data'), tags=['nanocal'],
        library_name='transformers', pipeline_tag='text-generation', model_name=folder.name,
        eval_results=[EvalResult(task_type='text-generation', dataset_type=task, dataset_name=task,
                                 metric_type=key, metric_value=round(x['pooled'][key], 4))
                      for task, x in after.items() for key in ('accuracy', 'ece')] or None)
    parts = [f'---\n{metadata.to_yaml()}\n---\n', f'# {folder.absolute().name}\n',
             f'{_code(settings.get("model"))}, fine-tuned with nanoCal on '
             f'{_code(settings.get("data"))}.\n']
    rows = [[task, name, str(x[task]['pooled']['n']),
             *(measure_cell(x[task]['pooled'], key, True) for key in ('accuracy', 'ece', 'nll'))]
            for task in after for name, x in (('before', before), ('after', after)) if task in x]
    if rows:
        parts += ['## Calibration\n', markdown([
            ['task', 'training', 'n', 'accuracy', 'ECE (10 bins)', 'NLL (nats)'], *rows]),
            'In brackets: 95 % intervals by bootstrap over questions.\n']
    for task, x in after.items():
        for t in x.get('post_hoc', {}).get('fits', {}).get('temperature', ()):
            parts.append(f'Temperature fitted to {_code(task)}: {t:.3f} (`{SCALING}`).\n')
    if (folder / DIAGRAM).exists():
        parts.append(f'![reliability diagrams]({DIAGRAM})\n')
    return '\n'.join([*parts, '## Training\n', markdown([['setting', 'value'], *(
        [key, _code(settings[key])] for key in SHOWN if settings.get(key) not in (None, ''))])])


def _tasks(path):
    return json.loads(path.read_text(encoding='utf-8'))['tasks'] if path.exists() else {}


def _is_hub_name(text):
    return text.count('/') == 1 and not text.startswith(('/', '.', '~')) and not Path(text).exists()


def _code(value):
    return f'`{escape_controls(str(value))}`'.replace('|', r'\|')

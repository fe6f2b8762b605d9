"""The part of a model card that says how well the model is calibrated."""

from results.columns import measure_cell
from results.report import task_title
from results.samples import DIAGRAM, read_results
from results.markdown import code, markdown
from runtime.checkpoint import fingerprint
from runtime.errors import CheckpointError, ConfigError, escape_controls
from runtime.sources import full_path

COLUMNS = {'accuracy': 'accuracy', 'ece': 'ECE (10 bins)', 'nll': 'NLL (nats)'}


def calibration(folder, run, settings, adapters):
    """Return ({task: result} of the model in `folder`, the lines of the card on them)."""
    before = results_of(run / 'before', settings)
    after = results_of(folder)
    parts = []
    rows = [[task, when, str(x[task]['pooled']['n']),
             *(measure_cell(x[task]['pooled'], key, True) for key in COLUMNS)]
            for task in after for when, x in (('before', before), ('after', after))
            if task in x and x[task]['distribution'] == after[task]['distribution']]
    if rows:
        parts += ['## Calibration\n',
                  markdown([['task', 'training', 'n', *COLUMNS.values()], *rows]),
                  'In brackets: 95 % intervals by bootstrap over questions.\n']
    for task, x in after.items():
        parts.append(f'- {escape_controls(task_title(task, x))}')
        parts += [f'- temperature fitted to {code(task)}: {t:.3f}'
                  for t in x.get('post_hoc', {}).get('fits', {}).get('temperature', ())]
    has_diagram = (folder / DIAGRAM).exists() and not adapters
    return after, parts + [''] * bool(after) + [
        f'![reliability diagrams]({DIAGRAM})\n'] * has_diagram


def results_of(folder, settings=None):
    """Return {task: result} of the model in a folder, or of the base model in `settings`, or {}."""
    path = folder / 'results.json'
    if not path.exists():
        return {}
    try:
        content = read_results(path, 'the card is without it')
        model, identity = content['config']['model'], content.get('identity', {})
        if settings:    # a folder of the hub's cache is named after the model
            base = str(settings.get('model'))
            same = base == full_path(model) or base.replace('/', '--') in model
        else:
            same = identity.get('model') == fingerprint(folder) and 'base' not in identity
    except (ConfigError, CheckpointError) as error:
        print(f'note: {error}')
        return {}
    if not same:
        print(f'note: {path} has results of {model}, another model, which the card leaves out')
    return content['tasks'] if same else {}

"""What --show and --tasks=help print: prompts as the model reads them, and the files of tasks."""

import textwrap
from dataclasses import replace

from data.benchmarks import BENCHMARKS, GENERIC
from data.preferences import PREFERENCE_PATTERNS
from data.probes import PATTERNS, WIKITEXT
from runtime import rooms
from runtime.errors import DataError

HELP = """\
A task is read from its dataset on the hub, or from a folder as task:folder: the first pattern with
a match. task:file reads one file, with --shots=0. The files of `test` are scored, those of `shots`
read unless --shots=0, those of `validation`, if there are any, for --fit_temperature.
"""


def show_tasks(tasks, tokenizer, cfg):
    """Return the text of --show: the first cfg.show prompts of each Task as the model reads them;
    without a tokenizer the prompts as plain text, with all shots.
    """
    lines, variants = [], []
    for task in tasks.values():
        unscored = dict.fromkeys((task.sample_key(item)[1:] for item in task.tested), {})
        variants += [task.variant(name, unscored, None) for name in task.variants(cfg)
                     if name in ('permuted', 'contextual')]     # which need no scores
    for task in (*tasks.values(), *variants):
        part = replace(task, items=task.tested[:cfg.show])
        lines.append(f'{task.label}: {len(part.items)} of {len(task.tested):,} {task.unit}')
        trees = part.tokenize(tokenizer, cfg) if tokenizer else zip(part.items, part.items)
        for item, tree in trees:
            if isinstance(tree, DataError):
                lines.append(f'--- {tree}')
                continue
            n_shots = len(task.shots.get(item.group, ()))
            if tokenizer and tree.shots < n_shots:
                lines.append(
                    f'fewer shots: {tree.shots} of {n_shots}; the prompt would be too long')
            prompts = _decoded_prompts(tree, tokenizer) if tokenizer else task.as_text(item)
            for context, options, *tokens in prompts:
                title = ['--- options' if len(options) > 1 else '--- scored'] if options else []
                lines += [f'--- {item.place}', context, *title, *map(repr, options), *tokens]
        lines.append('')
    return '\n'.join(lines)


def _decoded_prompts(tree, tokenizer):
    """Yield (text of a context, texts of its options, two lines about their tokens) of a Tree."""
    ids, contexts = [*tree.prefix, *tree.prompt], {}
    for prompt, start in zip(tree.sequences, tree.starts):
        contexts.setdefault(tuple(prompt[:start]), []).append(prompt[start:])
    contexts |= {tuple(ids[:i]): [ids[i:i + 1]] for i in tree.scored}
    for context, options in contexts.items():
        tokens = '|'.join(tokenizer.decode([i], start=False) for i in [*context, *options[0]])
        yield (tokenizer.decode(context),
               [tokenizer.decode(option, start=False) for option in options],
               '--- its tokens, with the first option',
               tokens.replace('\n', '\\n').replace('\\n|', '\\n|\n'))


def describe_tasks():
    """Return the text of --tasks=help: the hub dataset and the file names of each task."""
    tables = BENCHMARKS | {'a file or folder of your own': GENERIC} | (
        rooms.load('written benchmarks').WRITTEN_TASKS)
    splits = {name: {split: ', '.join(getattr(table, split, ()))
                     for split in ('test', 'shots', 'validation')}
              | {'{lang}': ' '.join(getattr(table, 'languages', ()))}
              for name, table in tables.items()}
    splits['p_ik'] = {'test': 'samples.jsonl of an evaluation of written answers'}
    splits['judge'] = {'test': ', '.join(PREFERENCE_PATTERNS)}
    splits |= {name: {'test': ', '.join(patterns)} for name, patterns in PATTERNS.items()}
    hubs = {name: table.hub for name, table in tables.items()} | {'clm': WIKITEXT}
    lines = [HELP]
    for name, files in splits.items():
        lines.append(f'{name}  {hubs.get(name, "")}'.rstrip())
        for split, text in files.items():
            lines += textwrap.wrap(text, 100, initial_indent=f'    {split:<12}',
                                   subsequent_indent=' ' * 16, break_on_hyphens=False)
    return '\n'.join(lines)

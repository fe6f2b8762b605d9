"""From the samples of an evaluation to the files in its folder: metrics, tables, pictures, page."""

import contextlib
import json
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np

from results import page, report
from results.plots import draw_reliability
from results.samples import DIAGRAM, OUTPUTS, SCALING, grid, of_split, samples_digest
from runtime import rooms
from runtime.digests import json_digest
from runtime.errors import ConfigError
from runtime.ownership import claim, note_inputs, write_text
from runtime.version import __version__


def write_evaluation(results, earlier, samples, tasks, cfg, settings, out_dir):
    """Measure {task: samples}, write all files of results, and return the content of results.json.

    results: {task: result without metrics}, which are added in place; earlier: {task: result} of
    results.json; tasks: {task: its Task}; settings: what all samples share, as in eval_config.json
    """
    remaining = {}
    for task, result in earlier.items():
        parent = task.partition('.')[0]
        if task in results:
            continue
        if parent in results and 'answers' in result and (
                result['answers'] != rooms.load('confidence').digest_of_answers(samples[parent])):
            print(f'{task}: left out, since the answers to {parent} have changed; evaluate it '
                  f'again')
        else:
            remaining[task] = result
    earlier = measure_again(remaining, samples)
    for task, result in results.items():
        rows, kind = samples[task], tasks[task.partition('.')[0]]
        fits = saved_fits(cfg, task)
        if fits == {}:
            print(f'{task}: not scaled, since {cfg.scaling} has no fits of it')
        result |= report.summarize(rows, cfg.norm, n_bootstrap=cfg.n_bootstrap, seed=cfg.seed,
                                   fit=cfg.fit_temperature or kind.is_written and len(rows) > 1,
                                   fits=fits, all_metrics=cfg.all_metrics or kind.all_metrics)
        shots = result.get('shots', 0)
        result['fewer_shots'] = sum(s.get('shots', shots) < shots for s in rows)
        if kind.is_written:
            result |= rooms.load('confidence').facts(task, samples)
    content = {'schema': report.SCHEMA, 'config': asdict(cfg) | {'model': str(cfg.model)},
               'seed': cfg.seed, 'versions': versions(cfg.device), 'identity': settings,
               'tasks': earlier | results}
    write_results(content, samples, tasks, cfg.pictures, out_dir)
    return content


def saved_fits(cfg, task):
    """Return {scaling: its parameters} of a result, such as 'mmlu' or 'mmlu.p_true', in the file
    cfg.scaling; {} if the file has other results of the task alone, None without a file.

    If the file has one task, its fits are for any task.
    """
    if not cfg.scaling:
        return None
    path = os.path.expanduser(cfg.scaling)
    note_inputs(path)       # --overwrite must not remove it
    try:
        fits = rooms.load('scaling').load(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f'scaling = {cfg.scaling!r} cannot be read: {error}') from None
    name, dot, variant = task.partition('.')
    there = [*dict.fromkeys(key.partition('.')[0] for key in fits)]
    if name not in there and len(there) != 1:
        raise ConfigError(f'scaling = {cfg.scaling!r} has {", ".join(there) or "no task"}, and not '
                          f'{name}; fit it with --fit_temperature')
    return fits.get(f'{name if name in there else there[0]}{dot}{variant}', {})


def write_results(content, samples, tasks, pictures, out_dir):
    """Write the content of results.json, the tables, the pictures and report.html."""
    results = content['tasks']
    pictures = draw_diagrams(results, samples, tasks, out_dir) if pictures else []
    rows = page.to_read(results, samples)
    page.write_report(content, page.select(rows), pictures, out_dir)
    texts = {'results.csv': report.to_csv(results),
             'results.tex': '\n'.join(report.section(task, results, 'latex').as_latex()
                                      for task in results),
             'results.md': '\n'.join(report.section(task, results).as_markdown()
                                     for task in results)}
    for name, text in texts.items():
        write_text(out_dir / name, text)
    names = ['report.html'] + [OUTPUTS[0]] * (out_dir / OUTPUTS[0]).exists()
    if fits := {task: x['post_hoc']['fits'] for task, x in results.items()
                if 'fits' in x.get('post_hoc', ())}:
        claim(out_dir, SCALING)
        rooms.load('scaling').save(out_dir / SCALING, fits)
        names.append(SCALING)
    # written last: a folder with results.json has the tables; NaN is null in JSON
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    finite['checksum'] = json_digest(finite)
    write_text(out_dir / 'results.json', json.dumps(finite, indent=1, ensure_ascii=False) + '\n')
    print(f'wrote {", ".join([*names, "results.json", *texts, *pictures])} to {out_dir}')


def measure_again(results, samples):
    """Return {task: result} of those made from these samples, anew where the code has changed."""
    updated = {}
    for task, result in results.items():
        rows = samples.get(task, [])
        if result.get('samples_digest') != samples_digest(rows):
            print(f'{task}: left out, since samples.jsonl has other samples of it than its results '
                  f'were made from; evaluate it again')
            continue
        if result.get('measured_by') != report.measured_by():
            print(f'{task}: its metrics are computed again from samples.jsonl, by the present code')
            result = result | report.summarize(
                rows, result['norm'], n_bootstrap=result['n_bootstrap'], seed=result['seed'],
                fit='post_hoc' in result, fits=result.get('scaled', {}).get('fits'),
                all_metrics='all_metrics' in result)
        updated[task] = result
    return updated


def draw_diagrams(results, samples, tasks, out_dir):
    """Draw reliability.png of all tasks, and grids of languages for `tasks`; return names."""
    panels, pictures = [], {}
    for task, result in results.items():
        test = of_split(samples[task])
        pooled = report.predictions(test, result['norm'])
        panels.append((report.panel_title(task, result), pooled))
        if languages := report.split_groups(test, 'language', pooled) if task in tasks else {}:
            pictures[grid(task)] = [(report.panel_title(name, result), p)
                                    for name, p in languages.items()], 7
    if panels:
        pictures[DIAGRAM] = panels, 5
    return [name for name, arguments in pictures.items()
            if draw_reliability(out_dir / name, *arguments)]


def versions(device: str) -> dict[str, str]:
    """Return the versions of the software, ours with the commit, and the name of `device`."""
    import torch        # which the command `nanocal` does without
    commit = ''
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = '+' + subprocess.run(
            ['git', 'describe', '--always', '--dirty'], capture_output=True, text=True, check=True,
            cwd=Path(__file__).parent, errors='replace', timeout=10).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else platform.processor()
    return {'nanocal': f'{__version__}{commit}', 'python': platform.python_version(),
            'torch': torch.__version__, 'numpy': np.__version__, 'device': name}

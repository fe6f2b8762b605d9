"""Investigating the Multilingual Calibration Effects of Language Model Instruction-Tuning (2025).

    python research/papers/multilingual.py --printed   # the printed tables: seconds, no model
    python research/papers/multilingual.py --plan
    python research/papers/multilingual.py --models=aya,gemma3 --figures=am,yo

multilingual.md says what the paper states, what it does not, and what was chosen here.
"""

import functools
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
from research.papers.common import (COLUMNS, OWN, EvalConfig, Run, changed_report, main, measured,
                                    numbers, own_table, paper_column, sweep, titles_of)
from research.papers.label_smoothing import DATA, EPOCHS, MODELS, TUNING, TUNING_OPTION, TUNINGS
from data import benchmarks
from research.papers.multilingual_printed import (BENCHMARKS, CLASSES, PRINTED, print_tables,
                                                  printed_numbers)
from results import report
from results.plots import draw_curves
from results.samples import read_splits
from results.columns import measure_of
from results.tables import latex, mark_best
from runtime.errors import ConfigError
from runtime.ownership import claim, write_text
from runtime.processes import parallel_map
from compare.significance import student_t
from stats import bootstrap, difference_test

INSTRUCT = {'google/gemma-2-2b': 'google/gemma-2-2b-it',
            'mistralai/Mistral-7B-v0.1': 'mistralai/Mistral-7B-Instruct-v0.1',
            'meta-llama/Llama-3.1-8B': 'meta-llama/Llama-3.1-8B-Instruct',
            'google/gemma-3-4b-pt': 'google/gemma-3-4b-it'}
# of --models: name, (hub name, weights). Aya Expanse is published as an instruction-tuned model.
MORE_MODELS = {'aya': ('Aya-Expanse-8B', ('CohereLabs/aya-expanse-8b', 8.03e9)),
               'gemma3': ('Gemma3-4B', ('google/gemma-3-4b-pt', 3.88e9))}
RATES, SMOOTHINGS = (5e-6, 1e-5, 5e-5, 1e-4), (0.1, 0.2)
# questions times tokens per question: those of English, and twice as many in the other languages
EVAL_TOKENS = 2 * (42 * 14042 * 95 + 29 * 11759 * 155)
TITLES = {task: title for task, (title, _) in BENCHMARKS.items()}
TESTED = 'accuracy', 'ece', 'entropy_bits'
REPORT = EvalConfig(tasks=tuple(BENCHMARKS), chat='none', shots=0, scoring='letters',
                    on_bad_row='skip', all_metrics=True)


def models(options):
    """Return {name: (hub name, weights)}: the paper's or your own, and those of --models."""
    names = [name for name in options.models.split(',') if name]
    if unknown := sorted({*names} - MORE_MODELS.keys()):
        raise ConfigError(f'--models={unknown[0]}: there are {" and ".join(MORE_MODELS)}')
    return own_table(options, 'model', MODELS) | dict(MORE_MODELS[name] for name in names)


def runs(options):
    for model, (hub, params) in models(options).items():
        for name, source in (('base', hub), ('instruct', INSTRUCT.get(hub))):
            if source:
                yield Run(replace(REPORT, model=source,
                                  out_dir=f'{options.out_dir}/{model}/{name}'),
                          params, eval_tokens=EVAL_TOKENS)
        for data, (source, tokens) in own_table(options, 'data', DATA).items():
            cfg = replace(TUNING, model=hub, data=source, warmup=0.02, eval=REPORT,
                          **TUNINGS[options.tuning])
            yield from sweep(f'{options.out_dir}/{model}/{data}', RATES, SMOOTHINGS, cfg,
                             params=params, train_tokens=EPOCHS * tokens, eval_tokens=EVAL_TOKENS)


def rows(options):
    """Yield ((model, data, smoothing), folder) of every row of the tables."""
    for model, (hub, _) in models(options).items():
        for name in ('base', 'instruct'):
            if name == 'base' or hub in INSTRUCT:
                yield (model, name, ''), f'{options.out_dir}/{model}/{name}'
        for data in own_table(options, 'data', DATA):
            for s in ('0.0', '0.1', '0.2'):
                yield ((model, data, s),
                       f'{options.out_dir}/{model}/{data}/smoothing{float(s):g}')


# Tables

def languages_of(task, options):
    """Return the languages of a benchmark that the runs are evaluated in; [''] if it has none."""
    selected = changed_report(REPORT, options).languages
    every = benchmarks.BENCHMARKS.get(task, benchmarks.GENERIC).languages
    if not every:       # the rows of a file may name some
        return sorted({language for _, folder in rows(options)
                       for language in measured(folder, task).get('languages', {})}) or ['']
    return [x for x in every if 'all' in selected or x in selected]


def reports_of(folder, task, languages):
    """Return {language or 'all': report} of a run; {} without results."""
    result = measured(folder, task)
    if not result:
        return {}
    # results.json has no report of a single language
    single = {languages[0]: result['pooled']} if len(languages) == 1 else {}
    return {'all': result['pooled']} | result.get('languages', single)


def tables(options):
    printed = {} if options.model or options.data else printed_numbers()    # of other models
    folders, results = dict(rows(options)), {}
    for task, title in titles_of(REPORT, TITLES, options).items():
        languages = languages_of(task, options)
        reports = {key: reports_of(folder, task, languages) for key, folder in folders.items()}
        results[task] = title, languages, reports, p_by_question(task, folders, reports)
        yield from task_tables(options, task, *results[task], {
            key[1:]: row for key, row in printed.items() if key[0] == task})
    write_appendix(options, results)
    draw_figures(options)


def task_tables(options, task, title, languages, reports, tests, printed):
    """Yield the tables of a benchmark; printed: {(language or 'all', *row): numbers}."""
    shown = bool(printed)
    whole = shown and languages == [*BENCHMARKS[task][1]]   # the pooled rows are of all

    def line(key, members):
        """Return the row `key`, means over `members`; a printed number beside each of ours."""
        members = [x for x in members if x in ('all', *languages)]
        ours = mean_of([reports[key][x] for x in members if x in reports[key]])
        theirs = mean_of([printed[x, *key] for x in members
                          if (x, *key) in printed and (whole or x != 'all')])
        pairs = zip(numbers(ours, PRINTED), numbers(theirs, PRINTED), strict=True)
        return (*key, *(cell for pair in pairs for cell in pair[:1 + shown]),
                *numbers(ours, ['rmsce']))

    def tested(key):
        """Return p of accuracy and ECE against smoothing 0, over languages and questions."""
        names, own, plain = ('accuracy', 'ece'), reports[key], reports.get((*key[:2], '0.0'), {})
        both = sorted((own.keys() & plain.keys()) - {'all'}) if own is not plain else []
        p = tests.get(key, {}).get('all', {})
        return (*(f'{student_t([own[x][name] - plain[x][name] for x in both])[2]:.2g}'
                  if len(both) > 1 else '' for name in names),
                *(f'{p[name]:.2g}' if p.get(name) else '' for name in names))

    head = ('model', 'data', 'smoothing', *(column for key in PRINTED for column in (
        COLUMNS[key], *[paper_column(COLUMNS[key], options)] * shown)), COLUMNS['rmsce'])
    pooled = [(*head, *(f'p {name}, {over}' for over in ('languages', 'questions')
                        for name in ('accuracy', 'ECE'))),
              *((*line(key, ['all']), *tested(key)) for key in reports)]
    if languages == ['']:
        yield task, title, pooled
        return
    yield task, f'{title}, all languages together{" (tables 1 and 2)" * shown}', pooled
    others = {*languages} - {*itertools.chain(*CLASSES.values())}
    yield f'{task}_classes', f'{title}, means over the languages of a class', [
        ('class', *head), *((name, *line(key, members)) for key in reports for name, members
                            in (CLASSES | ({'other': others} if others else {})).items())]
    yield (f'{task}_languages', f'{title} by language{" (tables 3 to 73)" * shown}', [
        ('language', *head), *((x, *line(key, [x])) for x in languages for key in reports)])


def mean_of(reports):
    """Return the mean of each metric over the reports of several languages."""
    return {key: sum(r[key] for r in reports) / len(reports) for key in (*PRINTED, 'rmsce')
            if reports and all(r.get(key) is not None for r in reports)}


def p_by_question(task, folders, reports):
    """Return {row: {language or 'all': {metric: p}}} of each smoothed run against smoothing 0."""
    pairs = {key: (*key[:2], '0.0') for key in folders if key[2] in ('0.1', '0.2')}
    pairs = {key: plain for key, plain in pairs.items() if reports[key] and reports[plain]}
    needed = sorted({*pairs, *pairs.values()})
    # a process needs about 2 GB for the samples of 42 languages
    values = parallel_map(lambda key: resample(predictions(folders[key], task)), needed,
                          worth_it=bool(needed), most=4)
    values = dict(zip(needed, values, strict=True))
    return {key: p_values(values[plain], values[key]) for key, plain in pairs.items()}


def resample(groups, n_resamples=1000, seed=0):
    """Return (question ids, {language or 'all': {key of TESTED: (value, [n_resamples])}}).

    Questions are drawn with replacement, each with its predictions in all languages, which 'all'
    pools. Runs with the same ids have the same draws. groups: {language: (ids, Predictions)}
    """
    ids = sorted({name for names, _ in groups.values() for name in names})
    row, values = {name: i for i, name in enumerate(ids)}, {}
    members = {language: [group] for language, group in groups.items()}
    for language, parts in (members | {'all': [*groups.values()]}).items():
        confidence, correct, entropy = map(np.concatenate, zip(*(
            (*metrics.top_label(p.probs, p.labels), metrics.row_entropy(p.probs) / np.log(2))
            for _, p in parts)))
        observed = metrics.report(confidence, correct) | {'entropy_bits': entropy.mean()}
        drawn = bootstrap(
            confidence, correct, keys=TESTED, columns={'entropy_bits': entropy}, seed=seed,
            questions=np.array([row[name] for names, _ in parts for name in names]),
            n_questions=len(ids), n_resamples=n_resamples)
        values[language] = {key: (observed[key], drawn[key]) for key in TESTED}
    return ids, values


def p_values(plain, other):
    """Return {language: {key: two-sided p of other - plain}} of two results of `resample`, as in
    stats.difference_test; {} if the runs have other questions."""
    (ids, before), (other_ids, after) = plain, other
    if ids != other_ids:
        return {}
    return {language: {key: difference_test(
        first[key][1], after[language][key][1], (first[key][0], after[language][key][0]),
        not measure_of(key).is_mean)[2] for key in TESTED}
        for language, first in before.items() if language in after}


def write_appendix(options, results):
    """Write appendix.tex, a table per language in the layout of tables 3 to 73.

    Bold is the better of smoothing 0 and 0.1, italic if the difference is significant. results:
    {task: (title, languages, {row: reports}, {row: tests})}
    """
    data = ['base', 'instruct', *own_table(options, 'data', DATA)]
    head = ('SFT dataset', 'model', 'smoothing', *(COLUMNS[key] for key in PRINTED))
    changed, tex = '; changed settings: ' + ' '.join(options.changes), []
    for title, languages, reports, tests in results.values():
        rows = sorted(reports, key=lambda row: data.index(row[1]))
        for language in languages:
            keys = [row for row in rows if language in reports[row]]
            if not keys:
                continue
            lines = [head, *((dataset, model, s, *numbers(reports[model, dataset, s][language],
                                                          PRINTED)) for model, dataset, s in keys)]
            marked = mark_best(lines, [
                key[:2] if key[2] in ('0.0', '0.1') else key for key in keys])
            for line, key in zip(marked[1:], keys, strict=True):
                p = tests.get((*key[:2], '0.1'), {}).get(language, {})
                for i, name in enumerate(PRINTED, 3):
                    if line[i].endswith(' *') and p.get(name, 1) < 0.05:
                        line[i] = f'†{line[i]}'
            place = f' in {language}' * bool(language)
            caption = (f'{title}{place} by SFT dataset, model and smoothing'
                       + changed * bool(options.changes))
            tex.append(re.sub('†([0-9.]+)', r'\\textit{\1}', latex(marked, caption)))
    if tex:
        claim(options.out_dir, 'appendix.tex')
        write_text(Path(options.out_dir, 'appendix.tex'), '\n'.join(tex))


# Figures

def curves_of(options):
    """Return the rows of panels, {label of a curve: (data, smoothing) of its run}."""
    return {'base': {'instruct': ('instruct', ''), 'base': ('base', '')}} | {
        data: {f'smoothing {s}': (data, s) for s in ('0.0', '0.1')}
        for data in own_table(options, 'data', ('Tulu3', 'OpenHermes'))}


def draw_figures(options):
    """Draw figure 1, base and instruction-tuned, figure 2, Yoruba by smoothing, and those of
    --figures: the figures 3 to 215 of one language and benchmark in one picture."""
    base, *datasets = names = [*curves_of(options)]
    overlay(options, 'figure1.png', 'global_mmlu', ('en', 'zh', 'sw', 'yo'), [base])
    overlay(options, 'figure2.png', 'global_mmlu', ('yo',), datasets)
    for task in titles_of(REPORT, TITLES, options):
        for language in languages_of(task, options):
            if language in options.figures.split(',') or options.figures == 'all':
                overlay(options, f'{task}-{language}.png'.replace('-.', '.'), task, (language,),
                        names)


def overlay(options, name, task, languages, names):
    """Draw a panel for each of `names`, of `curves_of`, each language and each model, but for runs
    that are not finished."""
    panels, folders = {}, dict(rows(options))
    for data, language, model in itertools.product(names, languages, models(options)):
        curves = {}
        for label, setting in curves_of(options)[data].items():
            folder = folders.get((model, *setting), '')
            if language in reports_of(folder, task, languages_of(task, options)):
                samples = predictions(folder, task)     # '': of the only language there
                _, p = samples[language or next(iter(samples))]
                title = report.panel_title(label, measured(folder, task))
                curves[title] = metrics.bins(p.probs, p.labels)
        if curves:
            panels[f'{model}, {data}: {language}'] = curves
    if panels:
        claim(options.out_dir, name)
        draw_curves(Path(options.out_dir, name), panels, len(models(options)))


@functools.cache
def predictions(folder, task):
    """Return {language: (ids of the questions, Predictions)} of a run on a benchmark."""
    samples, norm = {}, measured(folder, task)['norm']
    for sample in read_splits(Path(folder, 'samples.jsonl'))[0][task]:
        samples.setdefault(sample['language'], []).append(sample)
    return {language: ([sample['id'] for sample in group], report.predictions(group, norm))
            for language, group in samples.items()}


if __name__ == '__main__':
    if '--printed' in sys.argv[1:]:
        print_tables()
    else:
        main(runs, tables,
             **OWN, tuning=TUNING_OPTION,
             models={'help': f'models beside those of the paper: {",".join(MORE_MODELS)}'},
             figures={'help': 'languages of figures 3 to 215 to draw, such as am,yo, or all'})

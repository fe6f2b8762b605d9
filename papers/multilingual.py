"""Investigating the Multilingual Calibration Effects of Language Model Instruction-Tuning (Huang
et al. 2025).

    python papers/multilingual.py --printed     # what the printed tables say: seconds, no model
    python papers/multilingual.py --plan
    python papers/multilingual.py

Stated (section 3): Gemma 2 2B, Mistral 7B and Llama 3.1 8B, tuned on Alpaca, Tulu 3 and OpenHermes;
learning rates 5e-6, 1e-5, 5e-5 and 1e-4, AdamW, a linear warm-up over 2 % of the steps, batches of
128, dropout 0.1; Global-MMLU in 42 languages and MMLU-ProX in 29; the perplexities of the answers,
normalized to a distribution; smoothing 0, 0.1 and 0.2 (tables 1 to 73); a Student's t-test.
Figure 1 compares open models with their instruction-tuned variants.

Not stated, and chosen here: Mistral 7B v0.1; 2 epochs and open-instruct's other settings; the
learning rate with the least NLL on 1,000 held-out conversations at smoothing 0; 5 shots in the
question's language after MMLU's English header; the text of an option with its mean log-probability
per token, whose softmax is the normalized inverse perplexity; the t-test pairs the languages; the
four languages of figure 1.

The printed column RMS is below ECE in many rows, so it is no root mean square of the gaps. It is
probably `rms_mmlu_repo` of metrics.py, which is shown beside RMSCE as the paper defines it. Rows of
all languages are pooled, as the printed ones for Global-MMLU seem to be; those printed for
MMLU-ProX do not follow from the tables by language. The MMLU-ProX language printed as 'rj' is read
as Russian, and the second '0.1' of Tulu 3 in tables 27 and 31 as 0.2.

Different here: all weights are tuned without dropout, as in papers/label_smoothing.py.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from common import COLUMNS, EvalConfig, Run, main, measured, numbers, report, sweep
from label_smoothing import DATA, EPOCHS, MODELS, TUNING
from multilingual_printed import BENCHMARKS, CLASSES, PRINTED, print_tables, printed_numbers
from results.samples import latest_samples
from stats import student_t

TUNED = {'Gemma2-2B': 'google/gemma-2-2b-it', 'Mistral-7B': 'mistralai/Mistral-7B-Instruct-v0.1',
         'Llama-3.1-8B': 'meta-llama/Llama-3.1-8B-Instruct'}
RATES, SMOOTHINGS = (5e-6, 1e-5, 5e-5, 1e-4), (0.1, 0.2)
# questions times tokens per question: those of English, and twice as many in the other languages
EVAL_TOKENS = 2 * (42 * 14042 * 95 + 29 * 11759 * 155)
REPORT = EvalConfig(tasks=tuple(BENCHMARKS), shots=5, scoring='text', norm='token',
                    on_bad_row='skip')


def runs(options):
    for model, (hub, params) in MODELS.items():
        for name, source in (('base', hub), ('instruct', TUNED[model])):
            yield Run(replace(REPORT, model=source, out_dir=f'{options.out_dir}/{model}/{name}'),
                      params, eval_tokens=EVAL_TOKENS)
        for data, (source, tokens) in DATA.items():
            cfg = replace(TUNING, model=hub, data=source, warmup=0.02, eval=REPORT)
            yield from sweep(f'{options.out_dir}/{model}/{data}', RATES, SMOOTHINGS, cfg,
                             params=params, train_tokens=EPOCHS * tokens, eval_tokens=EVAL_TOKENS)


def rows(options):
    """Yield (model, data, smoothing, folder) of every row of the tables."""
    for model in MODELS:
        yield model, 'base', '', f'{options.out_dir}/{model}/base'
        yield model, 'instruct', '', f'{options.out_dir}/{model}/instruct'
        for data in DATA:
            for s in ('0.0', '0.1', '0.2'):
                yield model, data, s, f'{options.out_dir}/{model}/{data}/smoothing{float(s):g}'


def beside(result, printed):
    """Return the cells of a report, each measured number before the printed one."""
    pairs = zip(numbers(result, PRINTED), numbers(printed, PRINTED), strict=True)
    return [*(cell for pair in pairs for cell in pair), *numbers(result, ['rmsce'])]


def mean_of(reports):
    """Return the mean of each metric over the reports of several languages."""
    return {key: sum(r[key] for r in reports) / len(reports) for key in (*PRINTED, 'rmsce')
            if reports and all(key in r for r in reports)}


def p_values(reports, plain):
    """Return the p of accuracy and ECE against smoothing 0, paired over the languages."""
    both = sorted(reports.keys() & plain.keys())
    return [f'{student_t([reports[x][key] - plain[x][key] for x in both])[2]:.2g}'
            if len(both) > 1 and reports is not plain else '' for key in ('accuracy', 'ece')]


def tables(options):
    printed, measures = printed_numbers(), [c for key in PRINTED
                                            for c in (COLUMNS[key], f'{COLUMNS[key]} (paper)')]
    head = ('model', 'data', 'smoothing', *measures, COLUMNS['rmsce'])
    for task, (title, languages) in BENCHMARKS.items():
        results = {row[:3]: measured(row[3], task) for row in rows(options)}
        pooled_lines, by_class = [(*head, 'p accuracy', 'p ECE')], [('class', *head)]
        for key, result in results.items():
            reports = result.get('languages', {})
            plain = results.get((*key[:2], '0.0'), {}).get('languages', reports)
            pooled_lines.append((*key, *beside(result.get('pooled', {}), printed.get(
                (task, 'all', *key), {})), *p_values(reports, plain)))
            for name, members in CLASSES.items():
                members = [x for x in members if x in languages]
                theirs = [printed[task, x, *key] for x in members if (task, x, *key) in printed]
                by_class.append((name, *key, *beside(
                    mean_of([reports[x] for x in members if x in reports]), mean_of(theirs))))
        by_language = [('language', *head), *(
            (x, *key, *beside(result.get('languages', {}).get(x, {}),
                              printed.get((task, x, *key), {})))
            for x in languages for key, result in results.items())]
        yield task, f'{title}, all languages together (tables 1 and 2)', pooled_lines
        yield f'{task}_classes', f'{title}, means over the languages of a class', by_class
        yield f'{task}_languages', f'{title} by language (tables 3 to 73)', by_language
    figures(options)


def figures(options):
    """Draw figure 1, base and instruction-tuned, and figure 2, Yoruba by smoothing."""
    base = [(model, name, language, f'{options.out_dir}/{model}/{name}')
            for model in MODELS for language in ('en', 'zh', 'sw', 'yo')
            for name in ('base', 'instruct')]
    yoruba = [(model, f'{data} {s:g}', 'yo', f'{options.out_dir}/{model}/{data}/smoothing{s:g}')
              for data in ('Tulu3', 'OpenHermes') for model in MODELS for s in (0, 0.1)]
    for name, wanted in (('figure1', base), ('figure2', yoruba)):
        panels = [(report.panel_title(f'{model}, {run}: {language}', result),
                   predictions(folder, language)) for model, run, language, folder in wanted
                  if language in (result := measured(folder, 'global_mmlu')).get('languages', {})]
        if panels:
            report.draw_reliability(Path(options.out_dir, f'{name}.png'), panels, 6)


def predictions(folder, language):
    """Return the Predictions of a run on the questions of Global-MMLU in one language."""
    with open(Path(folder, 'samples.jsonl'), encoding='utf-8') as file:
        samples = map(json.loads, (x for x in file if f'"language": "{language}"' in x))
        return report.predictions(latest_samples(
            [s for s in samples if s['task'] == 'global_mmlu']), REPORT.norm)


if __name__ == '__main__':
    if '--printed' in sys.argv[1:]:
        print_tables()
    else:
        main(runs, tables)

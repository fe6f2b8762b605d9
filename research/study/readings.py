"""What each reading of the multilingual paper's scoring predicts: letters or texts, 0 or 5 shots.

The text of a small world has lists of questions answered by a letter, a value or a sentence. A base
model is trained on it and tuned on conversations of all three kinds; both are evaluated under each
reading. That takes some ten minutes per seed on one CPU core.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import demo
from world import (ATTRIBUTES, ENGLISH, choice, conversation, log_uniform_facts, question,
                        solved_list, write_world)
from evaluate import EvalConfig, run
from results.report import predictions
from results.samples import read_samples
from results.tables import csv_text, markdown
from runtime import cli
from runtime.ownership import write_text
from research import common
from research.study.world import StudySpec, StudyWorld

ANSWERS = ('letter', 'value', 'sentence')
# reading: (what the options in the file are, scoring, norm)
READINGS = {
    'letters': ('value', 'letters', 'sum'),
    'values, mean': ('value', 'text', 'token'), 'values, sum': ('value', 'text', 'sum'),
    'sentences, mean': ('sentence', 'text', 'token'), 'sentences, sum': ('sentence', 'text', 'sum')}
METRICS = {'accuracy': 'accuracy', 'entropy_bits': 'entropy (bits)', 'confidence': 'confidence',
           'ece': 'ECE', 'rms_mmlu_repo': 'RMS'}
WORLD = StudySpec(entities=600, zipf=1.1, first_names=25, family_names=25, documents=10_000,
                  list_share=0.2, exam_share=0.6, vocab_sizes=(800,), tokenizer_documents=2_000,
                  instructions=600, questions=1_000)


def solved(world, kind, fact, rng):
    """Return (question, answer) about fact = (entity, attribute); kind is one of ANSWERS."""
    if kind == 'letter':
        return world.exam(*fact, 4, rng)
    return world.ask(*fact), (world.value(*fact) if kind == 'value' else
                              world.statement(*fact, rng))


def make_rows(spec, seed):
    """Return {path: rows} of text, conversations, and questions with their shots."""
    world, rng = StudyWorld(spec, seed), np.random.default_rng([seed, 1])
    share = np.arange(1, spec.entities + 1) ** -spec.zipf
    shares = [spec.exam_share, *[spec.list_share / 2] * 2, 1 - spec.exam_share - spec.list_share]
    texts = []
    for entities in rng.choice(spec.entities, (spec.documents, 6), p=share / share.sum()):
        kind, attribute = rng.choice([*ANSWERS, 'profile'], p=shares), choice(ATTRIBUTES, rng)
        texts.append(' '.join(world.profile(e, rng) for e in entities) if kind == 'profile' else
                     solved_list(attribute, [solved(world, kind, (e, attribute), rng)
                                             for e in entities]))
    facts = log_uniform_facts(spec, spec.instructions + spec.questions, rng)
    told, asked = facts[:spec.instructions], facts[spec.instructions:]
    files = {'text.jsonl': [{'text': text} for text in texts], 'instruct.jsonl': [
        conversation(ask, f'Answer: {answer}') for ask, answer in (
            solved(world, ANSWERS[i % 3], fact, rng) for i, fact in enumerate(told))]}
    for split, part in (('test', asked), ('dev', told)):
        rows = [question(world, fact, world.options(*fact, 4, rng)) for fact in part]
        files[f'value/{split}.jsonl'] = rows
        files[f'sentence/{split}.jsonl'] = [row | {'choices': [
            ENGLISH.statements[attribute][0].format(name=world.names[entity], value=value)
            for value in row['choices']]}
            for row, (entity, attribute) in zip(rows, part, strict=True)]
    return files


def prepare(seed, root=common.ROOT):
    write_world(f'{common.seed_folder("readings", seed, root)}/world', seed, WORLD, make_rows)


def runs(seed, root=common.ROOT):
    folder = common.seed_folder('readings', seed, root)
    base, tuned, _ = demo.runs(demo.DemoConfig(out_dir=folder, seed=seed)).values()
    shared = {'max_length': 320, 'pack_len': 320, 'micro_rows': 32, 'save_every': None,
              'log_every': 100, 'pictures': False, 'eval': None}
    yield replace(base, batch_size=12, shape={'num_hidden_layers': 3}, **shared)
    yield replace(tuned, batch_size=16, **shared)


def measure(cfg, reading, shots):
    """Evaluate the model of a run under one of READINGS; return a row of the CSV."""
    (options, scoring, norm), model = READINGS[reading], Path(cfg.out_dir)
    out_dir = f'{model}/{options}-{scoring}-{shots}'
    run(EvalConfig(model=f'{model}', tasks=(f'{model.parent}/world/{options}',), scoring=scoring,
                   shots=shots, n_bootstrap=0, pictures=False, out_dir=out_dir))
    report = predictions(read_samples(f'{out_dir}/samples.jsonl'), norm).report()
    return {'reading': reading, 'shots': shots, 'model': model.name, 'seed': cfg.seed} | {
        key: round(report[key], 5) for key in METRICS}


def table(rows):
    """Return the rows in Markdown, each metric as its mean over seeds (least to greatest)."""
    lines = {}
    for row in rows:
        lines.setdefault((row['reading'], f'{row["shots"]}', row['model']), []).append(row)
    return markdown([['reading', 'shots', 'model', *METRICS.values()]] + [
        [*line, *(f'{np.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})'
                  for x in ([row[key] for row in seeds] for key in METRICS))]
        for line, seeds in lines.items()])


def main(seeds=(0, 1, 2), root=common.ROOT, results='research/study/results/readings'):
    common.train_all(runs, seeds, root=root, prepare=prepare)
    rows = [measure(cfg, reading, shots) for shots in (0, 5) for reading in READINGS
            for seed in seeds for cfg in runs(seed, root)]
    write_text(Path(results, 'readings.csv'), csv_text(rows))
    write_text(Path(results, 'readings.md'), table(rows))
    print(table(rows))


if __name__ == '__main__':
    common.command_line(__doc__)
    with cli.one_line_errors(resume='the same command continues'):
        main()

"""Claim 18: the same methods on Gemma 3 270M and SmolLM2 135M Instruct; see PLAN.md.

    python research/study/two_models.py --models=MODELS --data=DATA --gpus=2 --processes=4
    python research/study/two_models_table.py

MODELS has gemma/model and smollm/model; two_models_data.py makes DATA. Finished runs are skipped; a
run that fails is reported, and the others continue. Seeds 11 to 13 had no CMMLU, and their draw of
2,000 questions of MMLU was not kept.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import side_by_side     # it limits the threads of numpy and torch

import numpy as np

from compare.runs import read_run, read_run_samples
from data.eval_config import EvalConfig
from evaluate import run
from research import common
from research.study.runs import FILE
from results.report import predictions
from results.samples import sample_order
from train import TrainConfig

SEEDS = 11, 12, 13, 14, 15
# {folder of --models: (template for training, chat of the evaluation)}
MODELS = {'gemma': ('tulu', 'none'), 'smollm': ('model', 'model')}


# the evaluations after that of the run itself: {folder in the run's: (tasks, other settings)}
MORE = {'text': (['mmlu'], {'scoring': 'text', 'prompt_format': 'mmlu'}),
        'wiki': (['clm'], {'chat': 'none'})}
FOLDERS = {'arc_easy': 'arc', 'arc_challenge': 'arc', 'clm': 'wiki'}


def evaluation(data, tasks=('arc_easy', 'arc_challenge', 'hellaswag', 'mmlu', 'xcopa', 'cmmlu'),
               **more):
    """Return the report on tasks: MMLU and CMMLU by letters, the other questions by text."""
    return EvalConfig(tasks=tuple(f'{task}:{data}/{FOLDERS.get(task, task)}' for task in tasks),
                      **{'prompt_format': 'harness'} | more, shots=0, fit_temperature=True,
                      n_bootstrap=0, pictures=False)


def jobs(seeds, models, data, root, max_steps, limit):
    """Yield the jobs; each method is done for all seeds before the next one, long runs first."""
    for tuning_data, methods in reversed(FILE['two_models'].items()):
        for name, (template, chat) in MODELS.items():
            for method, more in methods.items():
                for seed in seeds:
                    yield job(TrainConfig(**{
                        'model': f'{models}/{name}/model', 'data': f'{data}/{tuning_data}.jsonl',
                        'template': template, 'epochs': 3.0, 'lr': 5e-5, 'batch_size': 32,
                        'max_length': 1024, 'on_bad_row': 'skip', 'pack_len': 2048,
                        'val_size': 200, 'val_every': 10_000,
                        'max_steps': max_steps, 'cache_dir': f'{root}/cache', 'workers': 1,
                        'checkpoint_epochs': False, 'save_every': None, 'log_every': 10,
                        'pictures': False, 'eval_before': False, 'seed': seed,
                        # before tuning, the questions are the same for each seed
                        'eval': evaluation(data, chat=chat, limit=limit)
                        if method != 'before' or seed == seeds[0] else None,
                        'out_dir': f'{common.seed_folder("two-models", seed, root)}/'
                                   f'{name}/{tuning_data}/{method}'} | more), data)


def job(cfg, data):
    return side_by_side.Job(cfg.out_dir, fit, (cfg, data), (f'{cfg.model}/config.json', cfg.data),
                            Path(cfg.out_dir, 'questions.npz' if cfg.eval else 'config.json'))


def fit(cfg, data):
    """Train and evaluate; write questions.npz.

    It has {task: log-probability of each option [questions, options]} and {task.answer: numbers}.
    """
    side_by_side.fit(cfg)
    folder, arrays = Path(cfg.out_dir), {}
    for name, (tasks, more) in MORE.items() if cfg.eval else ():
        run(evaluation(data, tasks, **{'chat': cfg.eval.chat, 'limit': cfg.eval.limit,
                                       'model': cfg.out_dir, 'out_dir': f'{folder / name}'} | more))
    for part, suffix in ((folder, ''), (folder / 'text', '_text')) if cfg.eval else ():
        for task, samples in read_run_samples(read_run(part))[0].items():
            predicted = predictions(sorted(samples, key=sample_order), 'token')
            with np.errstate(divide='ignore'):      # of options that a question lacks
                arrays[task + suffix] = np.log(predicted.probs).astype(np.float16)
            arrays[f'{task}{suffix}.answer'] = predicted.labels.astype(np.int8)
    if arrays:
        np.savez_compressed(folder / 'questions.npz', **arrays)


def main():
    options = common.command_line(
        __doc__, models={'required': True, 'help': 'folder of the models'},
        data={'required': True, 'help': 'folder of the data'}, seeds=common.seeds_option(SEEDS),
        gpus={'type': int, 'default': 1, 'help': '0: none; default: %(default)s'},
        processes={'type': int, 'default': 4, 'help': 'per GPU; default: %(default)s'},
        max_steps={'type': int, 'help': 'stop each run earlier, for a trial'},
        limit={'type': int, 'help': 'questions per task, for a trial'}, out_dir=common.OUT_DIR)
    folder = Path(options.out_dir) / 'side-by-side'
    folder.mkdir(parents=True, exist_ok=True)
    todo = jobs(options.seeds, options.models, options.data, options.out_dir, options.max_steps,
                options.limit)
    sys.exit(bool(side_by_side.side_by_side(
        [*todo], max(1, options.gpus) * options.processes, options.gpus, folder)))


if __name__ == '__main__':
    main()

"""Let lm-evaluation-harness write the files of this folder: `python write.py FOLDER [MODEL]`.

tests/test_prediction_files.py and tests/test_compare.py read them. Needs lm-eval 0.4.13,
transformers and tokenizers. Two random Llamas over bytes answer questions that were made up for
this test; of results_*.json only the keys in KEPT are kept.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# without the index of lm-eval's own tasks, which takes 15 seconds
RUN = """import functools, lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
cli_evaluate()
"""
KEPT = 'results', 'group_subtasks', 'lm_eval_version'
FILE = json.loads(Path(__file__).with_name('tasks.json').read_text(encoding='utf-8'))
TASKS = FILE['tasks']       # {name: {'questions': their name, 'settings'}}


def write_tasks(folder):
    folder.mkdir(parents=True)
    for name, task in TASKS.items():
        data = folder / f'{name}.jsonl'
        data.write_text(''.join(json.dumps(row) + '\n'
                                for row in FILE['questions'][task['questions']]))
        settings = {'task': name, 'dataset_path': 'json', 'test_split': 'test', 'num_fewshot': 0,
                    'output_type': 'multiple_choice'} | task['settings']
        settings |= {'dataset_kwargs': {'data_files': {'test': str(data)}},
                     'metric_list': [{'metric': x} for x in settings.pop('metrics')]}
        (folder / f'{name}.yaml').write_text(json.dumps(settings))      # JSON is YAML
    (folder / 'trivia.yaml').write_text(json.dumps({
        'group': 'trivia', 'task': ['trivia_animals', 'trivia_rivers'],
        'aggregate_metric_list': [{'metric': 'acc', 'weight_by_size': True}]}))


def write_model(folder, seed):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, '</s>'])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='</s>',
                            pad_token='</s>').save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, bos_token_id=None, eos_token_id=256))
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.ndim > 1 else 1.0, 0.3 if p.ndim > 1 else 0.0)
    model.save_pretrained(folder)


def main(out, work):
    write_tasks(work / 'tasks')
    for name, seed, tasks in (('first', 0, TASKS), ('second', 1, ['trivia', 'endings', 'gaps'])):
        if name not in (sys.argv[2:] or name):
            continue
        write_model(work / name, seed)
        tasks = dict.fromkeys(task.split('_')[0] if 'trivia' in task else task for task in tasks)
        subprocess.run([sys.executable, '-c', RUN, 'run', '--model', 'hf', '--model_args',
                        f'pretrained={name}', '--include_path', 'tasks', '--tasks',
                        ','.join(tasks), '--device', 'cpu', '--output_path', str(out.absolute()),
                        '--log_samples'], check=True, cwd=work, env=os.environ | {
                            'HF_HUB_OFFLINE': '1', 'HF_DATASETS_CACHE': str(work / 'cache')})
    for path in out.glob('*/results_*.json'):
        results = json.loads(path.read_text())
        path.write_text(json.dumps({key: results[key] for key in KEPT}, indent=1) + '\n')


if __name__ == '__main__':
    import tempfile
    with tempfile.TemporaryDirectory() as work:
        main(Path(sys.argv[1]), Path(work))

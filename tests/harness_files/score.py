"""Score tasks by lm-evaluation-harness, for tests/test_evaluate.py.

    python score.py MODEL DATA.json FOUND.json CHAT TASK ...

DATA.json has {dataset of the hub: {split: rows}}; CHAT is empty, `chat` or `multiturn`.
FOUND.json gets the log-probabilities of the options of each row by task, and the prompts by
`TASK prompts`. The script is not in the folder of our evaluate.py, which its package `evaluate`
would import.
"""

import json
import pathlib
import sys

import datasets
import lm_eval.tasks
import torch
import transformers
from lm_eval.models.huggingface import HFLM

model, data = sys.argv[1], json.load(open(sys.argv[2]))


def load_dataset(path, name=None, **options):
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows)
                                 for split, rows in data[path].items()})


datasets.load_dataset = load_dataset
lm = HFLM(transformers.AutoModelForCausalLM.from_pretrained(
    model, dtype=torch.float32, attn_implementation='eager'),
          tokenizer=transformers.AutoTokenizer.from_pretrained(model), batch_size=8, device='cpu')
found, folder = {}, pathlib.Path(lm_eval.tasks.__file__).parent
# the index of all its tasks would take longer than the rest
tasks = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[str(folder / x) for x in (
    'mmlu', 'arc', 'hellaswag', 'xcopa', 'winogrande', 'super_glue', 'truthfulqa',
    'inverse_scaling', 'gsm8k')])
chat = {'apply_chat_template': True, 'fewshot_as_multiturn': sys.argv[4] == 'multiturn'}
lm.generate_until = lambda requests, **_: [''] * len(requests)
for task in sys.argv[5:]:
    results = lm_eval.simple_evaluate(
        lm, tasks=[task], num_fewshot=5 * (task[:4] in ('mmlu', 'gsm8')), log_samples=True,
        bootstrap_iters=0, task_manager=tasks, **(chat if sys.argv[4] else {}))
    samples = sorted(results['samples'][task], key=lambda s: s['doc_id'])
    found[task + ' prompts'] = [[prompt for prompt, _ in s['arguments']] for s in samples]
    found[task] = [] if task == 'gsm8k' else [
        [r[0] if isinstance(r[0], float) else r[0][0] for r in s['filtered_resps']]
        for s in samples]
json.dump(found, open(sys.argv[3], 'w'))

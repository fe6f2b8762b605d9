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
ANIMALS = [
    {'question': 'How many legs has a spider?', 'choices': ['four', 'six', 'eight', 'ten'],
     'answer': 2},
    {'question': 'Which of these lays eggs?', 'choices': ['a cat', 'a duck', 'a cow', 'a dog'],
     'answer': 1},
    {'question': 'What does a caterpillar become?',
     'choices': ['a bee', 'a spider', 'a worm', 'a butterfly'], 'answer': 3},
    {'question': 'Where does a whale live?',
     'choices': ['in the sea', 'in a tree', 'in the desert', 'under a stone'], 'answer': 0}]
RIVERS = [
    {'question': 'Which river flows through Cairo?',
     'choices': ['the Rhine', 'the Nile', 'the Volga', 'the Amazon'], 'answer': 1},
    {'question': 'Which river flows through London?',
     'choices': ['the Seine', 'the Tiber', 'the Elbe', 'the Thames'], 'answer': 3}]
ENDINGS = [
    {'start': 'He opened the umbrella because', 'label': 0,
     'endings': ['it rained.', 'the sun was shining all day long.', 'soup.']},
    {'start': 'She put the kettle on the stove and', 'label': 1,
     'endings': ['flew to the moon.', 'waited until the water boiled.']},
    {'start': 'Im Café trank er', 'label': 0, 'endings': ['einen süßen Tee.', 'Öl.', 'über.']},
    {'start': 'The train was late, so they', 'label': 2,
     'endings': ['ate the station.', 'slept in the sea.', 'missed the film.', 'were early.']}]
GAPS = [
    {'before': 'The box does not fit into the bag because the', 'after': 'is too large.',
     'options': ['box', 'bag'], 'answer': 0},
    {'before': 'The box does not fit into the bag because the', 'after': 'is too small.',
     'options': ['box', 'bag'], 'answer': 1}]
WORDS = [{'text': '1 + 1 =', 'word': 'two', 'options': ['one', 'two', '1 + 1'], 'right': [1, 2]}]

LETTERS = ('{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n'
           'D. {{choices[3]}}\nAnswer:')
OF_TRIVIA = {'doc_to_text': LETTERS, 'doc_to_choice': ['A', 'B', 'C', 'D'],
             'doc_to_target': 'answer', 'metrics': ['acc']}
OF_ENDINGS = {'doc_to_text': '{{start}}', 'doc_to_choice': 'endings', 'doc_to_target': '{{label}}'}
OF_WORDS = {'doc_to_text': '{{text}}', 'doc_to_choice': '{{options}}'}
TASKS = {       # name: (questions, settings)
    'trivia_animals': (ANIMALS, OF_TRIVIA), 'trivia_rivers': (RIVERS, OF_TRIVIA),
    'endings': (ENDINGS, OF_ENDINGS | {'metrics': ['acc', 'acc_norm', 'acc_bytes']}),
    # as in WinoGrande: two contexts, one continuation
    'gaps': (GAPS, {'doc_to_text': 'answer', 'doc_to_target': '{{after}}', 'metrics': ['acc'],
                    'doc_to_choice': "{{[before + ' ' + options[0], before + ' ' + options[1]]}}"}),
    'named': (WORDS, OF_WORDS | {'doc_to_target': '{{word}}', 'metrics': ['acc']}),
    'against_nothing': (ENDINGS, OF_ENDINGS | {'metrics': ['acc', 'acc_mutual_info']}),
    'several': (WORDS, OF_WORDS | {'doc_to_target': '{{right}}', 'metrics': ['acc']}),
    'written': (WORDS, {'output_type': 'generate_until', 'doc_to_text': '{{text}}',
                        'doc_to_target': '{{word}}', 'metrics': ['exact_match'],
                        'generation_kwargs': {'until': ['\n'], 'max_gen_toks': 4}}),
    'last_word': (WORDS, {'output_type': 'loglikelihood', 'doc_to_text': '{{text}}',
                          'doc_to_target': ' {{word}}', 'metrics': ['acc']}),
    'whole_text': (WORDS, {'output_type': 'loglikelihood_rolling', 'doc_to_text': '',
                           'doc_to_target': '{{text}}', 'metrics': ['word_perplexity']})}


def write_tasks(folder):
    folder.mkdir(parents=True)
    for name, (rows, settings) in TASKS.items():
        data = folder / f'{name}.jsonl'
        data.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        settings = {'task': name, 'dataset_path': 'json', 'test_split': 'test', 'num_fewshot': 0,
                    'output_type': 'multiple_choice'} | settings
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

"""The recipes of the docs: each is applied to a copy of the repository, as its text says, and run.

A recipe is a section of a page. Its steps are python blocks behind a sentence that names the file
and where the block goes, and that ends with a colon:

    In `train.py`, add to `SCHEDULES`:          rows, at the end of that table
    In `train.py`, add to `TrainConfig`:        fields, at the end of that class
    At the end of `check_config`:               lines, at the end of that function
    instead of the last line of `learning_rate`:  lines, in place of its last statement
    In `fused_ce.py`, add the function:         before the table that the next step extends

`the table` may follow without naming the file again. Other blocks are examples.
"""

import ast
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from common import HERE

STEP = re.compile(r'([^\n](?:[^\n]|\n(?!\n|```))*):\n+```python\n(.*?)```', re.S)
PLACES = {      # how a step's sentence ends, with the name of the place
    'to': r'\b(?:to|in) `([A-Z_]+)`$', 'end': r'\b(?:[Aa]t the end of|add to) `(\w+)`$',
    'last': r'\binstead of the last line of `(\w+)`$', 'add': r'\badd the functions?\b()'}


def section(page, heading):
    """Return the text of a page under `heading`, up to the next heading of its level."""
    text = (HERE / 'docs' / page).read_text()
    level = re.search(rf'^(#+) {re.escape(heading)}$', text, re.M)
    assert level, f'docs/{page} has no section {heading!r}'
    return re.split(rf'^#{{2,{len(level[1])}}} ', text[level.end():], flags=re.M)[0]


def steps(text):
    """Yield (file, kind, name, block) of every step; kind: a key of PLACES."""
    file = None
    for sentence, block in STEP.findall(text):
        sentence = ' '.join(sentence.split())
        file = next(iter(re.findall(r'\b[Ii]n `([\w/]+\.py)`', sentence)), file)
        for kind, pattern in PLACES.items():
            if file and (found := re.search(pattern, sentence)):
                yield file, kind, found[1], block
                break


def statement(lines, beginning):
    """Return (first, last) line number, from 0, of the top-level statement that begins so."""
    for node in ast.parse(''.join(lines)).body:
        if lines[node.lineno - 1].startswith(beginning):
            return node.lineno - 1, node.end_lineno
    raise AssertionError(f'no statement begins with {beginning!r}')


def with_row(lines, last, block):
    """Return line number `last`, the end of a table, with a row before the closing brackets."""
    line = lines[last - 1].rstrip()
    for n in (1, 2):        # {rows}, or {... for x in (rows)}
        rows, brackets = line[:-n], line[-n:]
        comma = ',' if rows.strip() and not rows.endswith(',') else ''
        longer = f'{rows}{comma}\n{block}{brackets}\n'
        try:
            ast.parse(''.join([*lines[:last - 1], longer]))
            return longer
        except SyntaxError:
            pass
    raise AssertionError(f'no row can be added before the end of {line!r}')


def apply(text, root):
    """Edit the copy of the repository in `root` as the steps of a recipe say."""
    todo = list(steps(text))
    assert todo, 'no step in this section'
    for i, (file, kind, name, block) in enumerate(todo):
        block, lines = textwrap.dedent(block), (root / file).read_text().splitlines(keepends=True)
        if kind == 'to':
            _, last = statement(lines, f'{name} =')
            lines[last - 1] = with_row(lines, last, textwrap.indent(block, '    '))
        elif kind in ('end', 'last'):
            body = next(node.body for node in ast.parse(''.join(lines)).body
                        if getattr(node, 'name', None) == name)
            first = body[-1].lineno - 1 if kind == 'last' else body[-1].end_lineno
            lines[first:body[-1].end_lineno] = [textwrap.indent(block, '    ')]
        else:
            table = next(step[2] for step in todo[i:] if step[0] == file and step[1] == 'to')
            first, _ = statement(lines, f'{table} =')
            while lines[first - 1].startswith('#'):
                first -= 1
            lines.insert(first, f'{block}\n\n')
        (root / file).write_text(''.join(lines))


# the tests of the tables that the recipes extend, and ruff
ROOMS = ('align', 'compare', 'configs', 'layout', 'metrics', 'questions', 'report', 'study',
         'train')

PRELUDE = """
import json, sys, numpy as np, pytest, torch
from pathlib import Path
sys.path.insert(0, 'tests')
from common import logits_of, write_run
from data.show import show_tasks
from evaluate import load_tasks
from runtime.config import load_config
from runtime.errors import ConfigError
from runtime.eval_config import EvalConfig
from train import TrainConfig, check_config, learning_rate
"""

RECIPES = {     # (page, heading): a program, after PRELUDE, that shows that the recipe works
    ('metrics.md', 'Add a metric'): """
from results import compare, report, samples
runs = [write_run(Path('recipe', name), sharpness=x) for name, x in (('a', 3.0), ('b', 9.0))]
summary = report.summarize(samples.read_samples(runs[0] / 'samples.jsonl'), 'token', n_bootstrap=9)
assert summary['pooled']['sure_errors'] <= summary['pooled']['intervals']['sure_errors'][1]
tasks = {'mmlu': summary | {'norm': 'token', 'distribution': 'd'}}
assert all('sure' in table(tasks) for table in (report.to_markdown, report.to_latex, report.to_csv))
compare.main([*map(str, runs), '--n_bootstrap=9', '--out_dir=recipe/out'])
text = Path('recipe/out/compare.md').read_text()
assert '| sure errors |' in text and 'questions | 40 | sure errors | +' in text
""",
    ('losses.md', 'A loss of your own'): """
from fused_ce import fused_loss, poly1
from runtime.loss import parse_loss
hidden, head = torch.randn(5, 8), torch.randn(11, 8)
target = torch.arange(5)
p = (hidden @ head.T).softmax(1).gather(1, target[:, None])
loss, _ = fused_loss(hidden, head, target, parse_loss('poly1(2.0)'))
torch.testing.assert_close(loss, (-p.log() + 2 * (1 - p)).mean())
""",
    ('training.md', 'Batches and the loss'): """
cfg = load_config(TrainConfig, ['--schedule=wsd', '--lr=1.0', '--warmup_steps=1'])
assert [round(learning_rate(step, 101, cfg), 3) for step in (50, 80, 91)] == [1, 1, 0.5]
""",
    ('training.md', 'A setting of your own'): """
arguments = ['--model=m', '--data=d', '--out_dir=o', '--cache_dir=c', '--lr=1.0']
cfg = load_config(TrainConfig, [*arguments, '--min_lr=0.25', '--warmup_steps=1'])
check_config(cfg)
assert [learning_rate(step, 101, cfg) for step in (51, 96)] == [0.5, 0.25]
with pytest.raises(ConfigError, match='min_lr = -1.0'):
    check_config(load_config(TrainConfig, [*arguments, '--min_lr=-1']))
""",
    ('models.md', 'A family of your own'): """
import transformers
config = transformers.SeedOssConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
    num_attention_heads=2, num_key_value_heads=1, attn_implementation='eager')
theirs = transformers.SeedOssForCausalLM(config).eval()
with torch.no_grad():
    for p in theirs.parameters():
        p.copy_(torch.randn_like(p) / 3)
theirs.save_pretrained('seed_oss')
tokens = torch.arange(12)[None]
torch.testing.assert_close(logits_of(Path('seed_oss'), tokens), theirs(tokens).logits, rtol=1e-4,
                           atol=1e-4)
""",
    ('evaluation.md', 'A benchmark of your own'): """
Path('dev.jsonl').write_text(json.dumps({
    'context': 'Ann fell.', 'question': 'Why?', 'answerA': 'ice', 'answerB': 'joy',
    'answerC': 'sun', 'label': '2'}))
for prompt_format, options in (('mmlu', [' A', ' B', ' C']), ('own', [' ice', ' joy', ' sun'])):
    cfg = EvalConfig(tasks=('social_iqa:dev.jsonl',), shots=0, show=1, prompt_format=prompt_format)
    tasks = load_tasks(cfg)
    question, = tasks['social_iqa'].items
    assert question.options == options and question.answer == 1
    assert 'Ann fell. Why?' in show_tasks(tasks, None, cfg)
    assert question.subject == 'social situations'
""",
    ('alignment.md', 'A loss or method of your own'): """
from align import PAIR_LOSSES, AlignConfig, Pairs
from alignment.advantages import RL_METHODS
cfg = load_config(AlignConfig, ['--method=odpo', '--beta=0.5', '--gamma=2'])
pairs = Pairs(*torch.tensor([[-1.], [-3.], [4.], [5.], [-2.], [-2.]]))      # d = 2
torch.testing.assert_close(PAIR_LOSSES[cfg.method](pairs, cfg), torch.tensor([1.313262]))
method = RL_METHODS[load_config(AlignConfig, ['--method=dr_grpo_tokens']).method]
assert method.advantage(np.array([[1., 3.]])).tolist() == [[-1, 1]]
""",
    ('written_answers.md', 'A task of your own'): """
Path('test.jsonl').write_text(json.dumps({'question': 'Who?', 'answers': ['Ada']}))
task, = load_tasks(EvalConfig(tasks=('web_questions:test.jsonl',), shots=0)).values()
assert task.is_written and task.items[0].references == ['Ada']
""",
    ('written_answers.md', 'A confidence of your own'): """
from results import confidence
greedy = {'log_probs': [-0.1, -0.5], 'entropies': [0.0, 0.0]}
assert confidence.CONFIDENCES['surest'].function({'greedy': greedy}) == (1.0, greedy)
assert 'surest' in confidence.variants(EvalConfig())
""",
    ('evaluation.md', 'A prompt of your own'): """
Path('q.jsonl').write_text(json.dumps({'question': 'Why?', 'choices': ['a', 'b'], 'answer': 0,
                                       'subject': 'life'}))
cfg = EvalConfig(tasks=('q.jsonl',), shots=0, show=1, prompt_format='question_answer')
text = show_tasks(load_tasks(cfg), None, cfg)
assert 'Answer these questions about life.' in text and 'Q: Why?' in text and 'A:' in text
""",
}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """A copy of the repository in which all recipes are applied."""
    root = tmp_path_factory.mktemp('recipes') / 'copy'
    shutil.copytree(HERE, root, ignore=shutil.ignore_patterns('.*', 'assets', 'out', 'build'))
    for page, heading in RECIPES:
        apply(section(page, heading), root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize('page, heading', list(RECIPES))
def test_a_recipe_of_the_docs_works_in_a_copy_of_the_repository(page, heading, root):
    done = subprocess.run([sys.executable, '-c', PRELUDE + RECIPES[page, heading]], cwd=root,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_tests_that_a_contributor_runs_pass_with_every_recipe(root):
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-n0', '-p', 'no:cacheprovider', '-m', 'not slow',
         *(f'tests/test_{name}.py' for name in ROOMS)], cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:]

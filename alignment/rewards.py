"""Rewards for reinforcement learning: the rule of a task, a Python function or a reward model.

A reward is a function (prompt, answer, row) -> number: the text of the prompt's last message, the
text of an answer, and the prompt's row as it is in the file.
"""

import copy
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from modulefinder import ModuleFinder
from pathlib import Path

import numpy as np
import torch

from alignment.packed_answers import Answers, pack_answers
from data.chat import encode_answer
from data.eval_config import pick_template, training_settings
from data.files import require_text
from data.tokenizer import begins_with_bos, load_model_tokenizer
from written.benchmarks import WRITTEN_TASKS
from runtime import checkpoint, weights
from runtime.device import to_device
from runtime.digests import file_digest, json_digest
from runtime.errors import CheckpointError, ConfigError, DataError
from written.numbers import parse_probability, read_number
from runtime.ownership import note_inputs
from written.thinking import final_answer

# ---- Rewards -------------------------------------------------------------------------------------

def references(task, row):
    """Return the right answers of a row, texts; task: of written_answers.WRITTEN_TASKS."""
    # a file of prompts may have them under another name
    answers = task.row({'question': '', 'problem': ''} | row).references
    if not answers:
        raise DataError('wanted one reference answer or more')
    return [require_text(answer, 'a reference answer') for answer in answers]


def exact(task, prompt, answer, row):
    """1 if the answer is right by the rule of a task, else 0."""
    return float(task.grade(answer, references(task, row))['correct'])


def stated(task, answer, row):
    """Return (whether <answer>text</answer> is right, q of <confidence>q</confidence> after it).

    None for another format, or for what is no number from 0 to 1.
    """
    text, tag, number = (final_answer(answer) or '').rstrip().rpartition('<confidence>')
    begin, end = text.find('<answer>'), text.rfind('</answer>')
    number, closed, rest = number.partition('</confidence>')
    if not tag or not closed or rest or not 0 <= begin < end:
        return None
    q = None if read_number(number) is None else parse_probability(number)
    return None if q is None else (exact(task, '', text[begin:end], row), q)


def rlcr(task, prompt, answer, row):
    """0.5 for the format, 0.5 if correct, and 0.5 (1 - (correct - q)^2) for the confidence q.

    The format is that of `stated`; without it the reward is 0. The last term is Brier's, a proper
    score. RLCR, Damani 2025 (2507.16806).
    """
    if (judged := stated(task, answer, row)) is None:
        return 0.0
    correct, q = judged
    return 0.5 + 0.5 * correct + 0.5 * (1 - (correct - q) ** 2)


CLIPPED = 0.001     # from 0 and 1, where a logarithm is infinite


def log_score(task, prompt, answer, row):
    """The log score of q, 1 at its best and 0 at q = 0.032, plus 0.25 if correct; -3 without it.

    log q if correct, else log(1 - q), with q clipped to [0.001, 0.999]. Rewarding Doubt,
    Bani-Harouni 2025 (2503.02623), as in its code but for a factor of 10 there.
    """
    if (judged := stated(task, answer, row)) is None:
        return -3.0
    correct, q = judged
    q = min(max(q if correct else 1 - q, CLIPPED), 1 - CLIPPED)
    worst, best = math.log(CLIPPED) / 2, math.log(1 - CLIPPED)
    return (math.log(q) - worst) / (best - worst) + 0.25 * correct


def threshold(row):
    """Return the number `threshold` of a row, from 0 to below 1; 0.5 if it has none or null."""
    t = 0.5 if row.get('threshold') is None else row['threshold']
    if type(t) not in (int, float) or not 0 <= t < 1:
        raise DataError(f'"threshold" must be a number from 0 to below 1, got {t!r:.60}')
    return t


# up to the end of the clause, or an answer
UNKNOWN = re.compile(r"\bI (?:do not|don['’`]?t) know\b"
                     r'(?:(?!\b(?:but|answer is|answer:)|\\boxed|<)[^.,;:!?\n#])*+', re.IGNORECASE)


def withheld(task, text):
    """Return whether a text says "I don't know" and has no answer beside these words."""
    answer = task.extract(text)
    return bool(UNKNOWN.search(text)) and (
        answer is None or UNKNOWN.search(answer) is not None
        or task.extract(UNKNOWN.sub('', text)) is None)


def abstain(task, prompt, answer, row):
    """1 if correct, 0 for "I don't know", else -t / (1 - t): answer if you are right more than t.

    t is the number `threshold` of the row, by default 0.5. Wu 2025 (2512.19920).
    """
    t = threshold(row)
    if withheld(task, final_answer(answer) or ''):
        return 0.0
    return 1.0 if exact(task, prompt, answer, row) else -t / (1 - t)


def abstain_stated(task, prompt, answer, row):
    """The mean of `abstain` over all t, the answer withheld where its confidence q is below t.

    The integral over t from 0 to 1: q if correct, else q + log(1 - q), with q of at most 0.999; a
    proper score, `metrics.bas`. Without the format of `stated`, the least of it, -5.9.
    """
    correct, q = stated(task, answer, row) or (0.0, 1.0)
    q = min(q, 1 - CLIPPED)
    return q if correct else q + math.log(1 - q)


REWARDS = {f.__name__: f for f in (exact, rlcr, log_score, abstain, abstain_stated)}
STATED = 'rlcr', 'log_score', 'abstain_stated'      # they grade a text between <answer> tags


def check_row(kind, task, row):
    """Raise DataError for a row that the reward `kind` of a task cannot use."""
    references(task, row)
    if kind == 'abstain':
        threshold(row)


def load_reward(name, device, dtype, template):
    """Return the FunctionReward or the ModelReward of `name`; raises ConfigError.

    name: a key of REWARDS and a task, as in 'exact:gsm8k', without it 'qa'; a Python file, which is
    executed, may import the modules beside it, and defines reward(prompt, answer, row); or the
    folder of a reward model, which alone uses the other arguments
    """
    path, (kind, _, task) = Path(name), name.partition(':')
    if path.is_dir():
        return ModelReward(name, device, dtype, template)
    if kind in REWARDS and (task or 'qa') in WRITTEN_TASKS:
        task = WRITTEN_TASKS[task or 'qa']
        if kind in STATED and task.runs_code:
            raise ConfigError(f'reward = {name!r}: {kind} grades a text between <answer> tags, '
                              f'not a program; take exact:{name.partition(":")[2]}, with '
                              f'--run_code')
        return FunctionReward(name, partial(REWARDS[kind], task), name,
                              partial(check_row, kind, task))
    if path.suffix != '.py' or not path.is_file():
        raise ConfigError(f'reward = {name!r}, where there is no file or reward model; wanted '
                          f'{" or ".join(REWARDS)} of a task ({", ".join(WRITTEN_TASKS)}) as in '
                          f'exact:gsm8k, the folder of a reward model, or a Python file with a '
                          f'function reward(prompt, answer, row)')
    names, folder = {'__name__': path.stem, '__file__': name}, str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)     # last, so that no file there hides a module of ours
    finder = ModuleFinder([folder])     # of the modules beside it that it imports, also late
    try:
        exec(compile(path.read_bytes(), name, 'exec'), names)
        finder.run_script(str(path.resolve()))
    except (Exception, SystemExit) as error:      # it is the user's code
        raise ConfigError(describe(error, name)) from error
    if not callable(names.get('reward')):
        raise ConfigError(f'{name} has no function reward(prompt, answer, row)')
    files = sorted(Path(module.__file__) for module in finder.modules.values() if module.__file__)
    note_inputs(*files)
    digest = json_digest([[os.path.relpath(file, folder), file_digest(file)] for file in files])
    return FunctionReward(name, names['reward'], digest)


@dataclass
class FunctionReward:
    """A function (prompt, answer, row) -> number; `digest` is its name, or a hash of the code of a
    file and of the modules beside it.

    check: None, or (row) -> raises an error for a row that the function cannot use
    """
    name: str
    function: Callable
    digest: str
    check: Callable | None = None

    def scores(self, messages, texts, rows):
        """Return the rewards, float64 [prompts, n], of n answers to each prompt.

        messages: of each prompt; texts: of its answers; rows: its row. A DataError names the line
        of the file that failed.
        """
        return np.array([[self.score(turns[-1]['content'], text, row) for text in answers]
                         for turns, answers, row in zip(messages, texts, rows, strict=True)])

    def score(self, prompt, answer, row):
        try:
            # a copy, since the function may edit it, and other answers and steps need the row
            value = self.function(prompt, answer, copy.deepcopy(row))
        except (Exception, SystemExit) as error:
            reason = (f'reward = {self.name!r}: {error}' if isinstance(error, DataError) else
                      describe(error, self.name))
            raise DataError(f'{reason}; the prompt is {prompt!r:.100}') from error
        value = value.item() if isinstance(value, np.generic) else value
        # the square of a larger one is infinite in float32
        if not isinstance(value, (int, float)) or not abs(value) <= 1e18:
            raise DataError(f'reward = {self.name!r} returned {value!r:.100} for the prompt '
                            f'{prompt!r:.100}; wanted a number (int, float or of NumPy) between '
                            f'-1e18 and 1e18')
        return float(value)


def describe(error, name):
    """Return 'file:line: error' with the last line of the file `name` that led to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == name]
    if isinstance(error, SyntaxError) and error.filename == name:
        lines.append(error.lineno)
    return f'{name}{f":{lines[-1]}" if lines else ""}: {type(error).__name__}: {error}'


class ModelReward:
    """A reward model, which reads answers in its own template, with the token that ends them.

    template: of a model that no run of ours has trained
    """

    check = None        # any answer has a reward

    def __init__(self, folder, device, dtype, template):
        folder = checkpoint.fetch(folder)
        self.folder, self.device = folder, device
        self.model = checkpoint.load(folder, device, dtype, reward=True).eval()
        self.tokenizer = load_model_tokenizer(folder, self.model.config)
        settings = training_settings(folder)
        self.template = pick_template('auto', folder, self.tokenizer, template)
        self.add_bos = begins_with_bos(self.tokenizer, settings.get('add_bos'))
        self.digest = json_digest([checkpoint.fingerprint(folder), self.tokenizer.fingerprint,
                                   self.template, self.add_bos])

    @torch.no_grad()
    def scores(self, messages, texts, rows):
        """Return the rewards, float64 [prompts, n]; arguments as of `FunctionReward.scores`."""
        encoded = [self.encode(*pair) for pair in zip(messages, texts, strict=True)]
        longest = max(len(prompt) + max(map(len, answers)) for prompt, answers in encoded)
        context = self.model.config.max_position_embeddings
        if longest > context:
            raise DataError(f'{self.folder}: an answer has {longest} tokens with its prompt, and '
                            f'the context is {context}; lower max_length')
        # rows of a multiple of 128 tokens, since kernels are compiled for other divisors
        packed = pack_answers(*zip(*encoded, strict=True), -(-max(longest, 4096) // 128) * 128,
                               last=True)
        rewards = np.zeros((len(texts), len(texts[0])))
        for row in range(len(packed.tokens)):
            used = -(-np.count_nonzero(packed.owner[row] >= 0) // 128) * 128
            inputs = [to_device(x[row:row + 1, :used], self.device)
                      for x in (packed.tokens, packed.positions, packed.ends)]
            answers = Answers(packed, [row], self.device)
            values = self.model.rewards(answers.gather(self.model(*inputs)))
            rewards[tuple(packed.where[answers.part].T)] = values.double().cpu()
        if not np.isfinite(rewards).all():
            dtype = str(self.model.score.weight.dtype).removeprefix('torch.')
            raise CheckpointError(weights.bad_logits(
                f'reward = {self.folder}', self.folder, dtype, 'rewards'))
        return rewards

    def encode(self, messages, texts):
        """Return (tokens of the prompt, [tokens of each answer with that which ends it])."""
        encoded = [encode_answer(messages, text if text.strip() else 'x', self.tokenizer,
                                 self.template, self.add_bos) for text in texts]
        return encoded[0][0], [ids if text.strip() else ids[-1:]
                               for text, (_, ids) in zip(texts, encoded, strict=True)]

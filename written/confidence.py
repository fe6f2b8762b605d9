"""How sure a model is of an answer that it wrote: the table of confidences, shares, ECE floor.

A sample has the `greedy` answer and `answers` that are drawn at temperature 1, with the fields of
docs/evaluation.md#samples. A new confidence is a function (sample -> (confidence in [0, 1] or None,
the answer that is judged)) and an entry of CONFIDENCES. A question without one is left out.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import metrics
from results.columns import Heading, count_cell, measure_cell
from runtime.digests import json_digest
from written.numbers import parse_probability
from written.thinking import final_answer


def greedy_probability(sample):
    """The probability of the greedy answer's tokens: of this wording, not of its meaning."""
    return _exp(sample['greedy']['log_prob']), sample['greedy']


def length_normalized(sample):
    """exp of the mean log-probability per token, a geometric mean and no probability."""
    answer = sample['greedy']
    return _exp(answer['log_prob'] / answer['n_tokens']), answer


def mean_token_probability(sample):
    """The arithmetic mean of the token probabilities (Spiess et al. 2024, arXiv 2402.02047)."""
    return min(1.0, sample['greedy']['mean_prob']), sample['greedy']


def answer_span(sample):
    """The probability of the extracted answer, given all that precedes it: near 1 after a chain."""
    answer = sample['greedy']
    same = answer['answer'] is not None and answer['span'] == answer['answer']
    return _exp(answer['span_log_prob']) if same else None, answer


def agreement(sample):
    """The share of the samples in the first largest class, which is judged (Wang et al. 2022)."""
    answers = sample['answers']
    top, count = classes(answers)[0]
    return count / len(answers), answers[top]


def greedy_agreement(sample):
    """The share of the samples that agree with the greedy answer; unlike the largest, unbiased."""
    key, answers = sample['greedy']['key'], sample['answers']
    n = 0 if key is None else sum(answer['key'] == key for answer in answers)
    return n / len(answers), sample['greedy']


def class_entropy(sample):
    """1 - H / ln k for H = -sum_c n_c / k ln(n_c / k) over the classes of k > 1 samples: a score.

    H is the semantic entropy of Farquhar et al. 2024 with exact classes. The largest is judged.
    """
    answers = sample['answers']
    if len(answers) == 1:
        return None, answers[0]
    shares = np.array([count for _, count in classes(answers)]) / len(answers)
    entropy = -(shares * np.log(shares)).sum()
    return min(1.0, max(0.0, 1 - entropy / math.log(len(answers)))), agreement(sample)[1]


def stated(sample):
    """The number in <confidence> of the greedy answer, from 0 to 1 (RLCR, arXiv 2507.16806)."""
    text = final_answer(sample['greedy']['text']) or ''
    tag = text.rpartition('</confidence>')[0].rpartition('<confidence>')
    return parse_probability(tag[2]) if tag[1] else None, sample['greedy']


def _exp(log_prob):
    return math.exp(min(0.0, log_prob))


class Confidence(NamedTuple):
    """A row of the table."""
    title: str
    function: Callable | None = None    # as above; None: the prompts of `kind` decide
    option: str = ''            # the setting of evaluate.py that asks for it; '': always reported
    kind: str = 'SampleConfidence'      # its Task in written/tasks.py


GREEDY = Confidence('probability of the greedy answer', greedy_probability)     # the task's own
CONFIDENCES = {
    'length_normalized': Confidence('greedy answer, geometric mean of its token probabilities',
                                    length_normalized),
    'mean_token': Confidence('greedy answer, mean of its token probabilities',
                             mean_token_probability),
    'answer_span': Confidence('probability of what was extracted from the greedy answer',
                              answer_span),
    'agreement': Confidence('top class of the samples, its share', agreement),
    'greedy_agreement': Confidence('greedy answer, share of the samples that agree',
                                   greedy_agreement),
    'entropy': Confidence('top class of the samples, 1 - entropy / ln k', class_entropy),
    'stated': Confidence('greedy answer, its <confidence>', stated),
    'p_true': Confidence('P(True) of the greedy answer', None, 'p_true', 'PTrueConfidence'),
    'p_true_samples': Confidence('P(True) of the greedy answer, samples shown', None, 'p_true',
                                 'PTrueAmongSamples'),
    'p_ik': Confidence('P(IK) of a drawn answer, by a probe before it is written', None, 'p_ik',
                       'ProbeConfidence'),
    'verbalized_1s': Confidence('stated probability of a guess, one stage', None, 'verbalized',
                                'GuessConfidence'),
    'verbalized_2s': Confidence('stated probability of the greedy answer, two stages', None,
                                'verbalized', 'StatedConfidence')}


def variants(cfg):
    """Return the names of CONFIDENCES that an evaluation with these settings reports."""
    return [name for name, row in CONFIDENCES.items() if not row.option or getattr(cfg, row.option)]


def classes(answers):
    """Return [(index of its first answer, number of answers)] of each class, the largest first."""
    names = [answer['key'] if answer['key'] is not None else i for i, answer in enumerate(answers)]
    return [(names.index(name), count) for name, count in Counter(names).most_common()]


# what follows a label in any emphasis, on its line or the next one, up to the other label
LABEL = r'(?:guess|probability)(?: *\([^()\n]{0,80}\))?[*_"` ]*[:=]'
LABELED = {label: re.compile(
    rf'\b{label}\b(?: (?:that|of)\b[^:\n]{{0,80}})?(?: *\([^()\n]{{0,80}}\))?[*_"` ]*[:=]'
    rf'[\s*_"`]*+((?:(?!\b{LABEL}).)*)', re.IGNORECASE) for label in ('guess', 'probability')}


def stated_guess(text, lead):
    """Return (guess, probability) of an answer to `verbalized_1s` or `_2s`; None for what it lacks.

    lead: what the prompt ended with, '' in a chat. A text without labels is a probability alone.
    """
    if (final := final_answer(text)) is None:
        return None, None
    text = lead + final
    matches = [labeled.search(text) for labeled in LABELED.values()]
    if not any(matches):
        return None, parse_probability(text)
    guess, probability = (match and match[1].strip(' *_"`').rstrip(' *_"`,;|({')
                          for match in matches)
    return guess, parse_probability(probability or '')


def outcome(confidence, correct):
    """Return the fields of a sample with a single confidence; log_prob is at least log 1e-12."""
    c = float(confidence)
    right, wrong = math.log(max(c, 1e-12)), math.log(max(1 - c, 1e-12))
    return {'correct': bool(correct), 'confidence': c, 'log_prob': right if correct else wrong,
            'entropy': -c * right - (1 - c) * wrong}


def judged(question, value, answer):
    """Return the part of a sample with a confidence, `value`, in `answer`, a graded answer."""
    return outcome(value, answer['correct']) | {
        'predicted': answer['answer'] or '', 'expected': question.references[0]}


def facts(label, rows):
    """Return what the result of a task or confidence, `label`, says about {label: samples}."""
    task, _, name = label.partition('.')
    if not name:
        return {'written': shares(rows[task])}
    return {'ece_floor': ece_floor(rows[task], name),
            'unparsed': len(rows[task]) - len(rows[label]),
            'answers': digest_of_answers(rows[task])}


def digest_of_answers(rows):
    """Return a hash of the samples of a task with written answers, and of how they were graded."""
    return json_digest(sorted(sample['prompt'] for sample in rows), size=6)


def shares(samples):
    """Return further numbers of a task with written answers: shares of questions or samples."""
    greedy = [sample['greedy'] for sample in samples]
    drawn = [answer for sample in samples for answer in sample['answers']]
    answered = [answer for answer in greedy if answer['answer'] is not None]

    def share(answers, key, *values):
        return float(np.mean([answer.get(key) in values for answer in answers] or math.nan))

    n = min(len(sample['answers']) for sample in samples)
    return {'lenient_accuracy': share(greedy, 'correct', True),
            'strict_accuracy': share(greedy, 'strict', True),
            'accuracy_of_answered': share(answered, 'correct', True),
            'no_answer': 1 - len(answered) / len(greedy),
            'names_reference': share([answer for answer in greedy if not answer['correct']],
                                     'names_reference', True),
            'cut_off': share(greedy, 'reason', 'max_tokens', 'context'),
            'samples_no_answer': share(drawn, 'answer', None),
            'samples_cut_off': share(drawn, 'reason', 'max_tokens', 'context'),
            'sample_accuracy': share(drawn, 'correct', True),
            **{f'pass_at_{k}': float(np.mean([pass_at_k(s['answers'], k) for s in samples]))
               for k in (5, 10, 100) if k <= n}}


def pass_at_k(answers, k):
    """Return the unbiased estimate of pass@k: the probability that one of k answers is right.

    1 - C(n - right, k) / C(n, k) for k <= n: equation 1 of Chen et al. 2021, arXiv 2107.03374.
    """
    wrong = sum(not answer['correct'] for answer in answers)
    return 1 - math.comb(wrong, k) / math.comb(len(answers), k)


def ece_floor(samples, name, n_resamples=100, seed=0):
    """Return the mean ECE of a perfectly calibrated model with as many samples per question.

    name: 'agreement' or 'greedy_agreement'; None is returned for others. A parametric bootstrap:
    the right answer and k new samples are drawn by the shares of the classes of a question. Those
    of few samples are more extreme than the probabilities behind them, so it tends to be too low.
    """
    if name not in ('agreement', 'greedy_agreement'):
        return None
    random = np.random.default_rng(seed)
    confidence, correct = np.zeros((2, n_resamples, len(samples)))
    for i, sample in enumerate(samples):
        k, groups = len(sample['answers']), classes(sample['answers'])
        p = np.array([count for _, count in groups]) / k
        drawn = random.multinomial(k, p, n_resamples)
        judged = drawn.argmax(1)
        if name == 'greedy_agreement':
            keys = [sample['answers'][first]['key'] for first, _ in groups]
            key = sample['greedy']['key']
            if key is None or key not in keys:      # a class that was never drawn has probability 0
                continue
            judged = np.full(n_resamples, keys.index(key))
        confidence[:, i] = drawn[np.arange(n_resamples), judged] / k
        correct[:, i] = random.random(n_resamples) < p[judged]
    return float(np.mean([metrics.ece(*pair) for pair in zip(confidence, correct > 0)]))


# columns of the table of all confidences: measures, and the scalings whose ECE it has
COLUMNS = {'accuracy': 'accuracy', 'confidence': 'confidence', 'auroc': 'AUROC', 'prr': 'PRR',
           'brier_top_label': 'Brier', 'brier_skill': 'Brier skill', 'ece': 'ECE'}
SCALED = {'platt': 'ECE, Platt', 'isotonic': 'ECE, isotonic'}


def tables(task, tasks):
    """Return {title: cells} of the table of all confidences in the written answers to `task`."""
    lines = [['entry', 'questions', *map(Heading, COLUMNS, COLUMNS.values()), 'floor of ECE',
              *SCALED.values()]]
    for label, result in tasks.items():
        if label.partition('.')[0] == task:
            pooled = result['pooled']
            scaled = result.get('post_hoc', {}).get('reports', {})
            eces = [result.get('ece_floor'), *(scaled.get(name, {}).get('ece') for name in SCALED)]
            lines.append([label, count_cell(pooled),
                          *(measure_cell(pooled, key) for key in COLUMNS),
                          *('' if ece is None else f'{ece:.3f}' for ece in eces)])
    return {'Confidences in the written answers': lines}


def notes(result):
    """Return the notes below the table of a task with written answers, or of its confidences."""
    lines = []
    if shown := result.get('written'):
        of_answered = '; of those with an answer {accuracy_of_answered:.3f}'
        lines = [
            'greedy answers right: {lenient_accuracy:.3f} by lenient extraction, '
            '{strict_accuracy:.3f} by strict' + of_answered * (shown['no_answer'] < 1),
            'no answer could be extracted from {no_answer:.3f} of them, which count as wrong; '
            '{cut_off:.3f} were cut off',
            'samples: {sample_accuracy:.3f} right, {samples_no_answer:.3f} without an answer, '
            '{samples_cut_off:.3f} cut off']
        if shown.get('names_reference', 0) >= 0.05:
            lines.append('{names_reference:.3f} of the wrong greedy answers contain a reference, so'
                         ' the model may know more than this shows: ask for shorter answers, by '
                         'shots or the instruction in written/benchmarks.py')
        if passed := [f'pass@{key[8:]} = {{{key}:.3f}}' for key in shown if key[:8] == 'pass_at_']:
            lines.append(f'one of k samples right: {", ".join(passed)}')
        lines = [line.format(**shown) for line in lines]
    if (floor := result.get('ece_floor')) is not None:
        lines.append(f'a perfectly calibrated model would show an ECE of {floor:.3f} with '
                     f'{result["n"]} samples per question')
    if missing := result.get('unparsed'):
        lines.append(f'{missing} questions without this number are left out')
    return lines

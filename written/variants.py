"""Variants of questions with options: in several orders, without their content, P(True).

Each is asked after the questions themselves and has results of its own.
"""

from dataclasses import replace

import numpy as np

from data.tasks import OptionTask


def variant(task, name, scored, top_option):
    """Return the Task of a variant, as OptionTask.variant."""
    if name == 'p_true':
        # in each four shots, the first and last propose the correct option, else the next
        shots = {group: [q.proposing((q.answer + (i % 4 in (1, 2))) % len(q.options))
                         for i, q in enumerate(solved)] for group, solved in task.shots.items()}
        return task.changed(PTrueTask, name, scored, lambda question, sample:
                            question.proposing(top_option(sample)), shots)

    def reasked(question, sample):
        orders = question.orders.values()
        return replace(question, published=sample,
                       prompts=[*orders] if name == 'permuted' else question.content_free)
    kind = PermutedTask if name == 'permuted' else ContextualTask
    return task.changed(kind, name, scored, reasked, task.shots)


class PermutedTask(OptionTask):
    """The same questions with their options in several orders; a sample has the mean of them."""
    described = *OptionTask.described, 'permute'

    @staticmethod
    def sample(question, log_probs, n_tokens):
        n = len(question.options)
        orders = [{'order': order, 'log_probs': scores.tolist(), 'n_tokens': lengths.tolist()}
                  for order, scores, lengths in zip(question.orders, log_probs.reshape(-1, n),
                                                    np.reshape(n_tokens, (-1, n)))]
        if published := question.published:
            orders.insert(0, {'order': [*range(n)], 'log_probs': published['log_probs'],
                              'n_tokens': published['n_tokens']})
        first = {} if question.first is None else {'first': question.first}
        return {'answer': question.answer, 'options': question.options,
                'log_probs': mean_over_orders(orders), 'n_tokens': [1] * n,
                'orders': orders} | first

    def distribution(self, cfg):
        return super().distribution(cfg, f', mean over {cfg.permute} orders of the options')


def mean_over_orders(orders):
    """Return log-probabilities [K] whose softmax is the mean distribution over several orders.

    orders: dicts of 'order', the index of the option at each letter, and 'log_probs' of the
            letters. The probabilities sum to the mean of the sums of theirs, for `option_mass`
    """
    log_probs = np.array([[log_prob for _, log_prob in sorted(zip(x['order'], x['log_probs']))]
                          for x in orders])
    total = np.logaddexp.reduce(log_probs, axis=1, keepdims=True)
    mean = np.logaddexp.reduce(log_probs - total) - np.log(len(orders))
    return (mean + np.logaddexp.reduce(total) - np.log(len(orders))).tolist()


class ContextualTask(OptionTask):
    """Contextual calibration, Zhao et al. 2021: p / p of a prompt without content, normalized.

    `log_probs` of a sample are the logarithms of these ratios, with the mean over such prompts.
    """

    @staticmethod
    def sample(question, log_probs, n_tokens):
        published, free = question.published, log_probs.reshape(-1, len(question.options))
        ratios = published['log_probs'] - np.logaddexp.reduce(free) + np.log(len(free))
        return {'answer': question.answer, 'options': question.options,
                'log_probs': ratios.tolist(), 'n_tokens': published['n_tokens'],
                'content_free': free.tolist()}

    def distribution(self, cfg):
        return f'contextual calibration, {super().distribution(cfg)}'


class PTrueTask(OptionTask):
    """P(True): is the model's top option right? A sample has the probability of (A), True."""

    @staticmethod
    def sample(question, log_probs, n_tokens):
        true, false = log_probs
        log_p = -np.logaddexp(0, [false - true, true - false])
        return {'correct': question.answer == 0, 'confidence': float(np.exp(log_p[0])),
                'log_prob': float(log_p[question.answer]),
                'entropy': float(-(np.exp(log_p) * log_p).sum())}

    def distribution(self, cfg):
        return f'P(True) of the top option, {super().distribution(cfg)}'

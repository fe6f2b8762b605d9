"""Pairs of answers for a judge: which of the two is better? Read from preferences.

The order of the answers depends on their texts alone, since most files list the better one first. A
model is asked in both orders.
"""

import itertools

from data.chat import check_messages
from data.files import has_fields, parsed, read_rows, text_digest, without_bad
from data.items import draw
from data.messages import without_nulls
from data.preferences import (PREFERENCE_PATTERNS, SUBJECT, join_answers, scored_answers,
                              to_ranking)
from data.prompts import Prompt
from data.questions import Loaded, Question, of_languages
from data.tasks import OptionTask, chat_words
from runtime.errors import DataError
from runtime.sources import fetch
from written.variants import PermutedTask

QUESTION = 'Which answer to the last message is better?\nBetter answer:'


def to_pairs(row, place):
    """Return a Question for every two answers of a row in a known format, see `to_ranking`.

    `answer` is the index of the better one. It means nothing in the splits 'tied' (equal scores)
    and 'unlabeled' (no scores).
    """
    split, row = 'test', without_nulls(row)
    if has_fields(row, 'prompt', 'responses') and 'scores' not in row:
        n = len(row['responses']) if isinstance(row['responses'], list) else 0      # is refused
        split, row = 'unlabeled', row | {'scores': [0] * n}
    ranking, pairs = to_ranking(row), []
    check_messages([*ranking.prompt, {'role': 'assistant', 'content': ''}])
    subject = next((str(row[key]) for key in SUBJECT if row.get(key)), '')
    conversation = ''.join(f'{message["role"].capitalize()}: {message["content"].strip()}\n\n'
                           for message in ranking.prompt)
    for pair in itertools.combinations(scored_answers(ranking), 2):
        texts, scores = zip(*pair)
        order, orders = sorted((0, 1), key=lambda i: text_digest(texts[i])), {}
        for shown in ((0, 1), (1, 0)):
            answers = ''.join(f'Answer {letter}:\n{texts[order[i]].strip()}\n\n'
                              for letter, i in zip('AB', shown))
            orders[shown] = Prompt(conversation + answers + QUESTION, [' A', ' B'])
        tied = split == 'test' and scores[0] == scores[1]
        pairs.append(Question(
            '', *orders[0, 1][:2], order.index(scores[1] > scores[0]), subject,
            language=str(row.get('language') or ''), place=place,
            digest=text_digest(ranking.prompt, sorted(texts)), orders=orders,
            split='tied' if tied else split, prompts=[*orders.values()], published={},
            first=order.index(0)))
    if not pairs:
        raise DataError('fewer than two different answers')
    return pairs


def load_pairs(name, cfg):
    """Return questions.Loaded of a task 'judge:source', the pairs of the split 'test' first."""
    if not (source := name.partition(':')[2]):
        raise DataError('judge: no preferences given; use --tasks=judge:FILE, with a file, folder '
                        'or hub dataset in a format of docs/alignment.md')
    if cfg.shots:
        raise DataError(f'{cfg.shots} shots wanted, but a judge has none; use --shots=0')
    pairs, bad = [], []
    rows = join_answers(read_rows(*fetch(source, PREFERENCE_PATTERNS, cfg.data_revision)))
    for new in without_bad((parsed(*row, to_pairs, row[0]) for row in rows), cfg.on_bad_row, bad):
        for pair in new:
            pair.id = str(len(pairs) + len(bad))
            pairs.append(pair)
    if cfg.languages != ('all',):
        pairs = of_languages(pairs, cfg.languages, source)
    known, *others = ([pair for pair in pairs if pair.split == split]
                      for split in ('test', 'tied', 'unlabeled'))
    if not known:
        raise DataError(f'{source} has no pair of which one answer is better ({len(pairs)} tied or '
                        f'without scores, {len(bad)} bad rows{f": {bad[0]}" if bad else ""}); a '
                        f'judge is measured on such pairs')
    # of each kind as many: a sample of all pairs together might have none with a better answer
    drawn = [draw(of_kind, cfg.limit, cfg.seed) for of_kind in (known, *others)]
    return Loaded([*itertools.chain(*drawn)], {}, bad, len(known))


class JudgeTask(PermutedTask):
    """Which of two answers is better? A sample has the mean over both orders."""
    settings = ()
    described = 'chat', 'shots'
    others = 'tied or without scores'
    all_metrics = True
    identity = *OptionTask.identity, 'published', 'first'

    read = staticmethod(load_pairs)

    def distribution(self, cfg):
        return f'pairwise judge, mean over both orders of the answers, 0 shots, {chat_words(cfg)}'


TASK = JudgeTask

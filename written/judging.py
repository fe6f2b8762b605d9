"""What a pairwise judge shows besides accuracy and calibration: bias, ties and win rates.

A sample has `orders`, in which the answers were shown; `answer`, the index of the better one;
`first`, of the one that the file lists first; and a split of `judges.to_pairs`.
"""

import numpy as np

import metrics
from compare import significance
from results.samples import of_split

TIE = 2     # neither answer is better, or the judge's choice changes with the order


def verdicts(samples):
    """Return the answer that each order prefers [n, 2], and the mean over both orders [n]."""
    by_order = [[order['order'][np.argmax(order['log_probs'])] for order in s['orders']]
                for s in samples]
    mean = [int(np.argmax(s['log_probs'])) for s in samples]
    return np.array(by_order, int).reshape(-1, 2), np.array(mean, int)


def facts(samples):
    """Return the numbers of docs/evaluation.md under `judge`, with nan where one is undefined."""
    known, tied, unlabeled = (of_split(samples, split) for split in ('test', 'tied', 'unlabeled'))
    by_order, chosen = verdicts(known)
    shown_first = by_order == [[s['orders'][k]['order'][0] for k in (0, 1)] for s in known]
    pairs, _ = verdicts(known + tied)
    by_judge = np.where(pairs[:, 0] == pairs[:, 1], pairs[:, 0], TIE)
    labels = np.array([s['answer'] for s in known] + [TIE] * len(tied))
    values = {'position_bias': float(shown_first.mean() - 0.5), 'tied': len(tied),
              'ties': float((by_judge[:len(known)] == TIE).mean()),
              'ties_of_tied': float((by_judge[len(known):] == TIE).mean()) if tied else np.nan,
              'kappa_with_ties': metrics.cohen_kappa(labels, by_judge), 'unlabeled': len(unlabeled)}
    if unlabeled:
        first, first_known = ([s['first'] for s in x] for x in (unlabeled, known))
        judged, right = verdicts(unlabeled)[1] == first, chosen == labels[:len(known)]
        wins = labels[:len(known)] == first_known
        rate, low, high = significance.corrected_rate(judged, chosen == first_known, wins)
        values['win_rate'] = {
            'judged': float(judged.mean()), 'corrected': rate, 'low': low, 'high': high,
            'sensitivity': float(right[wins].mean()) if wins.any() else np.nan,
            'specificity': float(right[~wins].mean()) if not wins.all() else np.nan}
    return values


def notes(result):
    """Return the notes below the table of a judge, as lines."""
    judge = result['judge']
    lines = ['position bias: the answer shown first is chosen {position_bias:+.3f} more often than '
             'half of the time; {ties:.3f} of the choices change with the order'.format(**judge)
             + '; of the tied pairs {ties_of_tied:.3f}'.format(**judge) * (judge['tied'] > 0),
             "Cohen's kappa {kappa:.3f}; with {tied} tied pairs, and a choice that changes as a "
             'tie, {kappa_with_ties:.3f}'.format(**result['pooled'], **judge)]
    if win := judge.get('win_rate'):
        lines.append(
            'win rate of the first answer in {unlabeled} pairs without scores: {judged:.3f} by '
            'the judge, corrected {corrected:.3f} [{low:.3f}, {high:.3f}] with its sensitivity '
            '{sensitivity:.3f} and specificity {specificity:.3f} in the pairs with scores'.format(
                **judge, **win))
        if np.isnan(win['corrected']):
            lines.append('a win rate can be corrected if the pairs with scores prefer the first '
                         'answer in some rows and the second in others, and the judge is better '
                         'than chance there')
    return lines

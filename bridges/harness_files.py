"""Convert lines of lm-evaluation-harness's sample files to the form of our samples."""

import ast
import contextlib
import hashlib
import json
import re
from pathlib import Path

import numpy as np

from results.samples import option_lengths
from runtime.errors import DataError
from runtime.readers import parse_json


class UnusableTaskError(DataError):
    """A task of lm_eval is not multiple choice, or a question has several right options."""


def harness_task(path) -> tuple[str, str, str]:
    """Return (task, subtask, date) of samples_<subtask>_<date>.jsonl, else ('samples', '', '').

    The task of mmlu_anatomy is mmlu if results_<date>.json beside it has that group.
    """
    path = Path(path)
    match = re.fullmatch(r'samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl(?:\.gz)?', path.name)
    if not match:
        return 'samples', '', ''
    subtask, date = match.groups()
    groups = []
    for file in path.parent.glob(f'*_{date}.json'):
        content = parse_json(file.read_bytes(), file)
        members = isinstance(content, dict) and (content.get('group_subtasks') or {})
        if not isinstance(members, dict):
            raise DataError(f'{file} is not what lm_eval wrote; remove it, or evaluate again')
        groups += [group for group in members if subtask.startswith(f'{group}_')]
    return max(groups, key=len, default=subtask), subtask, date


def harness_sample(row, norm='token') -> dict:
    """Convert a line that lm_eval --log_samples wrote (0.4.0 to 0.4.13) to the form of our samples.

    n_tokens are the `option_lengths` of one token each. Raises UnusableTaskError, and ValueError if
    `acc` of the line contradicts the answer.
    """
    try:
        pairs = row['filtered_resps']
        calls = row['arguments']
        # before 0.4.3 a list of [context, option]; None in parquet
        options = [call.get('arg_1') if isinstance(call, dict) else call[-1] for call in (
            calls.values() if isinstance(calls, dict) else calls) if call]
        if 'acc_mutual_info' in row:    # the second half is without the question
            pairs, options = pairs[:len(pairs) // 2], options[:len(options) // 2]
        if len(pairs) < 2 or type(pairs[0]) is not list:
            raise UnusableTaskError('not multiple choice, so there are no probabilities of options:'
                                    ' the model wrote an answer, or a single text was scored')
        if wrong := [pair for pair in pairs if len(pair) != 2]:
            raise ValueError(f'filtered_resps holds {wrong[0]!r:.40}; wanted the log-probability '
                             f'of each option, and whether it is the largest')
        if len(options) != len(pairs):
            raise ValueError(f'{len(pairs)} results of {len(options)} calls')
        texts = [option[option[:1].isspace():] for option in options]
        # before 0.4.3 without its hash
        digest = row.get('doc_hash') or hashlib.sha256(json.dumps(
            row['doc'], indent=2, ensure_ascii=False).encode()).hexdigest()
        sample = {'id': f'{row["doc_id"]}:{digest[:16]}', 'options': options,
                  'log_probs': [float(log_prob) for log_prob, _ in pairs],
                  'n_tokens': option_lengths(texts, [1] * len(texts), norm)}
        target, top = _single(row['target']), int(np.argmax(sample['log_probs']))
        if len(texts) == 2 and texts[0] == texts[1]:    # after two contexts, as in WinoGrande
            answer = top if row['acc'] else 1 - top
        else:
            answer = int(target) if target.isdecimal() else (texts + [target]).index(target)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'not a line of lm_eval --log_samples ({error!r:.80})') from None
    if answer >= len(texts) or row.get('acc', top == answer) != (top == answer):
        kind = UnusableTaskError if target.startswith('[') else ValueError
        raise kind(f'its target, {row["target"]!r}, is not the only right option')
    return sample | {'answer': answer}


def _single(target):
    """Return a target as text; of a list of one, also if it is printed, its element."""
    if isinstance(target, str) and target.startswith('['):
        with contextlib.suppress(ValueError, SyntaxError):
            target = ast.literal_eval(target)
    return str(target[0] if isinstance(target, list) and len(target) == 1 else target)


def repeats(sample, filter, logged) -> bool:
    """Return whether a sample of lm_eval is in `logged`, {id: (sample, filter)}; else add it."""
    first, first_filter = logged.setdefault(sample['id'], (sample, filter))
    if first != sample:
        why = (f'of the filters {first_filter} and {filter}; keep the lines of one filter'
               if filter != first_filter else
               'of several models or calls; give each of them a file of its own')
        raise ValueError(f'question {sample["id"]} is there twice with other log-probabilities, '
                         f'{why}')
    return first is not sample
